"""Chat templates: the same text as transformers, for our checkpoint and for the well-known styles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import ChatTemplate, Refused, TemplateError
from pipeline.client.prompt import render_prompt

CHECKPOINT = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "support-target"

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if loop.index0 == 0 and system_message %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA_3_1 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

LOOPS = """{%- set ns = namespace(seen=0) %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{%- continue %}{%- endif %}
    {%- if ns.seen > 2 %}{%- break %}{%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{{ eos_token }}{%- endgeneration %}
    {%- else %}
        {{- message | tojson }}{{ unk_token }}
    {%- endif %}
{%- endfor %}"""

STYLES = {"chatml": CHATML, "llama-2": LLAMA_2, "llama-3.1": LLAMA_3_1, "loops": LOOPS}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": " Be <brief> & kind. "}, {"role": "user", "content": "안녕 😀\n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ],
]
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken", "lstrip": False}}


def folder(tmp_path: Path, template: object = None, **config: object) -> Path:
    """A tokenizer's folder, with the files that transformers needs to load it."""
    (tmp_path / "tokenizer.json").write_text((CHECKPOINT / "tokenizer.json").read_text("utf-8"), "utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS, **config}
    if template is not None:
        settings["chat_template"] = template
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return tmp_path


def reference(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("style", STYLES)
def test_renders_as_transformers(tmp_path: Path, style: str) -> None:
    path = folder(tmp_path, STYLES[style])
    theirs, ours = reference(path), ChatTemplate.from_directory(path)
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"q": "<string>"}}}]
    for messages in CONVERSATIONS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert ours.render(messages, add_generation_prompt=prompt) == expected
        extra = {"date_string": "1 Jan 2026"}
        expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False, **extra)
        assert ours.render(messages, tools=tools, add_generation_prompt=False, **extra) == expected


def test_renders_our_checkpoint_as_transformers() -> None:
    theirs, ours = reference(CHECKPOINT), ChatTemplate.from_directory(CHECKPOINT)
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == expected


def test_named_templates(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain {{ bos_token }}"},
        {"name": "tool_use", "template": "with tools"},
    ]
    path = folder(tmp_path, named)
    theirs, ours = reference(path), ChatTemplate.from_directory(path)
    messages = CONVERSATIONS[0]
    assert ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False) == "plain <s>"
    assert (
        ours.render(messages, tools=[])
        == theirs.apply_chat_template(messages, tools=[], tokenize=False)
        == "with tools"
    )


def test_files_win_over_the_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path, "from the configuration")
    (path / "chat_template.jinja").write_text("from the file {{ eos_token }}", "utf-8")
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools", "utf-8")
    theirs, ours = reference(path), ChatTemplate.from_directory(path)
    messages = CONVERSATIONS[0]
    assert (
        ours.render(messages) == theirs.apply_chat_template(messages, tokenize=False) == "from the file </s>"
    )
    assert (
        ours.render(messages, tools=[])
        == theirs.apply_chat_template(messages, tools=[], tokenize=False)
        == "tools"
    )


def test_the_older_special_tokens_map_counts_beside_an_older_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path, "{{ bos_token }}|{{ pad_token }}")
    (path / "special_tokens_map.json").write_text(
        json.dumps({"pad_token": "<|pad|>", "bos_token": "<b>"}), "utf-8"
    )
    expected = reference(path).apply_chat_template(CONVERSATIONS[0], tokenize=False)
    assert ChatTemplate.from_directory(path).render(CONVERSATIONS[0]) == expected == "<b>|<|pad|>"


def test_the_templates_own_refusal_is_told() -> None:
    template = ChatTemplate(LLAMA_2, {"bos_token": "", "eos_token": ""})
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 'a' + 1 }}", "{% if %}"]
)
def test_a_template_can_do_no_harm(source: str) -> None:
    with pytest.raises(TemplateError, match="does not take these messages"):
        ChatTemplate(source).render([{"role": "user", "content": "a"}])


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": "a"}]
    ChatTemplate("{% for m in messages %}{% set m = 1 %}{% endfor %}").render(messages)
    assert messages == [{"role": "user", "content": "a"}]


def test_a_folder_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="no chat template here"):
        ChatTemplate.from_directory(folder(tmp_path))


@pytest.mark.parametrize("prompt", ["", [], ["Hi"], [{"content": "Hi"}], "\ud83d", [{"role": "\ud83d"}]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(Refused):
        render_prompt(prompt, ChatTemplate("{{ messages[0].role }}"))
