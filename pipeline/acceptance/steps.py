"""What an acceptance run does, step by step. Each step is a function from the run so far to its checks.

A step may raise; whoever runs it records that as a failed check, and goes on with the next.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline import resources
from pipeline.acceptance import asking
from pipeline.acceptance.judging import (
    at_least,
    at_most,
    expect,
    held_to_forecast,
    memory_checks,
    skipped,
    slo_checks,
)
from pipeline.acceptance.report import AcceptanceCheck
from pipeline.acceptance.served import ServedDeployment, alive, gpu_memory_mib
from pipeline.acceptance.upstream import END_TO_END, end_to_end, run_upstream_client
from pipeline.client import ChatTemplate, Client, Message, Sampling
from pipeline.contracts.launching import upstream_clients
from pipeline.errors import ServerError
from pipeline.golden import GoldenSet
from pipeline.plan.performance import WorkloadOptions
from pipeline.plan.performance.accuracy import Estimate, interval_estimate, rate_estimate, unchecked
from pipeline.plan.plan import DRAFT, TARGET, evaluated_exports
from pipeline.plan.report import PlanReport
from pipeline.prepare import Prepared, prepare
from pipeline.prepare.report import make_report
from pipeline.progress import Progress
from pipeline.recipe import Gate, Recipe, load_recipe
from pipeline.runtimes import ExecutorChoice
from pipeline.serving.live import MetricsPage
from pipeline.stages import Builder, StepOutcome
from pipeline.stages.evaluate import Export
from pipeline.stages.evaluate.engine_answers import EngineAnswer, engine_perplexity, score_answers
from pipeline.store import Store
from pipeline.triton.deployment import ENTRY, TARGET_MODEL, Deployment

Checks = Iterator[AcceptanceCheck]
ENSEMBLE = "ensemble"
_REQUESTS, _BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"
# Families that Triton's page must have: always, and where the inflight batcher or our engine publishes.
_FAMILIES = ("nv_inference_request_success_total", "nv_inference_request_duration_us_total")
_ENGINE_FAMILIES = (_REQUESTS, _BLOCKS, "nv_trt_llm_general_metrics")
_SETTLED_S, _POLL_S = 60.0, 0.25
_LEVEL_S = 120.0  # in which streams of one load begin requests
_FREED_MIB = 512.0  # that a GPU may hold more after the end than before the start: the driver's own


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """How an acceptance run is made.

    Attributes:
        prompt_tokens: of the prompts that latency and load are measured with; None: up to 1,024 of the recipe's limit.
        output_tokens: of their answers; None: up to 128 of the recipe's limit.
        rounds: requests of each stream that are measured at each load.
        questions: that draft equality and the gate are judged by.
        upstream: folder with upstream's clients; None: where the containers have them.
        offline: ask no hub.
        allowed: rules of preflight whose errors are let pass.
        devices: GPUs; empty for all that are needed.
        start_timeout_s: time to become ready; None for what the package's size asks for.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rounds: int = 3
    questions: int = 32
    upstream: Path | None = None
    offline: bool = False
    allowed: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    start_timeout_s: float | None = None


