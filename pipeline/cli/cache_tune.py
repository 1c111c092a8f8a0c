"""`pipeline cache tune`: the dials of a semantic cache, from labelled pairs or a log of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, TypeVar

import click
from pydantic import DirectoryPath, Field

from pipeline.cli.options import Verb, complete_recipe, json_option, open_store, opened, set_option
from pipeline.cli.settings_options import options_of
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.extras import missing
from pipeline.settings import Option, Settings

if TYPE_CHECKING:
    from pipeline.cache.backend import Vector
    from pipeline.cache.semantic.decision import Embed
    from pipeline.cache.tuning.measuring import TuningSubject
    from pipeline.progress import Progress

Row = TypeVar("Row")

_LINES = click.File(encoding="utf-8", errors="surrogateescape")


class CacheTuneSettings(Settings):
    """Budget and models of a tuning."""

    output: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None,
        description="With --log: where the pairs go that would share an answer, for a person to label.",
    )
    budget: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="Share of the pairs with different answers that may be served wrongly.",
    )
    confidence: float = Field(
        default=0.95,
        ge=0.5,
        lt=1,
        description="With which the pairs have to show that the budget is kept.",
    )
    embedder: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="tokenizer.json and model.onnx or model_int8.onnx, instead of those of a RECIPE.",
    )
    verifier: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="A cross-encoder in the same form, to be tried beside the cosine; by default that of the RECIPE.",
    )


@click.command(cls=Verb)
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@click.option("--pairs", type=_LINES, metavar="FILE", help="Labelled pairs.")
@click.option("--log", type=_LINES, metavar="FILE", help="Questions without labels.")
@options_of(CacheTuneSettings)
@click.option(
    "--keep-guards",
    is_flag=True,
    help="Choose the score only; verifier, guards and floor stay as they are.",
)
@json_option
@set_option
def tune(
    recipe: str | None,
    pairs: TextIO | None,
    log: TextIO | None,
    settings: CacheTuneSettings,
    keep_guards: bool,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Choose the dials of semantic lookup: score, floor, guards and verifier.

    --pairs holds a JSON object a line, {"a": "…", "b": "…", "same": 1, "category": "…"}, where same is 0 if the answer
    to one does not serve the other; `pipeline cache review` writes such lines. It tries the recipe's setting, the
    default one and the best of one half of the pairs, and prints the lines for a recipe of the one that serves most
    within the budget, as an exact bound shows. Where the pairs are too few to show the budget, it says how many are
    needed, promises nothing, and the exit code is 1. --log holds questions, a line each, or what `pipeline cache
    export` writes: it tells how many are near each other, and --output takes those pairs for a person to label.

    \b
        pipeline cache tune tiny-cpu --pairs pairs.jsonl --budget 0.02
        pipeline cache tune tiny-cpu --log log.jsonl --output pairs.jsonl
    """
    if (pairs is None) == (log is None):
        raise click.UsageError("give --pairs FILE or --log FILE")
    if (recipe is None) == (settings.embedder is None):
        raise click.UsageError("give a RECIPE or --embedder FOLDER")
    if settings.output is not None and log is None:
        raise click.UsageError("--output goes with --log: pairs have labels already")
    from pipeline import progress as progress_to
    from pipeline.cache.semantic.guards import GUARDS, findings
    from pipeline.cache.tuning.choosing import choose
    from pipeline.cache.tuning.measuring import measure
    from pipeline.cache.tuning.pairs import find_repeats, read_log, read_pairs
    from pipeline.cli.render.cache_tune import choice_json, choice_page, repeats_json, repeats_page

    report = progress_to.Silent() if as_json else progress_to.for_stream()
    if pairs is not None:
        labelled = _read(pairs, read_pairs)
        subject = _subject(recipe, settings, overrides, report)
        with _counted(subject.embed, report, 2 * len(labelled)) as embed:
            measured = measure(labelled, embed, subject.scorers, findings, tuple(GUARDS))
        choice = choose(
            measured,
            subject.setting,
            default=subject.default,
            budget=settings.budget,
            confidence=settings.confidence,
            all_dials=not keep_guards,
        )
        click.echo(choice_json(measured, choice) if as_json else choice_page(measured, choice))
        raise click.exceptions.Exit(0 if choice.meets_budget else 1)
    assert log is not None, "it is the other of both"
    questions = _read(log, read_log)
    subject = _subject(recipe, settings, overrides, report)
    with _counted(subject.embed, report, len(set(questions))) as embed:
        repeats = find_repeats(questions, embed, subject.verifier, subject.setting.min_score)
    click.echo(repeats_json(repeats) if as_json else repeats_page(repeats))
    if settings.output is not None:
        rows = [
            {"a": near.a, "b": near.b, "similarity": round(near.similarity, 4), "same": None}
            for near in repeats.merged()
        ]
        with opened(str(settings.output)) as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        report.say(
            f"{len(rows)} pairs are in {settings.output}: put 1 or 0 in place of null, then give it as --pairs"
        )


def _subject(
    text: str | None,
    settings: CacheTuneSettings,
    overrides: tuple[str, ...],
    report: Progress,
) -> TuningSubject:
    """Load the models of a recipe, or those that it would have if semantic lookup were on."""
    from pipeline.cache.tuning.measuring import load_subject
    from pipeline.recipe.response_cache import SemanticSettings
    from pipeline.serving.deployments import recipe_of
    from pipeline.stages.response_cache import obtain_encoder, obtain_verifier

    semantic, encoder, cross_encoder = SemanticSettings(), settings.embedder, settings.verifier
    if text is not None:
        artifacts = open_store()
        recipe = recipe_of(text, overrides, artifacts)
        if recipe.cache.semantic is None:
            recipe = recipe_of(text, (*overrides, "cache.enabled=true", "cache.semantic={}"), artifacts)
        semantic = recipe.cache.semantic or semantic
        encoder = obtain_encoder(recipe, artifacts, report).folder
        fetched = obtain_verifier(recipe, artifacts, report)
        cross_encoder = cross_encoder or fetched
    name = str(semantic.verifier) if settings.verifier is None else f"local:{settings.verifier.absolute()}"
    try:
        return load_subject(semantic, encoder or Path(), cross_encoder, name)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        raise UserError(f"--verifier {cross_encoder}: {error}") from error
    except ImportError as error:
        raise missing("embedding", error, "cache") from error


@contextmanager
def _counted(embed: Embed, report: Progress, total: int) -> Iterator[Embed]:
    """Yield the embedder, with its progress shown."""
    with report.task("questions", total, "questions") as task:

        def embed_next(text: str) -> Vector | None:
            task.advance()
            return embed(text)

        yield embed_next


def _read(file: TextIO, read: Callable[[Iterable[str]], list[Row]]) -> list[Row]:
    from pipeline.cache.tuning.pairs import BadLines

    name = file.name
    try:
        return read(file)
    except BadLines as error:
        faults = [Fault(problem, where=name, line=line or None) for line, problem in error.faults]
    raise InvalidInput(name, faults)
