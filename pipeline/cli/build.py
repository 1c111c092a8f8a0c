"""`pipeline build`: from a recipe to a Triton model repository."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import progress as progress_to
from pipeline.cli.options import recipe_argument, store_option

if TYPE_CHECKING:
    from pipeline.stages import Outcome


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
    offline: bool,
    as_json: bool,
) -> None:
    """Make everything that RECIPE (a file, or the name of a packaged recipe) needs, up to its Triton model repository.

    Finished steps are taken from the store. A build that was killed goes on where it was.

    \b
    pipeline build tiny-cpu
    pipeline build my.yaml --set quantization.format=int4_awq --until evaluate
    """
    from pipeline.cli.tables import plan_json, plan_table
    from pipeline.recipe import load_recipe
    from pipeline.stages import Builder, prepare
    from pipeline.store import Store, human_bytes

    loaded = load_recipe(recipe, overrides)
    report = progress_to.Silent() if as_json else progress_to.for_stream()
    shelf = Store.at(store)
    prepared = prepare(loaded, shelf, offline=offline, progress=report)
    if dry_run:
        click.echo((plan_json if as_json else plan_table)(prepared.plan, shelf, until))
        return

    outcomes: list[Outcome] = []

    def show(outcome: Outcome) -> None:
        outcomes.append(outcome)
        took = f"made in {outcome.seconds:.1f} s" if outcome.made else "in the store"
        size = human_bytes(outcome.artifact.manifest.total_bytes)
        report.say(f"  {outcome.step.name:<17} {took:<16} {size:>10}  {outcome.artifact.path}")

    start = time.monotonic()
    last = Builder(prepared.plan, shelf, prepared.work(report, shelf), report, show).run(until)
    if as_json:
        click.echo(json.dumps(_summary(loaded.name, last.path, outcomes), indent=2))
        return
    made = sum(outcome.made for outcome in outcomes)
    report.say(f"{loaded.name}: {made} of {len(outcomes)} steps made in {time.monotonic() - start:.1f} s")
    click.echo(str(last.path))
    if until == "package":
        report.say(f"next: pipeline serve {recipe}")


def _summary(name: str, path: Path, outcomes: list[Outcome]) -> dict[str, object]:
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
