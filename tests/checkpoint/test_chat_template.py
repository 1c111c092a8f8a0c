"""Chat templates give the text that transformers gives; and where they are looked for."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.checkpoint.chat import ChatTemplate, TemplateRefusal
from pipeline.errors import SourceError
from tests.support.models import make_tokenizer

TALK = [
    {"role": "user", "content": "  Größe? 😀 <b>안녕</b>\n"},
    {"role": "assistant", "content": "L & XL"},
    {"role": "user", "content": ""},
]
TEMPLATES = {
    "ours": None,
    "loops": (
        "{%- for message in messages -%}\n  {%- if loop.first %}{{ bos_token }}{% endif %}"
        "{% if message.content == '' %}{% continue %}{% endif %}[{{ message['role'] | upper }}] "
        "{{ message.content | trim }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}",
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_the_text_is_that_of_transformers(folder: Path, name: str, prompt: bool) -> None:
    if TEMPLATES[name] is not None:
        (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=prompt
    )
    assert ChatTemplate.read(folder).render(TALK, add_generation_prompt=prompt) == theirs


def test_the_date_is_the_caller_s(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}", encoding="utf-8")
    template = ChatTemplate.read(folder, now=lambda: datetime(2024, 7, 26))
    assert template.render(TALK) == "26 Jul 2024"


def test_a_refusal_is_an_error_of_its_own(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('roles must alternate') }}", encoding="utf-8"
    )
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        ChatTemplate.read(folder).render(TALK)


@pytest.mark.parametrize("template", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with pytest.raises(TemplateRefusal):
        ChatTemplate.read(folder).render(TALK)


def test_older_places_of_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    with pytest.raises(SourceError, match="no chat template"):
        ChatTemplate.read(folder)
    for stored in (
        "{{ eos_token }}!",
        [{"name": "tools", "template": "?"}, {"name": "default", "template": "{{ eos_token }}!"}],
    ):
        changed = {**settings, "chat_template": stored, "eos_token": {"content": "<end>", "special": True}}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        assert ChatTemplate.read(folder).render(TALK) == "<end>!"


def test_a_template_that_is_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}", encoding="utf-8")
    with pytest.raises(SourceError, match="cannot be read"):
        ChatTemplate.read(folder)
