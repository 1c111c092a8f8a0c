"""What the builder of trtllm-build makes of what it is asked: values that it changes, what it says, when it refuses.

Pure. A checkpoint's own settings, the flags and the GPU decide together, and most of it happens without failing.
Encoders, LoRA and other speculation than `draft_tokens_external` are left out.

>>> model = Model("LlamaForCausalLM", "bfloat16", "W4A16_AWQ", "FP8")
>>> outcome = effects("1.2.1", ["--max_seq_len", "4096"], model, sm=90)
>>> outcome.values["use_paged_context_fmha"]
False
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pipeline.contracts.trtllm_build import config_value, data, flags, parse, said
from pipeline.contracts.trtllm_build_steps import Build, Message, Model, Refused

__all__ = ["Change", "Message", "Model", "Outcome", "effects", "understood"]


@dataclass(frozen=True, slots=True)
class Change:
    """A value that the builder does not take over."""

    flag: str
    asked: Any  # as config.json would have it
    built: Any
    reason: str  # what the builder says about it

    def __str__(self) -> str:
        return f"{self.flag}: asked for {self.asked!r}, built with {self.built!r} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comes of a build."""

    values: Mapping[str, Any]  # by flag, as config.json has them
    messages: tuple[Message, ...]
    changes: tuple[Change, ...]  # of flags that the command names
    refusal: str | None  # the exception with which it ends; the values are then of no use


def effects(version: str, argv: Sequence[str], model: Model, sm: int) -> Outcome:
    """What the builder makes of a command that its parser takes, for a checkpoint, on a GPU.

    Raises:
        UserError: the version is not known.
    """
    known, values = flags(version), parse(version, argv)
    asked = {name: config_value(known[name], value) for name, value in values.items()}
    build = Build(version, model, sm, dict(asked), keeps_gemm=values["gemm_plugin"] == "disable")
    refusal = None
    try:
        build.run()
    except Refused as refused:
        refusal = str(refused)
    changes = _changes({name: asked[name] for name in said(version, argv)}, build)
    return Outcome(build.values, tuple(build.messages), changes, refusal)


def _changes(asked: Mapping[str, Any], build: Build) -> tuple[Change, ...]:
    """That the sequences of an engine which verifies drafts grow by them is none: it is what the flag means."""
    meant = {**asked}
    if "max_seq_len" in meant:
        meant["max_seq_len"] += build.grown
    reasons = {flag: message.text for message in build.messages for flag in message.changes}
    return tuple(
        Change(flag, value, build.values[flag], reasons.get(flag, "without a word"))
        for flag, value in sorted(meant.items())
        if build.values[flag] != value
    )


def understood(line: str) -> Message | None:
    """The known message that a line of the log is (without time and severity)."""
    for pattern, message in _patterns():
        if pattern.fullmatch(line.strip()):
            return Message(
                message["id"], message["severity"], line.strip(), tuple(message.get("changes", ()))
            )
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]:
    return tuple((_pattern(entry["text"]), entry) for entry in data()["messages"])


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", template)
    return re.compile(".+?".join(re.escape(part) for part in parts))
