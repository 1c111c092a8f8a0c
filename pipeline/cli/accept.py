"""`pipeline accept`: check a recipe on this machine from end to end, and write one report to send back."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from pipeline.cli.options import allow_option, gpus_option, recipe_argument, store_option
from pipeline.cli.output import print_json, reporter


@click.command(name="accept")
@recipe_argument
@store_option
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="PATH",
    help="The report, ending in .json, or a folder for it; by default this one. A page to read (.md) is written "
    "beside it. Both can be read by their owner alone.",
)
@click.option(
    "--skip",
    "skip",
    multiple=True,
    metavar="STEP",
    help="Leave a step out; build: take the package that is there.",
)
@click.option(
    "--resume",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Take over what passed in this report, if the package is still the same.",
)
@click.option(
    "--prompt-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Length of the prompts that are measured; by default up to 1,024 of the recipe's limit.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Length of the answers that are measured; by default up to 128 of the recipe's limit.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    help="Requests of each stream that are measured under each load.",
)
@click.option(
    "--questions",
    type=click.IntRange(min=1, max=320),
    default=32,
    show_default=True,
    help="Answers that draft equality and the gate are judged by.",
)
@click.option(
    "--upstream",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder with upstream's end_to_end_grpc_client.py; by default where NVIDIA's containers have it.",
)
@click.option(
    "--start-timeout-s",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Time in which the server must be ready; by default 120, and more for large models.",
)
@gpus_option
@allow_option
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@click.option("--dry-run", is_flag=True, help="Print the steps, and run nothing.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print the report on standard output, too; no progress."
)
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    output: Path,
    skip: tuple[str, ...],
    resume: Path | None,
    prompt_tokens: int | None,
    output_tokens: int | None,
    rounds: int,
    questions: int,
    upstream: Path | None,
    start_timeout_s: float | None,
    gpus: tuple[int, ...],
    allowed: frozenset[str],
    offline: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Build, serve and check RECIPE on this machine, and write one report: what was expected, what was measured.

    Every step is run, whatever came of those before. Exit code 0 if no check failed, 1 otherwise. The report holds the
    recipe, versions, figures and ends of logs; no prompts of yours, no tokens, no names of this machine or its user.

    \b
    pipeline accept tiny-cpu
    pipeline accept llama-3.1-8b-fp8 --dry-run
    pipeline accept llama-3.1-8b-fp8 --output reports/ --skip build
    pipeline accept llama-3.1-8b-fp8 --resume accept-llama-3.1-8b-fp8-2026-11-30.json
    """
    from pipeline.errors import Fault, InvalidInput, UserError
    from pipeline.extras import missing
    from pipeline.serving.deployments import recipe_of
    from pipeline.store import Store

    try:
        from pipeline.acceptance import AcceptanceOptions, AcceptanceReport, accept
        from pipeline.acceptance.accept import SKIPPABLE, STEPS
    except ModuleNotFoundError as error:
        # Loads are measured as `pipeline bench` does.
        raise missing("pipeline accept", error, "bench") from None

    loaded = recipe_of(recipe, overrides, Store.at(store))
    limits = loaded.limits
    lengths = (
        ("--prompt-tokens", prompt_tokens, "max_input_tokens", limits.max_input_tokens),
        ("--output-tokens", output_tokens, "max_output_tokens", limits.max_output_tokens),
    )
    faults = [
        Fault(
            "is no step that can be skipped",
            key="--skip",
            value=name,
            fix=f"there are {', '.join(SKIPPABLE)}",
        )
        for name in skip
        if name not in SKIPPABLE
    ]
    faults += [
        Fault(f"is more than limits.{key}, which is {limit}", key=option, value=given)
        for option, given, key, limit in lengths
        if given is not None and given > limit
    ]
    if faults:
        raise InvalidInput("command line", faults)
    if dry_run:
        for step in STEPS:
            left = "  (left out)" if step.name in skip else ""
            click.echo(f"{step.name:<9} {step.title}{left}")
        return
    file = output
    if output.suffix != ".json":
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        file = output / f"accept-{loaded.name}-{today}.json"
    options = AcceptanceOptions(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        rounds=rounds,
        questions=questions,
        upstream=upstream,
        offline=offline,
        allowed=allowed,
        devices=gpus,
        start_timeout_s=start_timeout_s,
    )
    report, shelf = reporter(silent=as_json), Store.at(store)
    earlier = AcceptanceReport.read(resume) if resume is not None else None
    try:
        made = accept(loaded, shelf, options, file, progress=report, skip=skip, earlier=earlier)
    except OSError as error:
        raise UserError(f"--output {file}: cannot be written: {error.strerror}") from error
    if as_json:
        print_json(made.to_json())
    else:
        counts = ", ".join(f"{number} {outcome}" for outcome, number in made.counts.items() if number)
        report.say(f"{loaded.name}: {'accepted' if made.accepted else 'NOT accepted'}; {counts}")
        report.say(f"the page to read: {file.with_suffix('.md')}")
        click.echo(str(file))
    sys.exit(0 if made.accepted else 1)
