"""Measurements of TensorRT-LLM that others published, and what the model computes in their place.

`data/published.yaml` has them. scripts/fit_performance fits the constants to them and writes, class by class, how far
off those come out whose set-up was left out of the fit (`estimates`). Each is simulated as it was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.gpus import gpu, gpu_generation, gpu_rates
from pipeline.contracts.models import known_model
from pipeline.contracts.releases import Track
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory.capacity import plan_memory
from pipeline.plan.memory.spec import DeploymentSpec, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.performance.constants import efficiency
from pipeline.plan.performance.disaggregated import DisaggregatedEngines, transfer_s
from pipeline.plan.performance.engine import EngineSpeed, SpeculativeEngine, token_acceptance
from pipeline.plan.performance.estimates import Quantity, structure_of
from pipeline.plan.performance.queueing import QueueRun, Workload, all_at_once, closed_loop, open_arrivals
from pipeline.plan.performance.roofline import ModelLoad, model_load
from pipeline.plan.performance.scheduler import PromptBalance, ServedEngine
from pipeline.plan.performance.step_times import StepTimes
from pipeline.resources import parse_yaml

Kind = Literal["full-load", "fixed-batch", "first-token", "closed-loop", "open-loop", "disaggregated"]
SERVED = ("closed-loop", "open-loop", "disaggregated")  # measured at a server
_ENOUGH = 1_000_000  # pages and slots of figures whose memory was not the limit


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of one kind of a disaggregated deployment."""

    count: int
    split: Parallelism


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
    check: bool
    source: str
    measured: Mapping[Quantity, float] = field(hash=False)
    context: Servers | None = None
    generations: int = 1
    slots: int = 0

    @property
    def need(self) -> ModelSpec:
        """The model as it was run."""
        return ModelSpec("target", _sizes(self.model), self.split, self.form, self.kv_cache, self.step_tokens)

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
    return tuple(figure for table in _data()["tables"] for figure in _rows(table))


def figure_source(figure: PublishedFigure) -> str:
    """Return where a figure was published."""
    return str(_data()["sources"][figure.source])


def simulate_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> QueueRun:
    """Simulate what was measured; `given` replaces the fitted constants."""
    if figure.context is not None:
        return closed_loop(_disaggregated(figure, figure.context, given), figure.batch, figure.work)
    engine = served_figure(figure, given)
    if figure.kind == "closed-loop":
        return closed_loop(engine, figure.batch, figure.work)
    if figure.kind == "open-loop":
        return open_arrivals(engine, figure.rate, figure.work, int(_data()["open_requests"]))
    count = full_load_requests(figure) if figure.kind == "full-load" else figure.batch
    return all_at_once(engine, count, figure.work)


def compute_figure(
    figure: PublishedFigure, given: Mapping[str, Any] | None = None
) -> Mapping[Quantity, float]:
    """Compute what the model says in place of a measurement, in its units; `given` replaces the fitted constants."""
    run = simulate_figure(figure, given)
    return measured_units(figure, run.first_tokens_s.mean(), run.tpot_s, run.seconds, run.bundle)


