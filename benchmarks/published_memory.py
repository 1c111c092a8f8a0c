"""Published measurements of GPU memory (`published_memory.yaml`), and what the memory model computes in their place.

    python -m benchmarks.published_memory    renews the errors that `pipeline plan accuracy` prints

The model takes its constants from elsewhere (`contracts/data/engine_memory.yaml`); none was chosen by these points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.contracts.gpus import gpu
from pipeline.contracts.models import known_model
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.accuracy import DATA, MeasurementError, MeasurementErrors
from pipeline.plan.memory.capacity import MemoryPlan, plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.resources import parse_yaml

_SLACK = 1000  # tokens that the measurements had beyond isl + osl


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """How many sequences of isl + osl + 1000 tokens a KV cache held; max_num_tokens was 2 * isl."""

    gpu: str
    model: str  # repository; its weights as published
    tensor_parallel: int
    fraction: float
    isl: int  # prompt tokens
    osl: int  # answer tokens
    sequences: int
    source: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadLog:
    """Memory that an engine's log reported when it was loaded."""

    gpu: str
    format: str
    kv_cache: str
    fraction: float
    block_tokens: int
    config: Mapping[str, Any]  # of the model, as config.json has it
    engine_mib: float  # weights
    context_mib: float  # activations
    runtime_mib: float
    total_gib: float
    available_gib: float  # after all of it
    blocks: int
    source: tuple[str, ...]

    @property
    def sizes(self) -> ModelSizes:
        """Sizes of the model."""
        sizes = ModelSizes.from_config(self.config)
        assert sizes is not None, "the data are read by a test"
        return sizes


def capacity_points() -> tuple[CapacityPoint, ...]:
    """List all published capacities of KV caches."""
    return tuple(CapacityPoint(**_sourced(entry)) for entry in _data()["capacity"])


def load_logs() -> tuple[LoadLog, ...]:
    """List all published logs of engines."""
    return tuple(LoadLog(**_sourced(entry)) for entry in _data()["load_logs"])


def capacity_accuracy() -> MeasurementErrors:
    """Compare how many sequences a KV cache holds, at all published points."""
    return MeasurementErrors(tuple(_capacity(point) for point in capacity_points()))


def load_log_accuracy() -> MeasurementErrors:
    """Compare weights, and blocks of the KV cache, with the logs of engines that were loaded."""
    return MeasurementErrors(tuple(figure for log in load_logs() for figure in _log(log)))


def plan_measured(point: CapacityPoint) -> MemoryPlan:
    """Plan the memory of a set-up that was measured."""
    sizes = known_model(point.model)
    assert sizes is not None, "measured models are among the data"
    model = ModelSpec(
        "target", sizes, Parallelism(tensor=point.tensor_parallel), sizes.stored, step_tokens=2 * point.isl
    )
    length = point.isl + point.osl + _SLACK
    return plan_memory(_demand(point.gpu, model, length, point.fraction))


def _capacity(point: CapacityPoint) -> MeasurementError:
    what = f"{point.gpu}  {point.model.partition('/')[2]}  {point.fraction}  {point.isl} + {point.osl}"
    return MeasurementError(what, point.sequences, plan_measured(point).sequences, "; ".join(point.source))


def _log(log: LoadLog) -> tuple[MeasurementError, ...]:
    model = ModelSpec(
        "target", log.sizes, format=log.format, kv_cache=log.kv_cache, block_tokens=log.block_tokens
    )
    memory = plan_memory(_demand(log.gpu, model, log.sizes.max_positions, log.fraction))
    source = "; ".join(log.source)
    return (
        MeasurementError(
            "weights of the engine, MiB", log.engine_mib, memory.ranks[0].group("weights") / 2**20, source
        ),
        MeasurementError("blocks of the KV cache", log.blocks, memory.blocks, source),
    )


def _demand(name: str, model: ModelSpec, length: int, fraction: float) -> DeploymentSpec:
    device = gpu(name)
    return DeploymentSpec(name, device.driver_mib * 2**20, (model,), length, concurrency=1, fraction=fraction)


def _sourced(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {**entry, "source": tuple(_data()["sources"][name] for name in entry["source"])}


@cache
def _data() -> Mapping[str, Any]:
    data: Mapping[str, Any] = parse_yaml(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    return data


def main() -> None:
    parts = {"capacity": capacity_accuracy(), "load_log": load_log_accuracy()}
    rows = {name: [asdict(figure) for figure in part.figures] for name, part in parts.items()}
    head = "# Written by `python -m benchmarks.published_memory`.\n"
    DATA.write_text(head + yaml.safe_dump(rows, sort_keys=False, allow_unicode=True), encoding="utf-8")


if __name__ == "__main__":
    main()
