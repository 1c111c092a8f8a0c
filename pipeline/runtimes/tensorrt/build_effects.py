"""Effects of a trtllm-build command: values that the builder changes, messages that it prints, refusals.

A checkpoint's own settings, the flags and the GPU decide together, and most of it happens without failing. Written
after TensorRT-LLM's builder.py and _common.py (1.0 to 1.2), step by step in upstream's order; texts and numbers are
in `data/trtllm_build.yaml`. Encoders, LoRA and other speculation than `draft_tokens_external` are left out. Pure.

>>> config = CheckpointConfig("LlamaForCausalLM", "bfloat16", "W4A16_AWQ", "FP8")
>>> effects("1.2.1", ["--max_seq_len", "4096"], config, sm=90).values["use_paged_context_fmha"]
False
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self

from pipeline.contracts.trtllm_build import (
    config_value,
    data,
    flags,
    named_flags,
    parse,
    speculative_modes,
    versions,
)
from pipeline.contracts.version_range import entries_in

__all__ = ["BuildEffects", "BuilderMessage", "CheckpointConfig", "FlagChange", "effects", "parse_message"]


@dataclass(frozen=True, slots=True)
class FlagChange:
    """A value of the command that the builder replaces by another."""

    flag: str
    asked: Any  # as config.json would have it
    built: Any
    reason: str  # what the builder says about it

    def __str__(self) -> str:
        return f"{self.flag}: asked for {self.asked!r}, built with {self.built!r} ({self.reason})"


@dataclass(frozen=True, slots=True)
class BuildEffects:
    """Effect of a command on the builder: final values, messages, changes, or a refusal."""

    values: Mapping[str, Any]  # by flag, as config.json has them
    messages: tuple[BuilderMessage, ...]
    changes: tuple[FlagChange, ...]  # of flags that the command names
    refusal: str | None  # the exception with which it ends; the values are then of no use


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
    asked = {name: config_value(known[name], value) for name, value in values.items()}
    build = BuilderRun(version, model, sm, dict(asked), keeps_gemm=values["gemm_plugin"] == "disable")
    refusal = None
    try:
        build.run()
    except BuilderRefusal as refused:
        refusal = str(refused)
    changes = _changes({name: asked[name] for name in named_flags(version, argv)}, build)
    return BuildEffects(build.values, tuple(build.messages), changes, refusal)


def _changes(asked: Mapping[str, Any], build: BuilderRun) -> tuple[FlagChange, ...]:
    """Longer sequences of an engine that verifies drafts are no change: the flag means that."""
    meant = {**asked}
    if "max_seq_len" in meant:
        meant["max_seq_len"] += build.grown
    reasons = {flag: message.text for message in build.messages for flag in message.changes}
    return tuple(
        FlagChange(flag, value, build.values[flag], reasons.get(flag, "without a word"))
        for flag, value in sorted(meant.items())
        if build.values[flag] != value
    )


def parse_message(line: str) -> BuilderMessage | None:
    """Recognize a line of the log (without time and severity) as a known message; None if it is none of them."""
    for pattern, message in _patterns():
        if pattern.fullmatch(line.strip()):
            return BuilderMessage(
                message["id"], message["severity"], line.strip(), tuple(message.get("changes", ()))
            )
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], Mapping[str, Any]], ...]:
    return tuple((_pattern(entry["text"]), entry) for entry in data()["messages"])


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{\w+\}", template)
    return re.compile(".+?".join(re.escape(part) for part in parts))


_UNSCALED_ROTARY = ("su", "longrope", "llama3")  # builder.py: their factor says nothing about the length
_NO_POSITIONS = 2048  # builder.py: length of a model that does not say
_MANY_TOKENS = 16384  # _common.py
_REDUCE_FUSION = (None, "LlamaForCausalLM", "Gemma2ForCausalLM", "MedusaForCausalLM")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Fields of a checkpoint's config.json that the builder looks at."""

    architecture: str | None  # None: not known yet, and taken to be able
    dtype: str  # bfloat16, float16
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None
    tensor_parallel: int = 1
    ranks: int = 1
    max_positions: int | None = None
    rotary_factor: float = 1

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read a checkpoint's config.json. Raises KeyError if it lacks what every checkpoint has."""
        quantization, mapping = config.get("quantization") or {}, config["mapping"]
        rotary = config.get("rotary_scaling") or {}
        stretches = rotary.get("type", rotary.get("rope_type")) not in _UNSCALED_ROTARY
        return cls(
            architecture=config["architecture"],
            dtype=config["dtype"],
            quant_algo=quantization.get("quant_algo"),
            kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
            tensor_parallel=mapping["tp_size"],
            ranks=mapping["world_size"],
            max_positions=config.get("max_position_embeddings"),
            rotary_factor=rotary.get("factor", 1) if rotary and stretches else 1,
        )


