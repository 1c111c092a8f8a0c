"""Steps of the deployment: plan, build, serve, latency, memory, metrics; and, at the end, stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.bench.accept.judging import (
    at_most,
    expect,
    held_to_forecast,
    memory_checks,
    skipped,
    slo_checks,
)
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.accept.state import KV_BLOCKS, REQUESTS, TIMEOUT_S, AcceptanceRun, Checks, questions
from pipeline.bench.load import Period
from pipeline.bench.result import LevelResult
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.client import Sampling
from pipeline.machine.gpus import allowed_devices
from pipeline.machine.packages import Need, missing_text
from pipeline.plan.performance.estimates import Estimate
from pipeline.plan.settings import WorkloadOptions
from pipeline.prepare import prepare
from pipeline.prepare.report import make_report
from pipeline.process_state import ProcessStat
from pipeline.runtimes import ExecutorChoice
from pipeline.serving.live import MetricsPage
from pipeline.serving.served import ServedDeployment, gpu_memory_mib
from pipeline.stages import Builder, StepOutcome
from pipeline.triton.deployment import TARGET_MODEL
from pipeline.triton.running import RunningServer

_FREED_MIB = 512.0  # that a GPU may hold more after the end than before the start: the driver's own
# Families that Triton's page must have: always, and where the inflight batcher or our engine publishes.
_FAMILIES = ("nv_inference_request_success_total", "nv_inference_request_duration_us_total")
_ENGINE_FAMILIES = (REQUESTS, KV_BLOCKS, "nv_trt_llm_general_metrics")


def plan(run: AcceptanceRun) -> Checks:
    """Plan memory and speed at the lengths that will be measured."""
    limits, settings = run.recipe.limits, run.settings
    workload = WorkloadOptions(
        prompt_tokens=settings.load.prompt_tokens or min(1024, limits.max_input_tokens),
        output_tokens=settings.load.output_tokens or min(128, limits.max_output_tokens),
    )
    run.plan = make_report(run.recipe, run.store, allowed=run.allowed, workload=workload)
    errors = [str(finding.problem) for finding in run.plan.findings if finding.stops]
    yield expect(
        "plan", not run.plan.refused, "fits, refused by no rule", run.plan.verdict, "; ".join(errors)
    )
    if run.plan.performance is not None:
        run.figures["forecast"] = dict(run.plan.performance.as_json())
    for figure, why in run.plan.unknown.items():
        yield AcceptanceCheck(f"plan of {figure}", "measured", "", "not known", note=why)


def build(run: AcceptanceRun) -> Checks:
    """Build everything that the store lacks, up to the package."""
    outcomes: list[StepOutcome] = []
    run.prepared = prepare(run.recipe, run.store, progress=run.progress, allowed=run.allowed)
    run.prepared.check(run.store)
    choice = ExecutorChoice("auto", None, allowed_devices())
    builder = Builder(run.prepared, run.store, run.progress, choice, outcomes.append)
    try:
        run.package = builder.run().path
    finally:
        run.figures["steps"] = [
            {
                "step": outcome.step.name,
                "made": outcome.made,
                "seconds": round(outcome.seconds, 1),
                "digest": outcome.artifact.digest,
            }
            for outcome in outcomes
        ]
    made = sum(outcome.made for outcome in outcomes)
    yield expect(
        "package", True, "a package", f"{run.deployment.digest[:16]}, {made} of {len(outcomes)} steps made"
    )


def find(run: AcceptanceRun) -> Checks:
    """Find the package in the store, in place of `build` (--skip build)."""
    run.prepared = prepare(run.recipe, run.store, progress=run.progress, allowed=run.allowed)
    run.package = Builder(run.prepared, run.store, run.progress).finished().path
    yield skipped("package", f"not built by this run; the store has {run.deployment.digest[:16]}")


def serve(run: AcceptanceRun) -> Checks:
    """Run `pipeline serve`, and wait until it is ready."""
    if run.on_gpu:
        run.before_mib = gpu_memory_mib(allowed_devices())
    deadline_s = run.recipe.triton.start_timeout_s or run.deployment.start_deadline_s
    argv = (*run.recipe.argv, *run.store.argv, "--set", f"triton.start_timeout_s={deadline_s:g}")
    argv += tuple(part for rule in sorted(run.allowed) for part in ("--allow", rule))
    if allowed_devices():
        argv += ("--gpus", ",".join(map(str, allowed_devices())))
    if missing := missing_text([Need("gateway", "the gateway")]):
        yield skipped("gateway", f"it needs distributions that are not installed here:\n{missing}")
        argv += ("--no-gateway",)
    run.served = ServedDeployment.start(
        argv, run.recipe.name, run.store.running, run.logs, deadline_s=deadline_s
    )
    yield at_most("ready", run.served.start_s, deadline_s, "s", note="the deadline of a start")


def stop(run: AcceptanceRun) -> Checks:
    """Send SIGTERM, and check that all processes end and the GPUs are free again."""
    served, pids = run.up, run.up.processes()
    record = RunningServer.read(run.store.running, run.recipe.name)
    again = {} if record is None else {name: count for name, count in record.restarts.items() if count}
    yield expect(
        "what had to be started again", record is not None and not again, "nothing", str(again or "nothing")
    )
    seconds, code = served.stop(), served.process.returncode
    left = [f"{pids[pid]} ({pid})" for pid in pids if ProcessStat.of(pid) is not None]
    yield expect("processes that are left", not left, "none", ", ".join(left) or "none", f"{seconds:.1f} s")
    yield expect("exit code", code == 0, "0", str(code))
    if run.on_gpu:
        after = gpu_memory_mib(allowed_devices())
        for name, mib in after.items():
            yield at_most(
                f"{name} holds more than before", mib - run.before_mib.get(name, 0.0), _FREED_MIB, "MiB"
            )


def memory(run: AcceptanceRun) -> Checks:
    """Compare memory after full load, and blocks of the KV cache, with the plan of memory."""
    if run.on_gpu:
        now = gpu_memory_mib(allowed_devices())
        used = {name: mib - run.before_mib.get(name, 0.0) for name, mib in now.items()}
        used = {name: mib for name, mib in used.items() if mib > 0}
    else:
        used = run.up.engine_memory_mib()
    page = MetricsPage.fetch(run.up.record.metrics_url)
    blocks = page.by(KV_BLOCKS, "model", kv_cache_block_type="max") if page is not None else {}
    planned = run.plan.memory if run.plan is not None else None
    yield from memory_checks(planned, used, blocks, on_gpu=run.on_gpu)


def metrics(run: AcceptanceRun) -> Checks:
    """Check the metrics pages of Triton and of the gateway."""
    triton = MetricsPage.fetch(run.up.record.metrics_url)
    engine = TARGET_MODEL in run.deployment.models and run.recipe.runtime.kind != "pytorch"
    families = (*_FAMILIES, *(_ENGINE_FAMILIES if engine else ()))
    missing = [name for name in families if triton is None or not triton.samples.get(name)]
    yield expect(
        "Triton's page",
        not missing,
        f"{len(families)} families",
        f"{len(families) - len(missing)}",
        f"missing: {', '.join(missing)}" if missing else "",
    )
    answered = triton.total(_FAMILIES[0], model=run.deployment.entry_model) if triton is not None else None
    yield expect("requests that Triton counted", bool(answered), "more than 0", f"{answered or 0:g}")
    url = run.up.record.gateway_url
    if not url:
        yield skipped("the gateway's page", "pipeline serve runs no gateway here")
        return
    run.ask_gateway(questions(1)[0], 8)
    gateway = MetricsPage.fetch(f"{url.rstrip('/')}/metrics")
    counted = gateway.total("pipeline_requests_total", model=run.recipe.name) if gateway is not None else None
    yield expect("requests that the gateway counted", bool(counted), "more than 0", f"{counted or 0:g}")


_LEVEL_S = 120.0  # in which streams of one load begin requests


def latency(run: AcceptanceRun) -> Checks:
    """Compare TTFT and ITL of one request alone with the plan's forecast."""
    level = _load(run, 1, max(8, run.settings.load.rounds), run.undrafted)
    run.figures["alone"] = figures = _figures(level)
    yield from _no_fault(level)
    if not figures["requests"]:
        return
    forecast = run.plan.performance if run.plan is not None else None
    first, alone = (forecast.ttft_ms, forecast.itl_ms) if forecast else (None, None)
    yield held_to_forecast("first token alone, median", figures["ttft_p50_ms"], first, "ms")
    yield held_to_forecast("time between tokens alone, mean", figures["tpot_ms"], alone, "ms")


