"""The base of every section of a recipe, and the sections that say how a deployment is run.

A section holds values and their bounds: immutable, strict about types, and closed to unknown keys. Rules that span
sections are in `validators.py` and hold for a whole recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo

from pipeline.document_faults import refusal
from pipeline.golden import GoldenBudgets, GoldenSet

_ALIAS = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"


class RecipeSection(BaseModel):
    """A mapping of the recipe file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def matching(pattern: str, fix: str, problem: str = "is not accepted") -> tuple[AfterValidator, Any]:
    """Make the annotations of a text that matches an expression, for the loader and for the JSON schema."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise refusal(problem, fix)
        return text

    return AfterValidator(check), Field(json_schema_extra={"pattern": f"^{pattern}$"})


def beside_recipe(path: Path, info: ValidationInfo) -> Path:
    """Make a path absolute that is relative to the folder of the recipe."""
    folder = (info.context or {}).get("folder") or Path.cwd()
    return Path(os.path.normpath(folder / path.expanduser()))


def require_tag(schema: dict[str, Any]) -> None:
    """Make the JSON schema of a union's default member ask for `kind`, as the loader does."""
    schema["required"] = ["kind", *schema.get("required", [])]


class Limits(RecipeSection):
    """Engine limits, Triton parameters and client limits all come from here."""

    max_input_tokens: int = Field(ge=1, le=10_000_000, description="Longest prompt.")
    max_output_tokens: int = Field(ge=1, le=1_000_000, description="Longest answer.")
    max_concurrency: int = Field(ge=1, le=8192, description="Requests that generate at the same time.")
    max_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Tokens in one step of the engine; by default chosen by the runtime.",
    )

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and answer together."""
        return self.max_input_tokens + self.max_output_tokens


class KvCache(RecipeSection):
    """The keys and values of the tokens so far, in pages."""

    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the GPU memory left after loading; by default 0.9. Not for cpu.",
    )
    reuse: bool = Field(
        default=True, description="Keep the pages of finished prompts, for prompts that begin alike."
    )
    host_memory_gib: float = Field(
        default=0.0,
        ge=0,
        le=4096,
        description="Host memory that pages are moved to when the GPU is full. Not for cpu.",
    )


class Scheduler(RecipeSection):
    """Which requests take part in the next step."""

    chunked_context: bool = Field(
        default=True, description="Split long prompts over steps, so that they delay no one else."
    )
    policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        default="guaranteed_no_evict",
        description="Admit a request when it fits to its end, or as soon as it can start.",
    )
    max_queue_size: int = Field(
        default=0, ge=0, le=1_000_000, description="Requests that may wait; 0 is no limit."
    )
    max_queue_delay_us: int = Field(
        default=0, ge=0, le=10_000_000, description="Wait this long to batch arrivals together."
    )


def _aliases(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise refusal(f"has {twice[0]} twice", "name each alias once")
    return names


class ServingPolicy(RecipeSection):
    """How many responses a request gets, what may be in them, and what the gateway takes for the model."""

    decoupled: bool = Field(
        default=True,
        description="Stream: many responses to one request. If false, each request has one response, the whole answer, "
        "as clients that call infer() need it: KServe tools, benchmarks.",
    )
    prompt_log_probs: bool = Field(
        default=False,
        description="Offer the log probabilities of a prompt's tokens, which evaluation programs ask for (echo with "
        "logprobs). The runtime cpu always does; the others compute prompts without reuse of the KV cache for it.",
    )
    http: bool = Field(
        default=False,
        description="Open Triton's HTTP, behind a guard against web pages and against JSON that harms Triton. No "
        "package depends on it.",
    )
    grpc: bool = Field(
        default=True,
        description="Open Triton's gRPC at a TCP port, for every process that reaches it. If false, processes of the "
        "same user reach it by a socket, and nobody else but the gateway; not in NVIDIA's own containers. No package "
        "depends on it.",
    )
    aliases: Annotated[tuple[Annotated[str, Field(pattern=_ALIAS)], ...], AfterValidator(_aliases)] = Field(
        default=(),
        strict=False,
        description="Further names by which requests to the gateway may ask for the model, besides that of the recipe. "
        "No package depends on them.",
        examples=[["gpt-4o-mini", "meta-llama/Llama-3.1-8B-Instruct"]],
    )
    strict: bool = Field(
        default=False,
        description="Let the gateway refuse requests with fields that it does not know, tools that it would have to "
        "run, or larger output limits than max_output_tokens. By default it ignores the former, clamps the latter, and "
        "says so in the headers of the answer. No package depends on it.",
    )


class GoldenQuestions(GoldenBudgets, RecipeSection):
    """Prompts with checks of their answers, by which a package is judged before it takes traffic."""

    file: Annotated[str, AfterValidator(lambda text, info: str(beside_recipe(Path(text), info)))] = Field(
        min_length=1,
        description="JSON lines, each a question; relative to the folder of the recipe.",
        examples=["golden/tiny-cpu.jsonl"],
    )

    def read(self) -> GoldenSet:
        """Read the file.

        Raises:
            UnreadableFile: It cannot be read.
            InvalidInput: With every fault of it.
        """
        return GoldenSet.read(Path(self.file), GoldenBudgets(**self.model_dump(exclude={"file"})))


class Slo(RecipeSection):
    """The latencies to meet; `plan` judges by those of the 95th percentile, and alerts are made of all."""

    ttft_p95_ms: float | None = Field(default=None, gt=0, description="Time to first token, 95th percentile.")
    itl_p95_ms: float | None = Field(default=None, gt=0, description="Time between tokens, 95th percentile.")
    ttft_p99_ms: float | None = Field(
        default=None,
        gt=0,
        description="Time to first token, 99th percentile, for alerts; by default twice ttft_p95_ms.",
    )
    itl_p99_ms: float | None = Field(
        default=None,
        gt=0,
        description="Time between tokens, 99th percentile, for alerts; by default twice itl_p95_ms.",
    )


class InvalidValue(LookupError):
    """A rule reads a value that is itself at fault."""


class RecipeValues:
    """The values of a valid recipe, with all defaults, by dotted key; None under a section that is absent."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        value: Any = self._data
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value