@dataclass(frozen=True, slots=True)
class BuilderMessage:
    """A line that the builder prints."""

    id: str
    severity: str  # "W" | "I"
    text: str
    changes: tuple[str, ...]  # the flags whose values it may have changed


class BuilderRefusal(Exception):
    """The builder would end with this exception."""


@dataclass(slots=True)
class BuilderRun:
    """The values of one build, changed step by step in upstream's order."""

    version: str
    model: CheckpointConfig
    sm: int
    values: dict[str, Any]
    keeps_gemm: bool  # whether gemm_plugin was said to be disable
    messages: list[BuilderMessage] = field(default_factory=list)
    grown: int = 0  # tokens by which max_seq_len grew for drafts

    def run(self) -> None:
        self.say("generation_logits")
        if self.values["paged_kv_cache"] is not None:
            self.say("paged_kv_cache")
        self.refuse_flags()
        self.kv_cache()
        self.lengths()
        self.step_tokens()
        self.fusions()
        self.speculation()
        self.attention()
        self.refuse_formats()
        self.plugins()

    def say(self, name: str, **numbers: Any) -> None:
        entry = next(entry for entry in data()["messages"] if entry["id"] == name)
        text = entry["text"].format(**{**self.values, **numbers})
        self.messages.append(BuilderMessage(name, entry["severity"], text, tuple(entry.get("changes", ()))))

    def refuse(self, name: str, **numbers: Any) -> None:
        entry = next(
            entry for entry in entries_in(self._refusals(), self.version, versions()) if entry["id"] == name
        )
        raise BuilderRefusal(f"{entry['exception']}: {entry['text'].format(**numbers)}")

    def _refusals(self) -> Sequence[Mapping[str, Any]]:
        refusals: Sequence[Mapping[str, Any]] = data()["refusals"]
        return refusals

    def _on_gpu(self, name: str) -> Mapping[str, Any] | None:
        """A refusal about formats, if it is about this GPU."""
        entry = next(entry for entry in self._refusals() if entry["id"] == name)
        oldest, newest = entry["sm"]
        return entry if oldest <= self.sm <= newest else None

    def refuse_flags(self) -> None:
        values, model = self.values, self.model
        if values["gather_all_token_logits"]:
            values["gather_context_logits"] = values["gather_generation_logits"] = True
        if values["gather_context_logits"] and values["max_draft_len"] > 0:
            self.refuse("context_logits")
        if values["multiple_profiles"] and values["opt_num_tokens"] is not None:
            self.refuse("profiles")
        entry = next(entry for entry in self._refusals() if entry["id"] == "plugin_gpu")
        for plugin in entry["plugins"]:
            if self.sm == entry["sm"] and values[plugin]:
                self.refuse("plugin_gpu", plugin=plugin, value=values[plugin], sm=self.sm)
        entry = next(entry for entry in self._refusals() if entry["id"] == "fuse_fp4_gpu")
        if values["fuse_fp4_quant"] and self.sm not in entry["sms"]:
            self.refuse("fuse_fp4_gpu")
        if values["streamingllm"]:
            self.refuse("streaming_llm")
        if values["pp_reduce_scatter"] and model.architecture not in (None, "MixtralForCausalLM"):
            self.refuse("reduce_scatter")

    def _text(self, name: str) -> str:
        entries = entries_in(self._refusals(), self.version, versions())
        return next(str(entry["text"]) for entry in entries if entry["id"] == name)

    def kv_cache(self) -> None:
        if self.values["kv_cache_type"] is None:
            self.values["kv_cache_type"] = "PAGED"
        if self.values["paged_state"]:  # of recurrent models
            self.say("paged_state_off")
            self.values["paged_state"] = False

    def lengths(self) -> None:
        values, model = self.values, self.model
        longest = math.ceil((model.max_positions or _NO_POSITIONS) * model.rotary_factor)
        if values["max_seq_len"] is None:
            values["max_seq_len"] = longest
            if model.rotary_factor != 1:
                self.say("seq_len_scaled", rotary_factor=model.rotary_factor)
        elif (
            model.max_positions is not None
            and values["max_seq_len"] > model.max_positions * model.rotary_factor
        ):
            self.say(
                "positions", max_position_embeddings=model.max_positions, rotary_factor=model.rotary_factor
            )
        if values["max_input_len"] > values["max_seq_len"]:
            self.say("input_len_clipped", max_seq_len=values["max_seq_len"])
            values["max_input_len"] = values["max_seq_len"]

    def step_tokens(self) -> None:
        """Before the sequences grow by the drafts."""
        values = self.values
        most = values["max_seq_len"] * values["max_batch_size"]
        if not values["remove_input_padding"]:
            self.say("padding_kept")
            values["max_num_tokens"] = most
            return
        if values["opt_num_tokens"] is None and not values["multiple_profiles"]:
            values["opt_num_tokens"] = min(
                values["max_batch_size"] * values["max_beam_width"], values["max_num_tokens"]
            )
            self.say("opt_tokens_chosen")
        if values["max_num_tokens"] > _MANY_TOKENS:
            self.say("many_tokens", max_num_tokens=values["max_num_tokens"])
        if values["max_num_tokens"] > most:
            self.say("tokens_clipped", most=most)
            values["max_num_tokens"] = most
        if values["max_num_tokens"] < values["max_input_len"] and not values["context_fmha"]:
            self.say("tokens_below_input", max_input_len=values["max_input_len"])
            values["max_num_tokens"] = values["max_input_len"]
        elif values["max_num_tokens"] < values["tokens_per_block"] and values["context_fmha"]:
            self.say("tokens_below_block", tokens_per_block=values["tokens_per_block"])
            values["max_num_tokens"] = values["tokens_per_block"]
        if values["opt_num_tokens"] is not None and values["opt_num_tokens"] > values["max_num_tokens"]:
            self.say("opt_tokens_clipped", max_num_tokens=values["max_num_tokens"])
            values["opt_num_tokens"] = values["max_num_tokens"]
        if values["context_fmha"]:
            self.say("input_len_ignored")

    def fusions(self) -> None:
        values, model = self.values, self.model
        if values["reduce_fusion"] and (
            model.tensor_parallel == 1 or model.architecture not in _REDUCE_FUSION
        ):
            self.turn_off("reduce_fusion", "reduce_fusion_off")
        if values["user_buffer"] and not values["reduce_fusion"]:
            self.turn_off("user_buffer", "user_buffer_off")
        if values["norm_quant_fusion"] and (
            values["reduce_fusion"]
            or model.architecture not in (None, "LlamaForCausalLM")
            or model.quant_algo != "NVFP4"
        ):
            self.turn_off("norm_quant_fusion", "norm_quant_fusion_off")

    def turn_off(self, flag: str, message: str) -> None:
        self.values[flag] = False
        self.say(message)

    def speculation(self) -> None:
        values = self.values
        if values["speculative_decoding_mode"] == speculative_modes()["none"]:
            return
        increased = values["max_seq_len"] + values["max_draft_len"]
        self.say("seq_len_increased", increased=increased)
        self.grown = values["max_draft_len"]
        values["max_seq_len"] = increased
        least = values["max_batch_size"] * (values["max_draft_len"] + 1)
        if values["max_num_tokens"] < least:
            self.say("tokens_below_drafts", least=least)
            values["max_num_tokens"] = least

    def attention(self) -> None:
        """Attention over prompts: whether it reads pages, whether it computes in FP8."""
        values, model, facts = self.values, self.model, data()["fp8_context"]
        fp8_cache = model.kv_cache_quant_algo == "FP8"
        if not values["context_fmha"]:
            values["use_fp8_context_fmha"] = False
            self.turn_off("use_paged_context_fmha", "context_fmha_off")
        elif model.quant_algo not in facts["algorithms"]:
            if values["use_fp8_context_fmha"]:
                self.turn_off("use_fp8_context_fmha", "fp8_context_needs_fp8")
            if values["use_paged_context_fmha"] and fp8_cache:
                self.turn_off("use_paged_context_fmha", "paged_context_off")
        elif self.sm < facts["oldest_sm"]:
            self.turn_off("use_fp8_context_fmha", "fp8_context_old_gpu")
            if values["use_paged_context_fmha"] and fp8_cache:
                self.turn_off("use_paged_context_fmha", "paged_context_off")
        elif values["use_paged_context_fmha"] and values["use_fp8_context_fmha"] and not fp8_cache:
            self.turn_off("use_fp8_context_fmha", "fp8_context_needs_cache")
        elif values["use_paged_context_fmha"] and fp8_cache and not values["use_fp8_context_fmha"]:
            values["use_fp8_context_fmha"] = True
            self.say("fp8_context_on")
        if values["use_paged_context_fmha"] and model.kv_cache_quant_algo == "INT8":
            self.turn_off("use_paged_context_fmha", "paged_context_int8")

    def refuse_formats(self) -> None:
        for name in ("integer_gpu", "smooth_quant_gpu", "channel_scale_gpu"):
            entry = self._on_gpu(name)
            if entry is None:
                continue
            kv_caches = entry.get("kv_caches", ())
            if self.model.quant_algo in entry["algorithms"] or self.model.kv_cache_quant_algo in kv_caches:
                self.refuse(name)
        fuses = self.values["gemm_swiglu_plugin"] or self.values["low_latency_gemm_swiglu_plugin"]
        if fuses and not self.values["use_fused_mlp"]:
            self.refuse("swiglu_fused")

    def plugins(self) -> None:
        values, model = self.values, self.model
        if model.quant_algo == "NVFP4" and not self.keeps_gemm:
            self.say("nvfp4_gemm")
            values["gemm_plugin"] = "nvfp4"
        values["nccl_plugin"] = model.dtype if model.ranks > 1 else None