@dataclass(slots=True)
class AcceptanceRun:
    """What the steps share: what was asked for, and what the steps before have made."""

    recipe: Recipe
    store: Store
    options: AcceptanceOptions
    progress: Progress
    logs: Path
    figures: dict[str, Any] = field(default_factory=dict)  # of the step that runs
    prepared: Prepared | None = None
    plan: PlanReport | None = None
    package: Path | None = None
    served: ServedDeployment | None = None
    before_mib: dict[str, float] = field(default_factory=dict)  # GPU -> used before the start
    answers: list[EngineAnswer] = field(default_factory=list)

    @property
    def on_gpu(self) -> bool:
        """Whether the recipe is for a GPU."""
        return self.recipe.runtime.kind != "cpu"

    @property
    def deployment(self) -> Deployment:
        """Of the package. Raises ServerError if there is none."""
        return Deployment.load(self.built)

    @property
    def built(self) -> Path:
        """The package's folder. Raises ServerError if it was not built."""
        if self.package is None:
            raise ServerError("there is no package: see the step build")
        return self.package

    @property
    def up(self) -> ServedDeployment:
        """The server. Raises ServerError if it is not there."""
        if self.served is None:
            raise ServerError("there is no server: see the step serve")
        if self.served.process.poll() is not None:
            raise ServerError(f"pipeline serve has ended with exit code {self.served.process.returncode}")
        return self.served

    @property
    def template(self) -> ChatTemplate:
        """The chat template of the package."""
        return ChatTemplate.from_directory(self.built / self.deployment.tokenizer_dir)

    @property
    def gate(self) -> Gate:
        """The budgets of the recipe; the usual ones where it has none."""
        return self.recipe.quantization.gate or Gate()

    def client(self, model: str | None = None) -> Client:
        """Make a client of the server, with its chat template.

        Args:
            model: Triton model to ask; None for the one that clients ask.
        """
        asked = model or self.deployment.entry_model
        return Client(self.up.record.grpc_url, model=asked, template=self.template, timeouts=asking.TIMEOUTS)

    def sampling(self, **given: Any) -> Sampling:
        """Greedy sampling of an answer of exactly `max_tokens`, as far as the model takes that.

        Args:
            **given: further parameters; None leaves one out.
        """
        with self.client() as client:
            inputs = client.model().inputs
        sampling: dict[str, Any] = {"temperature": 0.0, **given}
        tokens = sampling.get("max_tokens")
        if inputs.keys() & {"min_tokens", "min_length"} and tokens:
            sampling["min_tokens"] = tokens
        return sampling  # type: ignore[return-value]

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompts that are measured with."""
        return self.options.prompt_tokens or min(1024, self.deployment.limits.max_input_tokens)

    @property
    def output_tokens(self) -> int:
        """Length of the answers that are measured."""
        return self.options.output_tokens or min(128, self.deployment.limits.max_output_tokens)

    @property
    def separate_draft(self) -> bool:
        """Whether the draft is a model of its own, that a request can do without."""
        return self.deployment.limits.max_draft_tokens > 0 and "tensorrt_llm_draft" in self.deployment.models

    @property
    def undrafted(self) -> dict[str, int]:
        """What a request says to be answered without the draft."""
        return {"num_draft_tokens": 0} if self.separate_draft else {}


@dataclass(frozen=True, slots=True)
class AcceptanceStepPlan:
    """A step that is to be run: its function, and whether it needs the server."""

    run: Callable[[AcceptanceRun], Checks]
    serving: bool = True

    @property
    def name(self) -> str:
        """As `--skip` takes it."""
        return self.run.__name__

    @property
    def title(self) -> str:
        """What it does, in a sentence."""
        return (self.run.__doc__ or "").splitlines()[0].rstrip(".")


def plan(run: AcceptanceRun) -> Checks:
    """What the plan says of memory and speed, at the lengths that will be measured."""
    limits, options = run.recipe.limits, run.options
    workload = WorkloadOptions(
        prompt_tokens=options.prompt_tokens or min(1024, limits.max_input_tokens),
        output_tokens=options.output_tokens or min(128, limits.max_output_tokens),
    )
    run.plan = make_report(
        run.recipe, run.store, offline=options.offline, allowed=options.allowed, workload=workload
    )
    errors = [str(finding.problem) for finding in run.plan.findings if finding.stops]
    yield expect("plan", not run.plan.refused, "fits, refused by no rule", run.plan.verdict, "; ".join(errors))
    if run.plan.performance is not None:
        run.figures["forecast"] = dict(run.plan.performance.as_json())
    for what, why in run.plan.unknown.items():
        yield AcceptanceCheck(f"plan of {what}", "measured", "", "not known", note=why)


def build(run: AcceptanceRun) -> Checks:
    """Everything that the store lacks, up to the package."""
    outcomes: list[StepOutcome] = []
    run.prepared = prepare(
        run.recipe, run.store, offline=run.options.offline, progress=run.progress, allowed=run.options.allowed
    )
    run.prepared.check(run.store)
    choice = ExecutorChoice("auto", None, run.options.devices)
    builder = Builder(run.prepared, run.store, run.progress, choice, outcomes.append)
    try:
        run.package = builder.run().path
    finally:
        run.figures["steps"] = [
            {"step": one.step.name, "made": one.made, "seconds": round(one.seconds, 1), "digest": one.artifact.digest}
            for one in outcomes
        ]
    made = sum(outcome.made for outcome in outcomes)
    yield expect("package", True, "a package", f"{run.deployment.digest[:16]}, {made} of {len(outcomes)} steps made")


def find(run: AcceptanceRun) -> Checks:
    """In place of `build`, with --skip build: the package that the store has."""
    run.prepared = prepare(
        run.recipe, run.store, offline=run.options.offline, progress=run.progress, allowed=run.options.allowed
    )
    run.package = Builder(run.prepared, run.store, run.progress).finished().path
    yield skipped("package", f"not built by this run; the store has {run.deployment.digest[:16]}")


def serve(run: AcceptanceRun) -> Checks:
    """`pipeline serve`, until it is ready."""
    if run.on_gpu:
        run.before_mib = gpu_memory_mib(run.options.devices)
    deadline_s = run.options.start_timeout_s or run.deployment.start_deadline_s
    words = (*run.recipe.words, *run.store.words, "--start-timeout-s", f"{deadline_s:g}")
    words += tuple(word for rule in sorted(run.options.allowed) for word in ("--allow", rule))
    run.served = ServedDeployment.start(
        words, run.recipe.name, run.store.running, run.logs, deadline_s=deadline_s
    )
    yield at_most("ready", run.served.start_s, deadline_s, "s", note="the deadline of a start")


def stream(run: AcceptanceRun) -> Checks:
    """Streams, from each model that clients may ask and through the gateway."""
    question, expected = questions(1)[0], ""
    tokens = min(48, run.deployment.limits.max_output_tokens)
    for model in (run.deployment.entry_model, *([ENSEMBLE] if ENSEMBLE in run.deployment.models else [])):
        with run.client(model) as client, client.stream(question, temperature=0.0, max_tokens=tokens) as answer:
            parts = [chunk.text for chunk in answer if chunk.text]
            whole = client.generate(question, temperature=0.0, max_tokens=tokens)
        expected = expected or whole.text
        yield expect(
            f"{model}: joined chunks", "".join(parts) == whole.text == expected and bool(parts),
            "the text of a whole answer, of each model", f"{len(parts)} chunks, {len(whole.text)} characters",
            "" if "".join(parts) == whole.text else f"{''.join(parts)!r} is not {whole.text!r}",
        )  # fmt: skip
        yield expect(f"{model}: it streams", len(parts) > 1, "more than 1 chunk", f"{len(parts)} chunks")
        yield expect(
            f"{model}: end", whole.finish_reason in ("stop", "length"), "a reason", whole.finish_reason
        )
    if not run.up.record.gateway_url:
        yield skipped("gateway", "pipeline serve runs none here")
        return
    text, events = asking.gateway_answer(run.up.record.gateway_url, run.recipe.name, question, tokens)
    yield expect(
        "gateway: joined events", text == expected, "the text that Triton streams", f"{events} events",
        "" if text == expected else f"{text!r} is not {expected!r}",
    )  # fmt: skip


def golden(run: AcceptanceRun) -> Checks:
    """The recipe's golden questions."""
    asked = GoldenSet.load(run.built)
    if asked is None:
        yield skipped("golden questions", "the recipe has none")
        return
    longest = run.deployment.limits.max_output_tokens
    with run.client() as client:
        report = asked.ask(
            lambda one: client.generate(one.asked, temperature=0.0, max_tokens=one.max_tokens or longest).text  # type: ignore[arg-type]
        )
    right, count = report.right, len(report.answers)
    yield at_least("golden questions", right / count, report.min_passed, "%", note=str(report))


