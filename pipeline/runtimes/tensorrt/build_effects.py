"""Effects of a trtllm-build command of ours: values that the builder changes, what it says of them, refusals.

A checkpoint's own settings, the flags and the GPU decide together, and most of it happens without failing. Written
after TensorRT-LLM's builder.py and _common.py (1.0 to 1.2), step by step in upstream's order; texts and numbers are
in `data/trtllm_build.yaml`. Only what the flags of `flags` can lead to is here: the limits that it chooses, for one,
are kept as they are. Pure.

>>> config = CheckpointConfig("LlamaForCausalLM", "W4A16_AWQ", "FP8")
>>> effects("1.2.1", ["--max_seq_len", "4096", "--use_paged_context_fmha", "enable"], config, sm=90).changes[0].built
False
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from pipeline.contracts.trtllm_build import config_value, data, flags, named_flags, parse, speculative_modes

_REDUCE_FUSION = (None, "LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A value of the command that the builder replaces by another."""

    flag: str
    requested: Any  # as config.json would have it
    built: Any
    reason: str  # what the builder says about it

    def __str__(self) -> str:
        return f"{self.flag}: asked for {self.requested!r}, built with {self.built!r} ({self.reason})"


@dataclass(frozen=True, slots=True)
class BuilderMessage:
    """A line that the builder prints."""

    id: str
    text: str
    changes: tuple[str, ...]  # the flags whose values it may have changed


@dataclass(frozen=True, slots=True)
class BuildEffects:
    """Effect of a command on the builder: final values, messages about changes, the changes, or a refusal."""

    values: Mapping[str, Any]  # by flag, as config.json has them
    messages: tuple[BuilderMessage, ...]
    changes: tuple[FlagChange, ...]  # of flags that the command names
    refusal: str | None  # the exception with which it ends; the values are then of no use


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Fields of a checkpoint's config.json that the builder looks at."""

    architecture: str | None  # None: not known yet, and taken to be able
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    tensor_parallel: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a checkpoint's config.json. Raises KeyError if it lacks what every checkpoint has."""
        quantization = config.get("quantization") or {}
        return cls(
            architecture=config["architecture"],
            quant_algo=quantization.get("quant_algo"),
            kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
            tensor_parallel=config["mapping"]["tp_size"],
        )


def effects(version: str, argv: Sequence[str], model: CheckpointConfig, sm: int) -> BuildEffects:
    """Work out what the builder makes of a command that its parser takes.

    Args:
        version: Version of TensorRT-LLM.
        argv: The command without the program.
        model: The checkpoint's config.json.
        sm: Compute capability of the GPU times 10.

    Raises:
        UserError: The version is not known.
    """
    known, values = flags(version), parse(version, argv)
    requested = {name: config_value(known[name], value) for name, value in values.items()}
    build = _BuilderRun(model, sm, dict(requested), keeps_gemm=values["gemm_plugin"] == "disable")
    refusal = None
    try:
        build.run()
    except _BuilderRefusal as refused:
        refusal = str(refused)
    changes = _changes({name: requested[name] for name in named_flags(version, argv)}, build)
    return BuildEffects(build.values, tuple(build.messages), changes, refusal)


def _changes(requested: Mapping[str, Any], build: _BuilderRun) -> tuple[FlagChange, ...]:
    """Longer sequences of an engine that verifies drafts are no change: the flag means that."""
    meant = {**requested}
    if "max_seq_len" in meant:
        meant["max_seq_len"] += build.grown
    reasons = {flag: message.text for message in build.messages for flag in message.changes}
    return tuple(
        FlagChange(flag, value, build.values[flag], reasons.get(flag, "without a word"))
        for flag, value in sorted(meant.items())
        if build.values[flag] != value
    )


def parse_message(line: str) -> BuilderMessage | None:
    """Recognize a line of the log (without time and severity) as a known message; None if it is unknown."""
    for pattern, message in _patterns():
        if pattern.fullmatch(line.strip()):
            return BuilderMessage(message["id"], line.strip(), tuple(message.get("changes", ())))
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]:
    return tuple((_pattern(entry["text"]), entry) for entry in data()["messages"])


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", template)
    return re.compile(".+?".join(re.escape(part) for part in parts))


class _BuilderRefusal(Exception):
    """The builder would end with this exception."""


