"""The table of sampling parameters: which of them each runtime takes, asked of the configs that packages have.

A request with one parameter is built for the entry model of each runtime, as the client builds it: what the client
refuses is not taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipeline.client import Refused, Sampling
from pipeline.client.request import build_request
from pipeline.client.sampling import PARAMETERS, read_sampling
from pipeline.client.tensors import ModelSignature, read_signature
from pipeline.contracts.llmapi import ignored_sampling
from pipeline.gateway.api.schema import ChatRequest, CompletionRequest
from pipeline.models.token_ids import TokenIds
from pipeline.runtimes.cpu.model_repository import CpuSettings, cpu_models
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings, llmapi_model
from pipeline.runtimes.tensorrt.model_repository import EngineModelSettings, TensorRTSettings, engine_models
from pipeline.triton.deployment import ENTRY

# A value with an effect for each parameter.
EXAMPLES: Mapping[str, Any] = {
    "max_tokens": 7, "min_tokens": 2, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.5, "seed": 7,
    "stop": "a", "stop_token_ids": [7], "include_stop_str_in_output": True, "skip_special_tokens": False,
    "ignore_eos": True, "logit_bias": {7: 1.0}, "bad_words": "a", "repetition_penalty": 1.5, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "length_penalty": 0.5, "end_id": 7, "num_draft_tokens": 7, "log_probs": True,
    "top_log_probs": 7, "prompt_log_probs": 0, "token_ids": True, "priority": 0.75, "guide_type": "json", "guide": "a",
    "adapter": "a",
}  # fmt: skip
# Parameter -> fields of the gateway, where those have other names; and what a recipe must have for it.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "max_tokens": ("max_tokens", "max_completion_tokens"),
    "log_probs": ("logprobs",),
    "top_log_probs": ("top_logprobs", "logprobs"),
    "prompt_log_probs": ("prompt_logprobs", "echo"),
    "guide_type": ("response_format", "guided_json", "guided_regex", "guided_grammar"),
    "guide": ("response_format", "guided_json", "guided_regex", "guided_grammar"),
    "adapter": ("model",),
}
# What the engine, or the gateway, refuses although the entry model has an input for it: beams, and logits of answers.
_REFUSED = (("cpu", "length_penalty"), ("tensorrt", "top_log_probs"))
_NEEDS = {
    "guide_type": "guided_decoding",
    "guide": "guided_decoding",
    "num_draft_tokens": "draft",
    "adapter": "adapters",
}
_IDS = TokenIds(0, 0, (), 8)
# Title of a column -> the entry model of a package, with or without `serving.prompt_log_probs`.
_RUNTIMES: Mapping[str, Callable[[bool], ModelSignature]] = {
    "cpu": lambda _: _cpu(),
    "tensorrt 1.2.1": lambda prompts: _tensorrt("1.2.1", prompts),
    "pytorch 1.2.1": lambda prompts: _pytorch("1.2.1", prompts),
    "pytorch 1.3.0rc29": lambda prompts: _pytorch("1.3.0rc29", prompts),
}


def table() -> str:
    """Markdown: every parameter by its names in gateway and client, the runtimes that take it, and what it does."""
    columns = ("field", "`pipeline.client`", *_RUNTIMES, "")
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    meanings = dict(_meanings())
    for name in PARAMETERS:
        cells = (_fields(name), f"`{name}`", *(_cell(title, name) for title in _RUNTIMES), meanings[name])
        lines.append(f"| {' | '.join(cells)} |")
    taken = [_shown(_takes(signature(False), {}, prompt=(1, 2))) for signature in _RUNTIMES.values()]
    cells = (
        "`prompt`",
        "prompt",
        *taken,
        "Token ids in place of a text: sent as they are, no token is added.",
    )
    return "\n".join([*lines, f"| {' | '.join(cells)} |"])


def takes(title: str, name: str) -> str:
    """Whether a runtime takes a parameter: "yes", "no", or the key of the recipe that it needs."""
    kind, _, version = title.partition(" ")
    if (kind, name) in _REFUSED or (kind == "pytorch" and name in ignored_sampling(version)):
        return "no"
    sampling = {name: EXAMPLES[name]} | ({"log_probs": True} if name == "top_log_probs" else {})
    if _takes(_RUNTIMES[title](False), sampling):
        return _NEEDS.get(name, "yes")
    return "serving.prompt_log_probs" if _takes(_RUNTIMES[title](True), sampling) else "no"


def _takes(model: ModelSignature, sampling: Mapping[str, Any], prompt: str | tuple[int, ...] = "a") -> bool:
    try:
        build_request(model, prompt, read_sampling({"max_tokens": 7, **sampling}), request_id="")
    except Refused:
        return False
    return True


def _cell(title: str, name: str) -> str:
    said = takes(title, name)
    return _shown(said == "yes") if said in ("yes", "no") else f"`{said}`"


def _shown(taken: bool) -> str:
    return "yes" if taken else "no"


def _fields(name: str) -> str:
    known = {**ChatRequest.model_fields, **CompletionRequest.model_fields}
    return ", ".join(f"`{field}`" for field in _FIELDS.get(name, (name,)) if field in known) or "–"


def _meanings() -> Iterator[tuple[str, str]]:
    """Each parameter and its meaning, from the docstring of `Sampling`."""
    text = re.sub(r"\n {12}", " ", Sampling.__doc__ or "")
    for name, meaning in re.findall(r"^        (\w+): (.+)$", text, re.MULTILINE):
        yield name, f"{meaning[0].upper()}{meaning[1:]}"


def _cpu() -> ModelSignature:
    return _entry(cpu_models(CpuSettings(512, 256, 8, guided_decoding=True, adapters=("a",)), _IDS))


def _tensorrt(version: str, prompts: bool) -> ModelSignature:
    settings = TensorRTSettings(
        version=version,
        target=EngineModelSettings((0,), 0.9),
        draft=None,
        max_concurrency=8,
        kv_cache_reuse=not prompts,
        chunked_context=True,
        policy="guaranteed_no_evict",
        guided_decoding=True,
        prompt_log_probs=prompts,
    )
    return _entry(engine_models(settings, _IDS))


def _pytorch(version: str, prompts: bool) -> ModelSignature:
    settings = LlmapiSettings(version, guided_decoding=True, prompt_log_probs=prompts)
    return read_signature(llmapi_model(settings))


def _entry(models: Any) -> ModelSignature:
    return read_signature(next(model for model in models if model.name == ENTRY))