def upstream(run: AcceptanceRun) -> Checks:
    """Upstream's own client: its file where there is one, and else the requests that it sends."""
    folder = run.options.upstream or Path(upstream_clients())
    models = [name for name in (ENSEMBLE, ENTRY) if name in run.deployment.models]
    if not models:
        yield skipped("end_to_end_grpc_client", "it asks ensemble and tensorrt_llm_bls, which this runtime has not")
        return
    file, tokens = folder / END_TO_END, min(20, run.deployment.limits.max_output_tokens)
    how = "upstream's file" if file.is_file() else "its requests, sent by us: its file is not on this machine"
    prompts = [run.template.render(question) for question in questions(2)]
    for model in models:
        with run.client(model) as client:
            texts = [client.generate(one, temperature=0.0, max_tokens=tokens).text for one in prompts]
        for streaming in (True, False):
            name = f"end_to_end_grpc_client, {model}, {'streamed' if streaming else 'whole'}"
            url = run.up.record.grpc_url
            if file.is_file():
                fault = run_upstream_client(
                    file, url, model, prompts[0], texts[0], max_tokens=tokens, streaming=streaming
                )
            else:
                read = end_to_end(url, model, prompts, max_tokens=tokens, streaming=streaming)
                fault = "" if read == texts else f"{read} is not {texts}"
            yield expect(name, not fault, "the greedy answer", fault or "the same", how)