@dataclass(slots=True)
class _BuilderRun:
    """The values of one build, changed step by step in upstream's order."""

    model: CheckpointConfig
    sm: int
    values: dict[str, Any]
    keeps_gemm: bool  # whether gemm_plugin was said to be disable
    messages: list[BuilderMessage] = field(default_factory=list)
    grown: int = 0  # tokens by which max_seq_len grew for drafts

    def run(self) -> None:
        self.refuse_flags()
        self.optimal_tokens()
        self.fusions()
        self.speculation()
        self.attention()
        self.refuse_formats()
        if self.model.quant_algo == "NVFP4" and not self.keeps_gemm:
            self.change("gemm_plugin", "nvfp4", "nvfp4_gemm")

    def change(self, flag: str, value: Any, message: str) -> None:
        entry = next(entry for entry in data()["messages"] if entry["id"] == message)
        text = entry["text"].format(**self.values)
        self.messages.append(BuilderMessage(message, text, tuple(entry["changes"])))
        self.values[flag] = value

    def refusal(self, name: str) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = next(entry for entry in data()["refusals"] if entry["id"] == name)
        return entry

    def refuse(self, name: str, **numbers: Any) -> None:
        entry = self.refusal(name)
        raise _BuilderRefusal(f"{entry['exception']}: {entry['text'].format(**numbers)}")

    def refuse_flags(self) -> None:
        values = self.values
        if values["multiple_profiles"] and values["opt_num_tokens"] is not None:
            self.refuse("profiles")
        entry = self.refusal("plugin_gpu")
        for plugin in entry["plugins"]:
            if self.sm == entry["sm"] and values[plugin]:
                self.refuse("plugin_gpu", plugin=plugin, value=values[plugin], sm=self.sm)
        if values["fuse_fp4_quant"] and self.sm not in self.refusal("fuse_fp4_gpu")["sms"]:
            self.refuse("fuse_fp4_gpu")
        if values["pp_reduce_scatter"] and self.model.architecture not in (None, "MixtralForCausalLM"):
            self.refuse("reduce_scatter")

    def optimal_tokens(self) -> None:
        most = self.values["max_num_tokens"]
        if self.values["opt_num_tokens"] is not None and self.values["opt_num_tokens"] > most:
            self.change("opt_num_tokens", most, "opt_tokens_clipped")

    def fusions(self) -> None:
        values, model = self.values, self.model
        if values["reduce_fusion"] and (
            model.tensor_parallel == 1 or model.architecture not in _REDUCE_FUSION
        ):
            self.change("reduce_fusion", False, "reduce_fusion_off")
        if values["user_buffer"] and not values["reduce_fusion"]:
            self.change("user_buffer", False, "user_buffer_off")
        if values["norm_quant_fusion"] and (
            values["reduce_fusion"]
            or model.architecture not in (None, "LlamaForCausalLM")
            or model.quant_algo != "NVFP4"
        ):
            self.change("norm_quant_fusion", False, "norm_quant_fusion_off")

    def speculation(self) -> None:
        """Sequences grow by the drafts."""
        if self.values["speculative_decoding_mode"] != speculative_modes()["none"]:
            self.grown = self.values["max_draft_len"]
            self.values["max_seq_len"] += self.grown

    def attention(self) -> None:
        """Attention over prompts: whether it reads pages, whether it computes in FP8."""
        values, model, facts = self.values, self.model, data()["fp8_context"]
        if model.quant_algo not in facts["algorithms"]:
            if values["use_fp8_context_fmha"]:
                self.change("use_fp8_context_fmha", False, "fp8_context_needs_fp8")
        elif self.sm < facts["oldest_sm"]:
            self.change("use_fp8_context_fmha", False, "fp8_context_old_gpu")
        fp8_cache = model.kv_cache_quant_algo == "FP8"
        if values["use_paged_context_fmha"] and fp8_cache and not values["use_fp8_context_fmha"]:
            self.change("use_paged_context_fmha", False, "paged_context_off")

    def refuse_formats(self) -> None:
        for name in ("integer_gpu", "smooth_quant_gpu"):
            oldest, newest = self.refusal(name)["sm"]
            if oldest <= self.sm <= newest and self.model.quant_algo in self.refusal(name)["algorithms"]:
                self.refuse(name)
        fuses = self.values["gemm_swiglu_plugin"] or self.values["low_latency_gemm_swiglu_plugin"]
        if fuses and not self.values["use_fused_mlp"]:
            self.refuse("swiglu_fused")
