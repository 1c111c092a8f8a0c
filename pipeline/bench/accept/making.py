"""Steps of the deployment: plan, build, serve, its memory and metrics; and, at the end, stop."""

from __future__ import annotations

from pipeline.bench.accept.judging import at_most, expect, memory_checks, skipped
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.accept.state import KV_BLOCKS, REQUESTS, AcceptanceRun, Checks, questions
from pipeline.machine.gpus import allowed_devices
from pipeline.machine.packages import Need, missing_text
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
    """Plan of memory and speed, at the lengths that will be measured."""
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
    for what, why in run.plan.unknown.items():
        yield AcceptanceCheck(f"plan of {what}", "measured", "", "not known", note=why)


def build(run: AcceptanceRun) -> Checks:
    """Builds everything that the store lacks, up to the package."""
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
                "step": one.step.name,
                "made": one.made,
                "seconds": round(one.seconds, 1),
                "digest": one.artifact.digest,
            }
            for one in outcomes
        ]
    made = sum(outcome.made for outcome in outcomes)
    yield expect(
        "package", True, "a package", f"{run.deployment.digest[:16]}, {made} of {len(outcomes)} steps made"
    )


def find(run: AcceptanceRun) -> Checks:
    """In place of `build`, with --skip build: the package that the store has."""
    run.prepared = prepare(run.recipe, run.store, progress=run.progress, allowed=run.allowed)
    run.package = Builder(run.prepared, run.store, run.progress).finished().path
    yield skipped("package", f"not built by this run; the store has {run.deployment.digest[:16]}")


def serve(run: AcceptanceRun) -> Checks:
    """`pipeline serve`, until it is ready."""
    if run.on_gpu:
        run.before_mib = gpu_memory_mib(allowed_devices())
    deadline_s = run.settings.start_timeout_s or run.deployment.start_deadline_s
    argv = (*run.recipe.words, *run.store.words, "--set", f"triton.start_timeout_s={deadline_s:g}")
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
    """SIGTERM: all processes end, and the GPUs are free again."""
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
    """Memory after full load, and blocks of the KV cache, against the plan of memory."""
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
    """The pages of metrics: Triton's, and the gateway's."""
    triton = MetricsPage.fetch(run.up.record.metrics_url)
    engine = TARGET_MODEL in run.deployment.models and run.recipe.runtime.kind != "pytorch"
    wanted = (*_FAMILIES, *(_ENGINE_FAMILIES if engine else ()))
    missing = [name for name in wanted if triton is None or not triton.samples.get(name)]
    yield expect(
        "Triton's page",
        not missing,
        f"{len(wanted)} families",
        f"{len(wanted) - len(missing)}",
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