def draft(run: AcceptanceRun) -> Checks:
    """Greedy answers with the draft equal greedy answers without it."""
    if run.recipe.draft is None:
        yield skipped("draft equality", "the recipe has no draft")
        return
    asked, tokens = questions(run.options.questions), min(64, run.deployment.limits.max_output_tokens)

    def answers(client: Client, **sampling: Any) -> tuple[list[str], int, int]:
        found = [client.generate(one, temperature=0.0, max_tokens=tokens, **sampling) for one in asked]
        proposed = sum(one.stats.draft_tokens or 0 for one in found)
        return [one.text for one in found], proposed, sum(one.stats.accepted_tokens or 0 for one in found)

    with run.client() as client:
        drafted, proposed, accepted = answers(client)
        alone, by_alone, _ = answers(client, num_draft_tokens=0) if run.separate_draft else ([], 0, 0)
    if not run.separate_draft:
        alone, by_alone = _without_draft(run, answers)
    same = sum(one == other for one, other in zip(drafted, alone, strict=True))
    maker = asking.PromptMaker(run.built / run.deployment.tokenizer_dir)
    agreement = _agreement([(maker.encode(one), maker.encode(other)) for one, other in zip(drafted, alone, strict=True)])
    run.figures |= {"proposed": proposed, "accepted": accepted, "equal": same, "answers": len(asked)}
    # Kernels of a GPU may round one token differently in a step of several: then a tie falls otherwise.
    limit = run.gate.min_top1_agreement if run.on_gpu else 1.0
    yield at_least("greedy with draft = greedy without", agreement, limit, "%",
                   note=f"{same} of {len(asked)} answers are equal; tokens up to a first difference are counted")  # fmt: skip
    yield expect("the draft is used", proposed > 0, "tokens are proposed", f"{proposed} proposed, {accepted} accepted")
    yield expect("without it none is", by_alone == 0, "no token is proposed", f"{by_alone} proposed")


def _without_draft(
    run: AcceptanceRun, answers: Callable[[Client], tuple[list[str], int, int]]
) -> tuple[list[str], int]:
    """Answers of a second deployment of the recipe, without its draft; the first is stopped, and started again."""
    overrides = (*run.recipe.provenance.overrides, "draft=null")
    plain = load_recipe(str(run.recipe.provenance.file), overrides)
    other = replace(run, recipe=plain, logs=run.logs / "without-draft", figures={}, prepared=None, served=None)
    run.up.stop()
    run.served = None
    try:
        for step in (build, serve):
            list(step(other))
        with other.client() as client:
            texts, proposed, _ = answers(client)
    finally:
        if other.served is not None:
            other.served.stop()
        list(serve(run))
    return texts, proposed