def measured_units(
    figure: PublishedFigure, ttft_s: float, tpot_s: float, seconds: float, bundle: int
) -> Mapping[Quantity, float]:
    """Turn seconds of a simulation into the quantities of a figure, in its units.

    Args:
        ttft_s: Mean seconds to the first token.
        tpot_s: Mean seconds of a token after it.
        seconds: Seconds of all.
        bundle: Clients that each request of the simulation stands for.
    """
    answer = figure.output_tokens
    if figure.kind == "first-token":
        return {"ttft-idle": 1e3 * seconds}
    if figure.kind == "open-loop":
        return {"tpot": 1e3 * tpot_s, "ttft-loaded": 1e3 * ttft_s}
    if figure.kind in ("closed-loop", "disaggregated"):
        first: Quantity = "ttft-loaded" if figure.batch > 1 else "ttft-idle"
        rate = figure.batch * answer / (ttft_s + (answer - 1) * tpot_s)
        return {"throughput": rate, "tpot": 1e3 * tpot_s, first: 1e3 * ttft_s}
    count = full_load_requests(figure) if figure.kind == "full-load" else figure.batch
    return {"throughput": -(-count // bundle) * bundle * answer / seconds}


def _times(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> StepTimes:
    constants = efficiency(figure.gpu, figure.track, given)
    return EngineSpeed(figure_load(figure), gpu_rates(figure.gpu), constants, figure.step_tokens).times


def served_figure(figure: PublishedFigure, given: Mapping[str, Any] | None = None) -> ServedEngine:
    """Make a figure's engine as it was run."""
    groups = figure.split.request_groups
    roomy = figure.kind in ("fixed-batch", "first-token")
    constants = efficiency(figure.gpu, figure.track, given)
    return ServedEngine(
        name=figure.label,
        times=_times(figure, given),
        slots=_ENOUGH if roomy else int(_data()["max_batch"]) * groups,
        blocks=_ENOUGH if roomy else _blocks(figure),
        step_tokens=figure.step_tokens * groups,
        piece_tokens=figure.step_tokens,
        balance=PromptBalance(groups, *figure.balance) if figure.balance is not None else None,
        chunked=figure.chunked,
        overlaps=constants.hides_step,
        gpus=figure.split.world,
        request_s=constants.request_s if figure.kind in SERVED else 0.0,
        admit_s=constants.admit_s if figure.kind in SERVED else 0.0,
    )


def _disaggregated(
    figure: PublishedFigure, context: Servers, given: Mapping[str, Any] | None
) -> DisaggregatedEngines:
    """Make a figure's servers as they were run."""
    generation = served_figure(replace(figure, context=None), given)
    slots = figure.slots * figure.split.request_groups
    rates, prompts = gpu_rates(figure.gpu), replace(figure, split=context.split, context=None)
    gpus = context.count * context.split.world + figure.generations * figure.split.world
    return DisaggregatedEngines(
        context=replace(served_figure(prompts, given), overlaps=False),
        contexts=context.count,
        generation=replace(generation, slots=slots),
        generations=figure.generations,
        token_s=transfer_s(
            prompts.need, figure.need, rates, efficiency(figure.gpu, figure.track, given), gpus
        ),
    )


@cache
def _blocks(figure: PublishedFigure) -> int:
    """Pages of the KV cache; at least those of one request, where it ran although the plan has no room."""
    device, length = gpu(figure.gpu), figure.prompt_tokens + figure.output_tokens
    spec = DeploymentSpec(
        device.name,
        device.driver_mib * 2**20,
        (figure.need,),
        length,
        concurrency=1,
        fraction=figure.fraction,
    )
    return max(plan_memory(spec).blocks, -(-length // 32)) * figure.split.request_groups


@cache
def figure_load(figure: PublishedFigure) -> ModelLoad:
    """Count what a figure's model asks of a rank."""
    return model_load(figure.need, gpu_rates(figure.gpu))


@dataclass(frozen=True, slots=True)
class SpeculationCheck:
    """A published gain of prediction layers beside the computed one.

    Attributes:
        layers: Tokens that a round proposes.
        tokens: Tokens that a round yields, as published.
        measured: Times as fast as without speculation.
        computed: The same of the model, with the acceptance that yields so many tokens.
    """

    what: str
    source: str
    layers: int
    tokens: float
    measured: float
    computed: float

    @property
    def error(self) -> float:
        """Relative error: -0.1 is ten percent too little."""
        return self.computed / self.measured - 1


def speculation_checks() -> list[SpeculationCheck]:
    """Compute published gains of speculation for one request."""
    found = []
    for table in _data()["speculation"]:
        split = Parallelism(table["tensor"], expert=table["expert"])
        need = ModelSpec("target", _sizes(table["model"]), split, table["format"], table["kv_cache"])
        target = EngineSpeed.of(need, table["gpu"], "pytorch")
        context = Workload(table["prompt"], table["answer"]).mean_context
        what = f"{table['model']} {table['format']} {table['gpu']} TP{split.tensor} EP{split.expert}"
        for layers, tokens, measured in table["rows"]:
            acceptance = token_acceptance((tokens - 1) / layers, layers)
            engine = SpeculativeEngine.with_layers(target, layers, acceptance)
            gain = engine.gain(1, context)
            found.append(
                SpeculationCheck(
                    what, str(_data()["sources"][table["source"]]), layers, tokens, measured, gain
                )
            )
    return found


def full_load_requests(figure: PublishedFigure) -> int:
    """Return how many requests wait at the start of a full load."""
    return int(_data()["requests"][f"{figure.prompt_tokens}/{figure.output_tokens}"])


@cache
def _sizes(name: str) -> ModelSizes:
    entry = _data()["models"][name]
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
        how = {**_data()["runs"].get(table["source"], {}), **table}
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
            check=how.get("check", kind == "disaggregated"),
            measured=measured,
            source=table["source"],
            context=_servers(table["context"]) if "context" in table else None,
            generations=answering.get("servers", 1),
            slots=slots,
        )


def _servers(entry: Mapping[str, Any]) -> Servers:
    return Servers(entry["servers"], _split(entry))


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
    return (prompt + batch + 127) // 64 * 64 if given == "prompt" else prompt + answer + 200


@cache
def _data() -> Mapping[str, Any]:
    file = resources.files("pipeline.plan.performance") / "data" / "published.yaml"
    data: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return data
