"""`pipeline build`: from a recipe to a Triton model repository."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from pipeline.cli.options import allow_option, gpus_option, recipe_argument, store_option
from pipeline.cli.output import note, print_json, reporter, short_path

if TYPE_CHECKING:
    from pipeline.stages import HandoverScript, StepOutcome


@click.command(name="build")
@recipe_argument
@store_option
@click.option(
    "--until",
    default="package",
    show_default=True,
    metavar="STEP",
    help="Stop after this step, e.g. evaluate.",
)
@click.option(
    "--dry-run", is_flag=True, help="Say what would be made and what is there already; make nothing."
)
@click.option(
    "--executor",
    type=click.Choice(["auto", "native", "docker", "print", "print-all"]),
    default="auto",
    show_default=True,
    help="Who runs trtllm-build (runtime tensorrt): this machine, the container that will serve, or a script that is "
    "printed for another machine. auto: native where it is on PATH, else docker. The script has the whole build done "
    "there where what comes before the engines cannot be made here; with print-all in any case, for any runtime.",
)
@gpus_option
@click.option(
    "--executor-timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time in which trtllm-build must have made one engine; by default any.",
)
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, no progress."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    until: str,
    dry_run: bool,
    executor: Literal["auto", "native", "docker", "print", "print-all"],
    gpus: tuple[int, ...],
    executor_timeout_s: float | None,
    allowed: frozenset[str],
    offline: bool,
    as_json: bool,
) -> None:
    """Make everything that RECIPE (a file, or the name of a packaged recipe) needs, up to its Triton model repository.

    Finished steps are taken from the store. A build that was killed goes on where it was.

    \b
    pipeline build tiny-cpu
    pipeline build my.yaml --set quantization.format=int4_awq --until evaluate
    pipeline build llama-3.1-8b-fp8 --executor docker --gpus 0
    pipeline build llama-3.1-8b-fp8 --executor print
    """
    from pipeline.prepare import prepare
    from pipeline.runtimes import ExecutorChoice
    from pipeline.serving.deployments import recipe_of
    from pipeline.stages import HandoverScript, build_or_hand_over
    from pipeline.store import Store, human_bytes

    report = reporter(silent=as_json)
    shelf = Store.at(store)
    loaded = recipe_of(recipe, overrides, shelf)
    prepared = prepare(loaded, shelf, offline=offline, progress=report, allowed=allowed)
    if dry_run:
        from pipeline.cli.render.tables import plan_json, plan_table

        click.echo((plan_json if as_json else plan_table)(prepared.plan, shelf, until, prepared.findings))
        return

    outcomes: list[StepOutcome] = []
    root = shelf.root if store is not None else None

    def show(outcome: StepOutcome) -> None:
        outcomes.append(outcome)
        took = f"made in {outcome.seconds:.1f} s" if outcome.made else "in the store"
        size = human_bytes(outcome.artifact.manifest.total_bytes)
        report.say(
            f"  {outcome.step.name:<17} {took:<16} {size:>10}  {short_path(outcome.artifact.path, root)}"
        )

    start = time.monotonic()
    choice = ExecutorChoice(executor, executor_timeout_s, gpus)
    allowing = (word for rule in sorted(allowed) for word in ("--allow", rule))
    words = shlex.join([*loaded.words, *allowing, *shelf.words])
    last = build_or_hand_over(prepared, shelf, choice, until, words, report, show)
    if isinstance(last, HandoverScript):
        _print_script(loaded.name, last, as_json)
        return
    if as_json:
        print_json(_summary(loaded.name, last.path, outcomes))
        return
    made = sum(outcome.made for outcome in outcomes)
    report.say(f"{loaded.name}: {made} of {len(outcomes)} steps made in {time.monotonic() - start:.1f} s")
    click.echo(str(last.path))
    if until == "package":
        report.say(f"next: pipeline serve {words}")


def _print_script(recipe: str, script: HandoverScript, as_json: bool) -> None:
    """Say where the build goes on. The script is the result, so this is no failure: exit code 0."""
    if as_json:
        summary = {
            "recipe": recipe,
            "script": str(script.path),
            "handed_over": [{"step": step.name, "artifact": step.key.name} for step in script.waiting],
            "next": list(script.following),
        }
        print_json(summary)
        return
    click.echo(str(script.path))
    steps = " and ".join(step.name for step in script.waiting)
    lines = [f"{recipe}: run that script on a machine that can, for {steps}; with its folders here:"]
    note("\n".join([*lines, *(f"next: {command}" for command in script.following)]))


def _summary(name: str, path: Path, outcomes: list[StepOutcome]) -> dict[str, object]:
    steps = [
        {
            "step": outcome.step.name,
            "artifact": str(outcome.artifact.path),
            "digest": outcome.artifact.digest,
            "made": outcome.made,
            "seconds": round(outcome.seconds, 3),
            "bytes": outcome.artifact.manifest.total_bytes,
        }
        for outcome in outcomes
    ]
    return {"recipe": name, "artifact": str(path), "steps": steps}
