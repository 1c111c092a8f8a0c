"""The memory model against published measurements: `pipeline plan accuracy` prints it.

The model takes its constants from elsewhere (`contracts/data/engine_memory.yaml`); none was chosen by these points.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from pipeline.contracts.gpus import gpu
from pipeline.contracts.memory_measurements import CapacityPoint, LoadLog, capacity_points, load_logs
from pipeline.contracts.models import known_model
from pipeline.plan.memory.capacity import MemoryPlan, plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism

_SLACK = 1000  # tokens that the measurements had beyond isl + osl


@dataclass(frozen=True, slots=True)
class MeasurementError:
    """One figure, measured and computed."""

    what: str
    measured: float
    computed: float
    source: str

    @property
    def error(self) -> float:
        """Relative: -0.02 is two percent too small."""
        return self.computed / self.measured - 1


@dataclass(frozen=True, slots=True)
class MeasurementErrors:
    """All compared figures of one kind."""

    figures: tuple[MeasurementError, ...]

    @property
    def median(self) -> float:
        """Median of the relative errors, without sign."""
        return median(abs(figure.error) for figure in self.figures)

    @property
    def worst(self) -> float:
        """Largest of the relative errors, without sign."""
        return max(abs(figure.error) for figure in self.figures)


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
    label = f"{point.gpu}  {point.model.partition('/')[2]}  {point.fraction}  {point.isl} + {point.osl}"
    return MeasurementError(label, point.sequences, plan_measured(point).sequences, "; ".join(point.source))


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
