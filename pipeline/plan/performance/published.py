"""Figures that others measured and published, and what the model says in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu, gpu_rates
from pipeline.contracts.models import known_model
from pipeline.contracts.releases import Track
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.capacity import plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.efficiency import efficiency
from pipeline.plan.performance.engine import EngineSpeed
from pipeline.plan.performance.roofline import ModelLoad, model_load
from pipeline.plan.performance.workload import Workload
from pipeline.resources import parse_yaml

Kind = Literal["full-load", "fixed-batch", "first-token"]
Use = Literal["calibrate", "held-out"]


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """One published number: output tokens a second of all GPUs, or milliseconds for `first-token`."""

    kind: Kind
    use: Use
    model: str
    gpu: str
    form: str
    kv_cache: str
    split: Parallelism
    prompt_tokens: int
    output_tokens: int
    batch: int  # 0: as many as fit
    measured: float
    source: str

    @property
    def track(self) -> Track:
        """Backend that it was measured on."""
        return "pytorch" if self.kind == "full-load" else "tensorrt"

    @property
    def need(self) -> ModelSpec:
        """The model as it was run."""
        return ModelSpec("target", _sizes(self.model), self.split, self.form, self.kv_cache)

    @property
    def label(self) -> str:
        """A name for people: model, format, GPU, split and lengths."""
        split = f"TP{self.split.tensor}" + (f" PP{self.split.pipeline}" if self.split.pipeline > 1 else "")
        batch = f" batch {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.form} {self.gpu} {split} {self.prompt_tokens}/{self.output_tokens}{batch}"


def figures(use: Use | None = None) -> tuple[PublishedFigure, ...]:
    """List all published figures, or those of one use."""
    return tuple(figure for figure in _figures() if use is None or figure.use == use)


def compute_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> float:
    """Compute what the model says in place of a figure, in its unit; `given` replaces the fitted constants."""
    engine, work = _engine(figure, given), Workload(figure.prompt_tokens, figure.output_tokens)
    if figure.kind == "first-token":
        return 1000 * engine.first_token(figure.prompt_tokens)
    if figure.kind == "fixed-batch":
        return figure.batch * figure.output_tokens / engine.static_batch(figure.batch, work)
    requests = full_load_requests(figure)
    return requests * figure.output_tokens / engine.run(requests, max_requests(figure), work)


def fills_steps(figure: PublishedFigure) -> bool:
    """Tell whether prompts fill the steps of a full load before the KV cache is full."""
    if figure.kind != "full-load":
        return False
    work = Workload(figure.prompt_tokens, figure.output_tokens)
    return _engine(figure, None).most_decoding(work) < min(max_requests(figure), full_load_requests(figure))


def _engine(figure: PublishedFigure, given: Mapping[str, Any] | None) -> EngineSpeed:
    constants = efficiency(figure.gpu, figure.track, given)
    return EngineSpeed(_load(figure), gpu_rates(figure.gpu), constants, figure.need.step_tokens)


@cache
def max_requests(figure: PublishedFigure) -> int:
    """Count the requests that the KV cache holds under full load."""
    device = gpu(figure.gpu)
    length = figure.prompt_tokens + figure.output_tokens
    spec = DeploymentSpec(device.name, device.driver_mib * 2**20, (figure.need,), length, concurrency=1)
    return max(1, min(plan_memory(spec).sequences, int(_data()["max_batch"])))


@cache
def _load(figure: PublishedFigure) -> ModelLoad:
    return model_load(figure.need, gpu_rates(figure.gpu))


def full_load_requests(figure: PublishedFigure) -> int:
    """Return how many requests wait at the start of a full load."""
    return int(_data()["requests"][f"{figure.prompt_tokens}/{figure.output_tokens}"])


def figure_source(figure: PublishedFigure) -> str:
    """Return where a figure was published."""
    return str(_data()["sources"][figure.source])


@cache
def _sizes(name: str) -> ModelSizes:
    entry = _data()["models"][name]
    known = known_model(entry["known"]) if "known" in entry else ModelSizes(**entry)
    assert known is not None, f"{name} is among the data"
    return known


@cache
def _figures() -> tuple[PublishedFigure, ...]:
    return tuple(figure for table in _data()["tables"] for figure in _rows(table))


def _rows(table: Mapping[str, Any]) -> Iterator[PublishedFigure]:
    for row in table["rows"]:
        ways, pipeline = table.get("tensor", 1), table.get("pipeline", 1)
        batch, output = 0, 1
        if table["kind"] == "full-load":
            prompt, output, measured = row
            measured *= ways * pipeline if table["per_gpu"] else 1
        elif table["kind"] == "fixed-batch":
            batch, ways, prompt, output, measured = row
            measured *= ways
        else:
            ways, prompt, measured = row
            batch = 1
        yield PublishedFigure(
            kind=table["kind"],
            use=table["use"],
            model=table["model"],
            gpu=table["gpu"],
            form=table["format"],
            kv_cache=table["kv_cache"],
            split=Parallelism(ways, pipeline),
            prompt_tokens=prompt,
            output_tokens=output,
            batch=batch,
            measured=measured,
            source=table["source"],
        )


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.plan.performance") / "data" / "published.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