def _agreement(pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Share of tokens that are equal, of those up to the first difference of each pair."""
    equal = differing = 0
    for one, other in pairs:
        both = zip(one, other, strict=False)
        same = next((at for at, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))
        equal += same
        differing += same < max(len(one), len(other))
    return equal / max(1, equal + differing)


def cancel(run: AcceptanceRun) -> Checks:
    """As many long answers as the limits let in, left by their clients after the first text."""
    limits = run.deployment.limits
    maker = asking.PromptMaker(run.built / run.deployment.tokenizer_dir)
    prompts = [maker.prompt(min(32, limits.max_input_tokens)) for _ in range(8)]
    sampling = run.sampling(max_tokens=limits.max_output_tokens, temperature=1.0, top_k=50)
    left = asyncio.run(
        asking.leave_streams(
            run.up.record.grpc_url, run.deployment.entry_model, prompts, sampling, limits.max_concurrency
        )
    )
    yield expect("streams that were left", left == limits.max_concurrency, str(limits.max_concurrency), str(left))
    began = time.monotonic()
    with run.client() as client:
        after = client.generate(questions(1)[0], temperature=0.0, max_tokens=8)
    yield expect("the next request", bool(after.text), "an answer", f"after {time.monotonic() - began:.2f} s")
    active = _active(run)
    if active is None:
        yield skipped("requests in the engine afterwards", "Triton's metrics page of this runtime does not tell them")
        return
    while active and time.monotonic() - began < _SETTLED_S:
        time.sleep(_POLL_S)
        active = _active(run)
    measured = f"{active or 0:g} after {time.monotonic() - began:.1f} s"
    yield expect("requests in the engine afterwards", not active, "0", measured)


def _active(run: AcceptanceRun) -> float | None:
    page = MetricsPage.fetch(run.up.record.metrics_url)
    return None if page is None else page.total(_REQUESTS, request_type="active")


def latency(run: AcceptanceRun) -> Checks:
    """Time to the first token and between tokens of one request alone, against the plan's forecast."""
    figures = _load(run, 1, max(8, run.options.rounds), **run.undrafted)
    run.figures["alone"] = figures.as_json()
    yield from _no_fault(figures)
    if not figures.stats:
        return
    forecast = run.plan.performance if run.plan is not None else None
    middle = sorted(figures.ttft_ms)[len(figures.ttft_ms) // 2]
    yield held_to_forecast("first token alone, median", middle, forecast.ttft_ms if forecast else None, "ms")
    alone = forecast.itl_ms if forecast else None
    yield held_to_forecast("time between tokens alone, mean", figures.tpot_ms, alone, "ms")


def load(run: AcceptanceRun) -> Checks:
    """Streams at a time up to limits.max_concurrency, against the plan's forecast and the recipe's SLO."""
    most = run.deployment.limits.max_concurrency
    forecast = run.plan.performance if run.plan is not None else None
    points = {point.batch: point for point in forecast.curve} if forecast is not None else {}
    levels = sorted({2**power for power in range(1, most.bit_length()) if 2**power < most} | {most})
    measured = []
    for streams in levels:
        figures = _load(run, streams, run.options.rounds, **run.undrafted)
        measured.append(figures.as_json())
        yield from _no_fault(figures)
        if not figures.stats:
            continue
        point, checked = points.get(streams), _is_checked(run, streams)
        known = point is not None
        yield held_to_forecast(
            f"tokens a second, {streams} streams", figures.tokens_per_s,
            rate_estimate(point.tokens_per_s, checked=checked) if known and point else None, "tokens/s",
            less_is_better=False,
        )  # fmt: skip
        yield held_to_forecast(
            f"time between tokens, {streams} streams, mean", figures.tpot_ms,
            interval_estimate(point.itl_ms, checked=checked) if known and point else None, "ms",
        )  # fmt: skip
        yield held_to_forecast(
            f"first token, {streams} streams, p95", figures.ttft_p95_ms,
            Estimate(point.ttft_ms) if known and point else None, "ms",
        )  # fmt: skip
    as_deployed = figures
    if run.separate_draft:
        as_deployed = _load(run, most, run.options.rounds)
        run.figures["with_draft"] = as_deployed.as_json()
        yield from _no_fault(as_deployed)
        gain = as_deployed.tokens_per_s / figures.tokens_per_s if figures.tokens_per_s else 0.0
        yield AcceptanceCheck(
            f"tokens a second with the draft, {most} streams", "measured", "",
            f"{as_deployed.tokens_per_s:,.0f} tokens/s, {gain:.2f} times those without", as_deployed.tokens_per_s,
            "tokens/s",
        )  # fmt: skip
    run.figures["levels"] = measured
    yield from slo_checks(run.recipe.slo, as_deployed.ttft_p95_ms, as_deployed.itl_p95_ms, most)


def _load(run: AcceptanceRun, streams: int, rounds: int, **sampling: Any) -> asking.LoadFigures:
    maker = asking.PromptMaker(run.built / run.deployment.tokenizer_dir)
    prompts = [maker.prompt(run.prompt_tokens) for _ in range(streams * (rounds + 1))]
    given = run.sampling(max_tokens=run.output_tokens, **sampling)
    return asyncio.run(
        asking.load(
            run.up.record.grpc_url, run.deployment.entry_model, prompts, given,
            streams=streams, rounds=rounds, seconds=_LEVEL_S,
        )
    )  # fmt: skip


def _no_fault(figures: asking.LoadFigures) -> Checks:
    seen = list(dict.fromkeys(figures.faults))[:3]
    yield expect(
        f"{figures.streams} streams, requests that failed", not figures.faults and bool(figures.stats), "0",
        f"{len(figures.faults)} of {len(figures.faults) + len(figures.stats)}", "; ".join(seen),
    )  # fmt: skip


def _is_checked(run: AcceptanceRun, streams: int) -> bool:
    """Whether published figures cover this load."""
    memory, kind = (run.plan.memory if run.plan is not None else None), run.recipe.runtime.kind
    if memory is None or kind == "cpu":
        return False
    return not unchecked("throughput", memory.spec.models[0], memory.spec.device, kind, batch=streams)


def memory(run: AcceptanceRun) -> Checks:
    """Memory after full load, and blocks of the KV cache, against the plan of memory."""
    if run.on_gpu:
        now = gpu_memory_mib(run.options.devices)
        used = {name: mib - run.before_mib.get(name, 0.0) for name, mib in now.items()}
        used = {name: mib for name, mib in used.items() if mib > 0}
    else:
        used = run.up.engine_memory_mib()
    page = MetricsPage.fetch(run.up.record.metrics_url)
    blocks = page.by(_BLOCKS, "model", kv_cache_block_type="max") if page is not None else {}
    planned = run.plan.memory if run.plan is not None else None
    yield from memory_checks(planned, used, blocks, on_gpu=run.on_gpu)


def metrics(run: AcceptanceRun) -> Checks:
    """The pages of metrics: Triton's, and the gateway's."""
    triton = MetricsPage.fetch(run.up.record.metrics_url)
    engine = TARGET_MODEL in run.deployment.models and run.recipe.runtime.kind != "pytorch"
    wanted = (*_FAMILIES, *(_ENGINE_FAMILIES if engine else ()))
    missing = [name for name in wanted if triton is None or not triton.samples.get(name)]
    yield expect("Triton's page", not missing, f"{len(wanted)} families", f"{len(wanted) - len(missing)}",
                 f"missing: {', '.join(missing)}" if missing else "")  # fmt: skip
    answered = triton.total(_FAMILIES[0], model=run.deployment.entry_model) if triton is not None else None
    yield expect("requests that Triton counted", bool(answered), "more than 0", f"{answered or 0:g}")
    url = run.up.record.gateway_url
    if not url:
        yield skipped("the gateway's page", "pipeline serve runs no gateway here")
        return
    gateway = MetricsPage.fetch(f"{url.rstrip('/')}/metrics")
    counted = gateway.total("pipeline_requests_total", model=run.recipe.name) if gateway is not None else None
    yield expect("requests that the gateway counted", bool(counted), "more than 0", f"{counted or 0:g}")


def stop(run: AcceptanceRun) -> Checks:
    """SIGTERM: all processes end, and the GPUs are free again."""
    pids = run.up.processes()
    served = run.up
    seconds, code = served.stop(), served.process.returncode
    left = [f"{pids[pid]} ({pid})" for pid in alive(list(pids))]
    yield expect("processes that are left", not left, "none", ", ".join(left) or "none", f"{seconds:.1f} s")
    yield expect("exit code", code == 0, "0", str(code))
    if run.on_gpu:
        after = gpu_memory_mib(run.options.devices)
        for name, mib in after.items():
            yield at_most(f"{name} holds more than before", mib - run.before_mib.get(name, 0.0), _FREED_MIB, "MiB")


def answers(run: AcceptanceRun) -> Checks:
    """Greedy answers of the engine's own model to held-out text, token by token, for the step gate."""
    if run.recipe.runtime.kind == "pytorch":
        maker = asking.PromptMaker(run.built / run.deployment.tokenizer_dir)
        with run.client() as client:
            for ids in _heldout(run):
                prompt = maker.decode(ids)
                given = maker.encode(prompt)
                whole = maker.encode(prompt + client.generate(prompt, temperature=0.0, max_tokens=32).text)
                if whole[: len(given)] == given:
                    run.answers.append(EngineAnswer(tuple(given), tuple(whole[len(given) :])))
    else:
        run.answers = asking.engine_answers(
            run.up.record.grpc_url, _heldout(run), max_tokens=min(64, run.deployment.limits.max_output_tokens),
            end_id=run.deployment.end_id, pad_id=run.deployment.pad_id,
        )  # fmt: skip
    tokens = sum(len(one.tokens) for one in run.answers)
    yield expect("answers to held-out text", tokens > 0, "tokens", f"{tokens} tokens of {len(run.answers)} answers")


def _heldout(run: AcceptanceRun) -> list[list[int]]:
    """The beginnings of held-out samples: of the recipe's set where it is calibrated, else of the packaged one."""
    count, limits = run.options.questions, run.deployment.limits
    found = None
    if run.prepared is not None and "dataset" in run.prepared.plan:
        found = run.store.find(run.prepared.plan["dataset"].key)
    if found is None:
        maker = asking.PromptMaker(run.built / run.deployment.tokenizer_dir)
        return [maker.encode(run.template.render(one))[: limits.max_input_tokens] for one in questions(count)]
    lines = (found.path / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    samples = [json.loads(line)["tokens"] for line in lines]
    return [sample[: max(1, min(len(sample) // 2, limits.max_input_tokens))] for sample in samples]


def gate(run: AcceptanceRun) -> Checks:
    """The engine's own answers, scored by the checkpoint that it was made from and by the original."""
    if not run.answers:
        yield skipped("gate on the engine's answers", "there are none: see the step answers")
        return
    if run.prepared is None:
        raise ServerError("the plan of the build is not known: see the step build")
    steps, limits = run.prepared.plan, run.gate
    original = run.store.find(steps[f"fetch.{TARGET}"].key)
    if original is None:
        yield skipped("gate on the engine's answers", "the store has no checkpoint: the package was made elsewhere")
        return
    names: list[tuple[str, Path | Export]] = [("the original", original.path)]
    calibrate = f"calibrate.{TARGET}"
    if calibrate in steps and (calibrated := run.store.find(steps[calibrate].key)) is not None:
        loaded = evaluated_exports(run.recipe)[0]
        names.insert(0, ("the checkpoint", Export(calibrated.path / loaded.folder, loaded.kv_scale)))
    said = engine_perplexity(run.answers)
    for index, (name, checkpoint) in enumerate(names):
        scores = score_answers(checkpoint, run.answers, reference=original.path, progress=run.progress)
        run.figures[name] = {
            "positions": scores.positions, "agreement": scores.agreement, "perplexity": scores.perplexity,
        }  # fmt: skip
        yield at_least(
            f"top-1 agreement with {name}", scores.agreement, limits.min_top1_agreement, "%",
            note=f"over {scores.positions} tokens of {len(run.answers)} answers; the limit is the recipe's gate",
        )  # fmt: skip
        if index == 0 and said is not None:
            run.figures["engine_perplexity"] = said
            yield at_most(
                f"perplexity by the engine off that by {name}", abs(said / scores.perplexity - 1),
                limits.max_perplexity_increase, "%", note=f"{said:.4f} by the engine, {scores.perplexity:.4f} by {name}",
            )  # fmt: skip
    if said is None:
        yield skipped("perplexity by the engine", "this runtime returns no log probabilities")


def questions(count: int) -> list[list[Message]]:
    """First turns of the packaged held-out dialogues, as chat messages.

    Args:
        count: how many; there are 320.
    """
    file = resources.folder("calibration") / "support" / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [[json.loads(line)["messages"][0]] for line in lines]


STEPS = (
    AcceptanceStepPlan(plan, serving=False),
    AcceptanceStepPlan(build, serving=False),
    AcceptanceStepPlan(serve, serving=False),
    *map(AcceptanceStepPlan, (stream, golden, upstream, draft, answers, cancel, latency, load, memory, metrics, stop)),
    AcceptanceStepPlan(gate, serving=False),
)
SKIPPABLE = tuple(step.name for step in STEPS if step.name not in ("plan", "serve", "stop"))
