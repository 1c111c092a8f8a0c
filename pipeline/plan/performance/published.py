"""Measurements of TensorRT-LLM that others published: `data/published.yaml`, each with how it was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu_generation
from pipeline.contracts.models import known_model
from pipeline.contracts.releases import Track
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.spec import ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.estimates import Quantity, structure_of
from pipeline.plan.performance.queueing import Workload
from pipeline.resources import parse_yaml

Kind = Literal["full-load", "fixed-batch", "first-token", "closed-loop", "open-loop", "disaggregated"]
SERVED = ("closed-loop", "open-loop", "disaggregated")  # measured at a server


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of one kind of a disaggregated deployment."""

    count: int
    split: Parallelism
    experts: str = "CUTLASS"


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One measurement: output tokens a second of all GPUs, or milliseconds.

    Attributes:
        prompt_tokens: Length of prompts as it is published.
        batch: Requests at a time; 0: as many as fit.
        rate: Requests a second of an open loop; else 0.
        lengths: Shortest and longest prompt and answer, as shares of those published.
        track: Backend that it was measured on.
        step_tokens: Most tokens of a step.
        chunked: Whether prompts may be split over steps.
        fraction: Share of the free memory that the KV cache may take.
        balance: Steps of the timer, and more steps, for which prompts wait for those of other ranks; None: they do not.
        experts: Kernels of routed experts, `moe_config.backend`.
        pdl: Whether kernels are launched before the one before has ended (programmatic dependent launch).
        check: Whether it only checks the constants, and is never fitted.
        measured: Quantity -> what was measured, in tokens a second or in milliseconds.
        context: Context servers, whose steps have `step_tokens`; `split` is that of the generation servers. None:
            prompts and answers are computed by the same engine.
        generations: Generation servers.
        slots: Requests at a time of each rank of a generation server.
    """

    kind: Kind
    model: str
    gpu: str
    form: str
    kv_cache: str
    split: Parallelism
    prompt_tokens: int
    output_tokens: int
    batch: int
    rate: float
    lengths: tuple[float, float]
    track: Track
    step_tokens: int
    chunked: bool
    fraction: float
    balance: tuple[int, int] | None
    experts: str
    pdl: bool
    check: bool
    source: str
    measured: Mapping[Quantity, float] = field(hash=False)
    context: Servers | None = None
    generations: int = 1
    slots: int = 0

    @property
    def need(self) -> ModelSpec:
        """The model as it was run."""
        return ModelSpec(
            "target",
            published_sizes(self.model),
            self.split,
            self.form,
            self.kv_cache,
            self.step_tokens,
            expert_kernels=self.experts,
        )

    @property
    def work(self) -> Workload:
        """The lengths of its requests."""
        least, most = self.lengths
        mean = (least + most) / 2
        return Workload(
            round(self.prompt_tokens * mean), round(self.output_tokens * mean), (most - least) / 2 / mean
        )

    @property
    def set_up(self) -> tuple[object, ...]:
        """All but the number of requests: what is left out of a fit together."""
        lengths = self.prompt_tokens, self.output_tokens
        return (
            self.model,
            self.gpu,
            self.form,
            self.split,
            *lengths,
            self.kind,
            self.context,
            self.generations,
        )

    @property
    def group(self) -> tuple[str, str, str]:
        """Structure, format and generation: the class, but for the quantity."""
        structure = structure_of(self.need, disaggregated=self.context is not None)
        return structure, self.form, gpu_generation(self.gpu).constants

    @property
    def label(self) -> str:
        """A name for people: model, format, GPU, split and lengths."""
        split = f"TP{self.split.tensor}" + (f" PP{self.split.pipeline}" if self.split.pipeline > 1 else "")
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.form} {self.gpu} {split} {self.prompt_tokens}/{self.output_tokens}{batch}"


@cache
def figures() -> tuple[PublishedFigure, ...]:
    """List all published figures."""
    return tuple(figure for table in published_data()["tables"] for figure in _rows(table))


def figure_source(figure: PublishedFigure) -> str:
    """Return where a figure was published."""
    return str(published_data()["sources"][figure.source])


@cache
def published_sizes(name: str) -> ModelSizes:
    """Look up the sizes of a model of the figures."""
    entry = published_data()["models"][name]
    known = (
        known_model(entry["known"])
        if "known" in entry
        else ModelSizes.from_config(entry, entry.get("beside"))
    )
    assert known is not None, f"{name} is among the data"
    return known


def _rows(table: Mapping[str, Any]) -> Iterator[PublishedFigure]:
    kind = table["kind"]
    for row in table["rows"]:
        answering = table.get("generation", table)
        split = _split(answering)
        batch, asked, output, slots = 0, 0.0, 1, 0
        measured: dict[Quantity, float]
        if kind == "full-load":
            prompt, output, rate = row
            measured = {"throughput": rate * (split.world if table["per_gpu"] else 1)}
        elif kind == "fixed-batch":
            batch, ways, prompt, output, rate = row
            split, measured = replace(split, tensor=ways), {"throughput": rate * ways}
        elif kind == "first-token":
            ways, prompt, first = row
            split, batch, measured = replace(split, tensor=ways), 1, {"ttft-idle": first}
        elif kind == "disaggregated":
            prompt, output, batch, slots, first, each = row
            measured = {"tpot": each, "ttft-loaded" if batch > 1 else "ttft-idle": first}
        elif kind == "open-loop":
            prompt, output, asked, first, each = row
            measured = {"tpot": each, "ttft-loaded": first}
        else:
            prompt, output, batch, first, each = row
            rate = 1e3 * batch * output / (first + (output - 1) * each)
            measured = {"throughput": rate, "tpot": each, "ttft-loaded" if batch > 1 else "ttft-idle": first}
        for quantity in table.get("not", ()):
            measured.pop(quantity, None)
        how = {**published_data()["runs"].get(table["source"], {}), **table}
        yield PublishedFigure(
            kind=kind,
            model=table["model"],
            gpu=table["gpu"],
            form=table["format"],
            kv_cache=table["kv_cache"],
            split=split,
            prompt_tokens=prompt,
            output_tokens=output,
            batch=batch,
            rate=asked,
            lengths=tuple(how.get("lengths", (1.0, 1.0))),
            track=how.get("track", "pytorch"),
            step_tokens=_step_tokens(how.get("step_tokens", 8192), prompt, output, batch),
            chunked=how.get("chunked", True),
            fraction=how.get("fraction", 0.9),
            balance=tuple(how["balance"]) if "balance" in how else None,
            experts=answering.get("experts", how.get("experts", "CUTLASS")),
            pdl=how.get("pdl", False),
            check=how.get("check", kind == "disaggregated"),
            measured=measured,
            source=table["source"],
            context=_servers(table["context"]) if "context" in table else None,
            generations=answering.get("servers", 1),
            slots=slots,
        )


def _servers(entry: Mapping[str, Any]) -> Servers:
    return Servers(entry["servers"], _split(entry), entry.get("experts", "CUTLASS"))


def _split(entry: Mapping[str, Any]) -> Parallelism:
    return Parallelism(
        entry.get("tensor", 1),
        entry.get("pipeline", 1),
        entry.get("expert", 1),
        entry.get("attention_dp", False),
    )


def _step_tokens(given: int | str, prompt: int, answer: int, batch: int) -> int:
    """Work out max_num_tokens as InferenceX's scripts do: for one prompt beside the answers, or for a whole request."""
    if isinstance(given, int):
        return given
    if given == "request":
        return prompt + answer + 200
    return max((prompt + batch + 127) // 64 * 64, 8192 if given == "prompt-or-8192" else 0)


@cache
def published_data() -> Mapping[str, Any]:
    """Return the whole of `data/published.yaml`."""
    file = resources.files("pipeline.plan.performance") / "data" / "published.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