def load(run: AcceptanceRun) -> Checks:
    """Compare loads up to limits.max_concurrency with the plan's forecast and the recipe's SLO."""
    most = run.deployment.limits.max_concurrency
    forecast = run.plan.performance if run.plan is not None else None
    points = {point.batch: point for point in forecast.curve} if forecast is not None else {}
    levels = sorted({2**power for power in range(1, most.bit_length()) if 2**power < most} | {most})
    measured = []
    for streams in levels:
        level = _load(run, streams, run.settings.load.rounds, run.undrafted)
        measured.append(figures := _figures(level))
        yield from _no_fault(level)
        if not figures["requests"]:
            continue
        point = points.get(streams)
        yield held_to_forecast(
            f"tokens a second, {streams} streams",
            figures["tokens_per_s"],
            forecast.estimate("throughput", point.tokens_per_s) if forecast and point else None,
            "tokens/s",
            less_is_better=False,
        )
        yield held_to_forecast(
            f"time between tokens, {streams} streams, mean",
            figures["tpot_ms"],
            forecast.estimate("tpot", point.itl_ms) if forecast and point else None,
            "ms",
        )
        yield held_to_forecast(
            f"first token, {streams} streams, p95",
            figures["ttft_p95_ms"],
            Estimate(point.ttft_ms) if point else None,
            "ms",
        )
    as_deployed = figures
    if run.separate_draft:
        level = _load(run, most, run.settings.load.rounds, {})
        run.figures["with_draft"] = as_deployed = _figures(level)
        yield from _no_fault(level)
        gain = as_deployed["tokens_per_s"] / figures["tokens_per_s"] if figures["tokens_per_s"] else 0.0
        yield AcceptanceCheck(
            f"tokens a second with the draft, {most} streams",
            "measured",
            "",
            f"{as_deployed['tokens_per_s']:,.0f} tokens/s, {gain:.2f} times those without",
            as_deployed["tokens_per_s"],
            "tokens/s",
        )
    run.figures["levels"] = measured
    yield from slo_checks(run.recipe.slo, as_deployed["ttft_p95_ms"], as_deployed["itl_p95_ms"], most)


