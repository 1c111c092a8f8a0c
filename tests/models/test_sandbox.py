"""Chat templates in their sandbox: whatever they are, they do no harm; and what good ones do is what Jinja does."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pipeline.client import ChatTemplate, TemplateError
from pipeline.models.sandbox_operations import Metered
from tests.models.test_chat_template import CHATML, CONVERSATIONS, folder, reference

# Every operation that stands in the place of one of Jinja's.
EVERYTHING = """{%- macro item(name, kind='text') -%}
{{ name }}: {{ kind }}{{ caller() if caller else '' }}{%- endmacro %}
{%- set ns = namespace(seen=[], text='', n=0) %}
{%- for m in messages[::-1] if m.role != 'system' %}{% set ns.seen = ns.seen + [m.role] %}{% endfor %}
{{ ns.seen }} {{ ns.seen | join(', ') }} {{ ns.seen[1:] }} {{ messages | map(attribute='role') | list }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ messages | rejectattr('role', 'in', ['user']) | list }}
{%- for m in messages %}
{{ loop.index }}/{{ loop.length }} {{ m['role'] ~ ':' ~ loop.last ~ 1.5 ~ none }} {{ m.content[:3] }}
{%- if 'b' in m.content or m.content.startswith(('H', ' ')) and m.role not in ns.seen[:1] %} b{% endif %}
{%- set ns.text = ns.text + m.content.split(' ')[-1].strip('\\n').replace('e', 'EE') %}
{%- set ns.n = ns.n + loop.index0 * 3 % 5 - 1 %}
{{ '%s|%5d|%%' % (m.role, ns.n) }} {{ '{}-{:>4}-{a!r}'.format(m.role, ns.n, a=[m.role]) }}
{{ '-' * 3 + 'x' * ns.n }} {{ 2 ** 3 }} {{ m.content[-2:] | trim }} {{ m.items() | list }} {{ m.get('name', 'none') }}
{{ m.name is defined }} {{ m.name | default('?') }} {{ m.content | upper | lower | title }}
{{ m | tojson }} {{ m | tojson(indent=2) }} {{ m | dictsort }} {{ m.content | replace('a', '<a>') | e }}
{{ m.content | indent(4, true) }} {%- call item(m.role) %}!{% endcall %}{{ item('x', kind=m.role) }}
{{ m.content == ns.text }} {{ [1, 2] == [1, 2] }} {{ (1, 'a') }} {{ 1 < ns.n < 9 }} {{ [1] + [2] }}
{%- endfor %}
{{ ns.text }} {{ range(3) | sum }} {{ [3, 1, 2] | sort }} {{ ['b', 'a', 'b'] | unique | list }} {{ [1, 2] | max }}
{{ 3.14159 | round(2) }} {{ {'k': [1, {'n': none}], 'z': true} }} {{ {'k': ns.seen} | tojson }} {{ dict(a=1) }}
{{ '5' | int + 1 }} {{ messages | groupby('role') | length }}
{%- for k, v in {'a': 1, 'b': 2} | items %}{{ k }}{{ v }}{{ loop.cycle('x', 'y') }}{{ loop.changed(k) }}{% endfor %}
{%- set joined %}{% for c in 'abc' recursive %}{{ c }}{{ loop('z') if loop.depth < 2 }}{% endfor %}{% endset %}
{{ joined }}{% filter upper %}f{% endfilter %}"""


def test_every_operation_gives_what_jinja_gives(tmp_path: Path) -> None:
    path = folder(tmp_path, EVERYTHING)
    theirs, ours = reference(path), ChatTemplate.from_directory(path)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == expected


def test_there_is_room_for_every_conversation() -> None:
    """Thousands of turns, or megabytes in one: what is allowed grows with what is given."""
    ours = ChatTemplate(CHATML)
    turns = [{"role": role, "content": "text " * 20} for _ in range(5000) for role in ("user", "assistant")]
    assert ours.render(turns).count("<|im_start|>") == len(turns) + 2
    assert ours.render([{"role": "user", "content": "é" * 20_000_000}]).count("é") == 20_000_000


SETS = "{% set ns = namespace(x='a', l=[1], m=[1], t=(1,), n=3) %}"
TIMES = SETS + "{% for i in range(99) %}"
GROWING = (
    "ns.x + ns.x", "ns.x ~ ns.x", "[ns.x, ns.x] | join", "''.join([ns.x, ns.x])", "ns.x.replace('a', 'aa')",
    "ns.x | replace('a', 'aa')", "'%s%s' % (ns.x, ns.x)", "'{0}{0}'.format(ns.x)", "(ns.x | e) + (ns.x | e)",
)  # fmt: skip
NESTING = SETS + (
    "{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}"
    "{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
)
READING = (
    "ns.l", "ns.l | tojson", "(ns.l | string) | length", "ns.l == ns.m", "ns.l in [ns.m]", "ns.l is eq ns.m",
    "[ns.l].index(ns.m)", "'%s' % [ns.l]", "{ns.t: 1}", "messages[0][ns.t]", "messages[0].get(ns.t)",
    "[ns.t] | unique | list",
)  # fmt: skip
LOOPING = "{% for i in range(99999) %}"
HARMFUL = {
    "a way out": [
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}", "{{ '{0.x}'.format_map(messages) }}", "{% include 'a' %}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ],
    "loops": [
        "{{ lipsum(n=10**8) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        LOOPING + LOOPING + "{% endfor %}{% endfor %}",
        LOOPING + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        LOOPING + "{{ range(99999) | select('none') | first }}{% endfor %}",
        LOOPING + "{{ range(99999) | sort | max }}{% endfor %}",
        LOOPING + "{{ 'x' in range(99999) }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
        "{{ [-10**15] | map('count ') | list }}" + LOOPING + LOOPING + "{% endfor %}{% endfor %}",
        "{{ '' | indent(-10**15) }}" + LOOPING + "{{ range(99999) | sort | max }}{% endfor %}",
        "{{ 'a' | indent(1e999 - 1e999) }}" + LOOPING + "{{ range(99999) | sort | max }}{% endfor %}",
        "{% macro m(a=" + "+".join("1" * 200) + ") %}{% endmacro %}" + LOOPING + "{{ m() }}{% endfor %}",
    ],
    "long texts": [
        "{{ 'x' * 10**10 }}", "{{ 10**10 * [1] }}", "{{ 9**9999999999 }}", "{{ 'x'.center(10**9) }}",
        "{{ 'x'.zfill(10**9) }}", "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (10**9, 1) }}",
        "{{ '%((a)b)999999999d' % {'(a)b': 1} }}", "{{ '{:999999999d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 10**9) }}", "{{ ('{:999999999}' | safe).format(1) }}", "{{ 'a' | indent(10**9, true) }}",
        "{{ messages | tojson(indent=10**9) }}", "{{ [1, 2] | tojson(separators=('x' * 9999, ':')) }}",
        LOOPING + "{{ '" + "x" * 9999 + "' }}{% endfor %}", "{% set n = 9 ** 1000 %}" + LOOPING + "{{ n }}{% endfor %}",
        "{{ 1.5 | round(10**9, 'ceil') }}", "{{ (1).to_bytes(10**10) }}",
        "{{ '\\t'.expandtabs(10**9) }}", "{{ strftime_now('%Y' * 10**8) }}",
        "{% set b = 'x' * 10**6 %}" + LOOPING + "{{ b }}{% endfor %}",
        *("{% set b = 'é' * 99999 %}{{ " + use + " }}" for use in ("b | list", "dict(*b)", "b | join", "''.join(b)")),
        "{{ ('f' * 9999) | int(0, 16) }}",
    ],
    "texts that grow": [
        *(TIMES + "{% set ns.x = " + body + " %}{% endfor %}" for body in GROWING),
        TIMES + "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        TIMES + "{% set ns.l = ns.l + ns.l %}{% endfor %}",
        TIMES + "{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}" + TIMES + "{% set ns.x = m(ns.x) %}{% endfor %}",
    ],
    "small values that hold themselves again and again": [NESTING + "{{ " + use + " }}" for use in READING],
    "depth": [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
        "{% for a in [1] %}" * 50 + "{% endfor %}" * 50, "{% if 1 %}" * 500 + "{% endif %}" * 500,
        "{{ 1" + " * 1" * 9999 + " }}",
        SETS + "{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    ],
    "values": [
        "{{ 10.0 ** 400 }}", "{{ " + "9" * 9999 + " }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "x" * (1 << 18),
        "{{ x | pprint }}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", HARMFUL)
def test_a_template_can_do_no_harm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the sandbox each of them hangs, fills the memory, reaches Python, or raises what nobody expects."""
    monkeypatch.setattr(Metered, "steps", 20_000)
    monkeypatch.setattr(Metered, "characters", 1_000_000)
    for source in HARMFUL[kind]:
        with pytest.raises(TemplateError, match=r"does not take these messages: .+"):
            ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_what_a_template_may_take_of_the_memory() -> None:
    tracemalloc.start()
    try:
        for source in HARMFUL["texts that grow"]:
            with pytest.raises(TemplateError):
                ChatTemplate(source).render([{"role": "user", "content": "a"}])
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(TemplateError, match=r"an integer of more than 4096 bits \(line 3\)$"):
        ChatTemplate("{{ 1 }}\n\n{{ 9 ** 9999 }}").render([{"role": "user", "content": "a"}])


def test_a_date_is_todays_or_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(CONVERSATIONS[0], strftime_now=lambda _: "26 Jul 2024") == "26 Jul 2024"
