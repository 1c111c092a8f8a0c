"""`pipeline accept`: check a recipe on this machine from end to end, and write one report to send back."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import click

from pipeline.bench.accept.settings import AcceptSettings
from pipeline.cli.options import Verb, open_store, recipe_argument
from pipeline.cli.output import print_json, reporter
from pipeline.cli.settings_options import options_of
from pipeline.plan.settings import PreparationSettings


@click.command(name="accept", cls=Verb)
@recipe_argument
@options_of(AcceptSettings)
@options_of(PreparationSettings, "preparation")
@click.option("--dry-run", is_flag=True, help="Print the steps, and run nothing.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report on standard output, too; no progress."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    settings: AcceptSettings,
    preparation: PreparationSettings,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build, serve and check RECIPE on this machine, and write one report: what was expected, what was measured.

    Every step is run, even if earlier ones failed. Exit code 0 if no check failed, 1 otherwise. The report holds the
    recipe, versions, figures and ends of logs; no prompts of yours, no tokens, no names of this machine or its user.

    \b
    pipeline accept tiny-cpu
    pipeline accept llama-3.1-8b-fp8 --dry-run
    pipeline accept llama-3.1-8b-fp8 --output reports/ --skip build
    pipeline accept llama-3.1-8b-fp8 --resume accept-llama-3.1-8b-fp8-2026-11-30.json
    """
    from pipeline.errors import InvalidInput, UserError
    from pipeline.extras import missing
    from pipeline.serving.deployments import recipe_of

    try:
        from pipeline.bench.accept.run import STEPS, accept, run_faults
    except ModuleNotFoundError as error:
        # Loads are measured as `pipeline bench` does.
        raise missing("pipeline accept", error, "bench") from None

    artifacts = open_store()
    loaded = recipe_of(recipe, overrides, artifacts)
    if faults := list(run_faults(loaded, settings)):
        raise InvalidInput("command line", faults)
    if dry_run:
        for step in STEPS:
            left = "  (left out)" if step.name in settings.skip else ""
            click.echo(f"{step.name:<9} {step.title}{left}")
        return
    file = settings.output
    if file.suffix != ".json":
        file /= f"accept-{loaded.name}-{datetime.now(UTC):%Y-%m-%d}.json"
    progress = reporter(silent=as_json)
    try:
        report = accept(loaded, artifacts, settings, file, progress=progress, allowed=preparation.allowed)
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written: {error.strerror}") from error
    if as_json:
        print_json(report.to_json())
    else:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts.items() if number)
        progress.say(f"{loaded.name}: {'accepted' if report.accepted else 'NOT accepted'}; {counts}")
        progress.say(f"the page to read: {file.with_suffix('.md')}")
        click.echo(str(file))
    sys.exit(0 if report.accepted else 1)
