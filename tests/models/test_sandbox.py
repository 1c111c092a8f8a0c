"""Chat templates in Jinja's sandbox: no way out, bounded costs, and the text that transformers renders."""

from __future__ import annotations

import contextlib
import copy
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.client import ChatTemplate, TemplateError
from pipeline.errors import CheckpointError
from pipeline.models.template_trial import _OUT_OF_MEMORY, try_template
from tests.models.test_chat_template import CHATML, CONVERSATIONS, folder, reference

# Every operation that templates use.
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
    """Thousands of turns, or megabytes in one."""
    ours = ChatTemplate(CHATML)
    turns = [{"role": role, "content": "text"} for _ in range(2000) for role in ("user", "assistant")]
    assert ours.render(turns).count("<|im_start|>") == len(turns) + 2
    assert ours.render([{"role": "user", "content": "é" * 5_000_000}]).count("é") == 5_000_000


MESSAGES = [{"role": "user", "content": "a"}]
ESCAPES = [
    "{{ ''.__class__.__mro__ }}", "{{ ''['__class__'] }}", "{{ ''|attr('__class__') }}", "{{ messages.append(1) }}",
    "{{ messages.clear() }}", "{{ messages[0].update({'role': 'x'}) }}", "{{ messages[0].pop('role') }}",
    "{{ cycler.__init__.__globals__ }}", "{{ namespace.__init__.__globals__.os }}", "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}", "{{ strftime_now.__globals__ }}", "{{ self.__init__.__globals__ }}",
    "{{ '{0.x}'.format_map(messages) }}", "{{ '{0.__class__}'.format(messages) }}",
    "{{ ('{0.__class__.__mro__}' | safe).format(1) }}", "{{ messages | map(attribute='__class__') | join }}",
    "{{ (messages | map('upper')).gi_frame }}", "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "{% for m in messages %}{{ loop.__class__.__mro__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}", "{{ messages | map('attr', '__class__') | join }}",
    "{{ messages | sum(start='__class__') }}", "{% include 'a' %}", "{% import '/etc/passwd' as p %}",
    "{% extends 'a' %}", "{{ open('/etc/passwd') }}", "{{ lipsum(n=10**8) }}",
]  # fmt: skip


def test_no_template_reaches_python_or_changes_what_it_is_given() -> None:
    for source in ESCAPES:
        messages = copy.deepcopy(MESSAGES)
        # A refusal, or nothing.
        with contextlib.suppress(TemplateError):
            assert ChatTemplate(source).render(messages) == "", source
        assert messages == MESSAGES, source


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
COSTLY = {
    "loops": [
        "{% for i in range(10**9) %}{% endfor %}",
        LOOPING + LOOPING + "{% endfor %}{% endfor %}",
        LOOPING + "{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
        LOOPING + "{{ range(99999) | select('none') | first }}{% endfor %}",
        LOOPING + "{{ range(99999) | sort | max }}{% endfor %}",
        LOOPING + "{{ 'x' in range(99999) }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
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
        "{{ 10.0 ** 400 }}", "{{ " + "9" * 9999 + " }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}",
    ],
}  # fmt: skip


# Forks a process for each template that it reads, as small as the one of a trial, and prints how each ends.
TRIALS = """
import json, os, sys
from pipeline.models.chat_template import ChatTemplate
from pipeline.models.template_trial import _OUT_OF_MEMORY, main

ChatTemplate("{{ messages }}").compile()
for source in json.load(sys.stdin):
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _OUT_OF_MEMORY
        try:
            code = main(ChatTemplate(source), 0.1, 64)
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("kind", COSTLY)
def test_a_costly_template_ends_at_the_limits_or_before(kind: str) -> None:
    """Jinja bounds neither time nor memory: the kernel ends the process, or the template fails by itself."""
    done = subprocess.run(
        [sys.executable, "-c", TRIALS],
        input=json.dumps(COSTLY[kind]),
        text=True,
        capture_output=True,
        check=True,
    )
    ends = dict(zip(COSTLY[kind], map(int, done.stdout.split()), strict=True))
    allowed = (0,) if kind == "values" else (0, _OUT_OF_MEMORY, -signal.SIGPROF)
    assert {source: code for source, code in ends.items() if code not in allowed} == {}


LIMITS = [
    ("{% for m in messages %}" + LOOPING + LOOPING + "{% endfor %}{% endfor %}{% endfor %}", "processor time, for a s"),
    ("{% if messages | length > 9 %}{{ 'x' * 10**10 }}{% endif %}", "MiB of memory, for a long conversation"),
    ("{% if tools %}{% for t in tools * 10**10 %}{% endfor %}{% endif %}", "MiB of memory, for a tool conversation"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "told"), LIMITS)
def test_a_trial_names_the_limit_and_the_conversation(tmp_path: Path, source: str, told: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(CheckpointError, match=told):
        try_template(tmp_path, 1.0, 128)


def test_a_trial_is_about_limits_alone(tmp_path: Path) -> None:
    try_template(tmp_path)
    for source in ("{% if %}", "{{ raise_exception('no') }}", CHATML):
        (tmp_path / "chat_template.jinja").write_text(source)
        try_template(tmp_path)


def test_a_refusal_names_the_line() -> None:
    with pytest.raises(TemplateError, match=r"division by zero \(line 3\)$"):
        ChatTemplate("{{ 1 }}\n\n{{ 1 / 0 }}").render(MESSAGES)


def test_a_date_is_todays_or_the_callers() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}")
    assert template.render(CONVERSATIONS[0], strftime_now=lambda _: "26 Jul 2024") == "26 Jul 2024"
    assert template.render(CONVERSATIONS[0])[-4:].isdecimal()
