"""The steps that make what is checked: plan, build, serve; and, at the end, stop."""

from __future__ import annotations

from pipeline.acceptance.judging import at_most, expect, skipped
from pipeline.acceptance.report import AcceptanceCheck
from pipeline.acceptance.run import AcceptanceRun, Checks
from pipeline.machine.packages import Need, missing_text
from pipeline.plan.settings import WorkloadOptions
from pipeline.prepare import prepare
from pipeline.prepare.report import make_report
from pipeline.process_state import ProcessStat
from pipeline.runtimes import ExecutorChoice
from pipeline.serving.served import ServedDeployment, gpu_memory_mib
from pipeline.stages import Builder, StepOutcome
from pipeline.triton.running import RunningServer

_FREED_MIB = 512.0  # that a GPU may hold more after the end than before the start: the driver's own


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
    yield expect(
        "plan", not run.plan.refused, "fits, refused by no rule", run.plan.verdict, "; ".join(errors)
    )
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
    if run.options.devices:
        words += ("--gpus", ",".join(map(str, run.options.devices)))
    if missing := missing_text([Need("gateway", "the gateway")]):
        yield skipped("gateway", f"it needs distributions that are not installed here:\n{missing}")
        words += ("--no-gateway",)
    run.served = ServedDeployment.start(
        words, run.recipe.name, run.store.running, run.logs, deadline_s=deadline_s
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
        after = gpu_memory_mib(run.options.devices)
        for name, mib in after.items():
            yield at_most(
                f"{name} holds more than before", mib - run.before_mib.get(name, 0.0), _FREED_MIB, "MiB"
            )