def _load(run: AcceptanceRun, streams: int, rounds: int, sampling: Sampling) -> LevelResult:
    """Put a load on the deployment, as the plan computes it.

    The first answer of each stream is of another length, so that they do not all end and begin together, and is not
    counted.
    """
    longest, exact = run.output_tokens, run.takes_exact_lengths
    texts = run.prompts(streams * (rounds + 1), run.prompt_tokens, f"{streams} {sampling}")

    def conversations() -> Iterator[ScriptedConversation]:
        for number, text in enumerate(texts):
            first = number < streams
            tokens = max(1, longest * (number + 1) // streams) if first else longest
            yield ScriptedConversation((Turn(text, tokens, exact and not first),), chat=False)

    period = Period(_LEVEL_S, streams * rounds, warm_up_requests=streams, grace_s=TIMEOUT_S)
    return run.load(streams, conversations(), period, {"temperature": 0.0, **sampling})


def _figures(level: LevelResult) -> dict[str, Any]:
    """Figures of a load for the report; a latency that was not measured is 0."""
    ttft, tpot, itl = (level.latencies.get(name) for name in ("ttft", "tpot", "itl"))
    return {
        "streams": level.load.concurrency,
        "requests": level.requests["complete"],
        "failed": sum(level.requests.values()) - level.requests["complete"],
        "ttft_p50_ms": ttft.p50 if ttft else None,
        "ttft_p95_ms": ttft.p95 if ttft else 0.0,
        "tpot_ms": round(tpot.mean, 3) if tpot else 0.0,
        "itl_p95_ms": itl.p95 if itl else 0.0,
        "tokens_per_s": round(_tokens_per_s(level), 1),
        "acceptance": level.acceptance,
    }


def _tokens_per_s(level: LevelResult) -> float:
    """Output tokens a second of all streams, by Little's law, because the last ones end alone."""
    pairs = zip(level.samples["output_tokens"], level.samples["total"], strict=True)
    ended = [(tokens, total_ms) for tokens, total_ms in pairs if tokens and total_ms]
    busy_s = sum(total_ms for _, total_ms in ended) / 1e3
    return level.load.concurrency * sum(tokens for tokens, _ in ended) / busy_s if busy_s else 0.0


def _no_fault(level: LevelResult) -> Checks:
    complete, requests = level.requests["complete"], sum(level.requests.values())
    yield expect(
        f"{level.load.concurrency} streams, requests that failed",
        0 < complete == requests,
        "0",
        f"{requests - complete} of {requests}",
        "; ".join(list(level.errors)[:3]),
    )
