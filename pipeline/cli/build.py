"""`pipeline build`: from a recipe to a Triton model repository."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.options import Verb, open_store, recipe_argument, store_root
from pipeline.cli.output import note, print_json, reporter, short_path
from pipeline.cli.settings_options import options_of
from pipeline.plan.settings import BuildSettings

if TYPE_CHECKING:
    from pipeline.machine.elsewhere import HandoverScript
    from pipeline.plan.plan import Plan
    from pipeline.stages import StepOutcome


@click.command(name="build", cls=Verb)
@recipe_argument
@options_of(BuildSettings)
@click.option(
    "--dry-run", is_flag=True, help="Say what would be made and what is there already; make nothing."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on standard output, no progress."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    settings: BuildSettings,
    dry_run: bool,
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
    from pipeline.machine.elsewhere import HandoverScript
    from pipeline.prepare import prepare
    from pipeline.runtimes import ExecutorChoice
    from pipeline.serving.deployments import recipe_of
    from pipeline.stages import build_or_hand_over
    from pipeline.store import human_bytes

    report = reporter(silent=as_json)
    artifacts = open_store()
    loaded = recipe_of(recipe, overrides, artifacts)
    prepared = prepare(loaded, artifacts, progress=report, allowed=settings.allowed)
    if dry_run:
        from pipeline.cli.render.plan import plan_json, plan_table

        click.echo(
            (plan_json if as_json else plan_table)(
                prepared.plan, artifacts, settings.until, prepared.findings
            )
        )
        return

    outcomes: list[StepOutcome] = []
    root = artifacts.root if store_root() is not None else None

    def show(outcome: StepOutcome) -> None:
        outcomes.append(outcome)
        took = f"made in {outcome.seconds:.1f} s" if outcome.made else "in the store"
        size = human_bytes(outcome.artifact.manifest.total_bytes)
        report.say(
            f"  {outcome.step.name:<17} {took:<16} {size:>10}  {short_path(outcome.artifact.path, root)}"
        )

    start = time.monotonic()
    choice = ExecutorChoice(settings.executor, settings.executor_timeout_s, settings.devices)
    allowing = (word for rule in sorted(settings.allowed) for word in ("--allow", rule))
    argv = shlex.join([*loaded.argv, *allowing, *artifacts.argv])
    last = build_or_hand_over(prepared, artifacts, choice, settings.until, argv, report, show)
    if isinstance(last, HandoverScript):
        _print_script(prepared.plan, last, as_json)
        return
    if as_json:
        print_json(_summary(loaded.name, last.path, outcomes))
        return
    count = sum(outcome.made for outcome in outcomes)
    report.say(f"{loaded.name}: {count} of {len(outcomes)} steps made in {time.monotonic() - start:.1f} s")
    click.echo(str(last.path))
    if settings.until == "package":
        report.say(f"next: pipeline serve {argv}")


def _print_script(plan: Plan, script: HandoverScript, as_json: bool) -> None:
    """Say where the build goes on. The script is the result, so this is no failure: exit code 0."""
    if as_json:
        summary = {
            "recipe": plan.recipe.name,
            "script": str(script.path),
            "handed_over": [{"step": name, "artifact": plan[name].key.name} for name in script.names],
            "next": [str(command) for command in script.following],
        }
        print_json(summary)
        return
    click.echo(str(script.path))
    steps = " and ".join(script.names)
    lines = [
        f"{plan.recipe.name}: run that script on a machine that can, for {steps}; with its folders here:"
    ]
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
