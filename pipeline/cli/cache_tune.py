"""`pipeline cache tune`: threshold and checks of a semantic cache, from labelled pairs or a log of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from pipeline.cli.options import complete_recipe, json_option, opened, set_option, store_option
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.cache.backend import Vector
    from pipeline.cache.semantic.embedder import Embedder
    from pipeline.cache.semantic.layer import Verifier
    from pipeline.cache.semantic.scoring import Learned
    from pipeline.cache.semantic.verification import Checked
    from pipeline.cache.tuning.measuring import Embed
    from pipeline.cache.tuning.pairs import LoggedQuestion
    from pipeline.progress import Progress

Row = TypeVar("Row")


_LINES = click.File(encoding="utf-8", errors="surrogateescape")


@click.command()
@click.argument("recipe", required=False, shell_complete=complete_recipe)
@click.option("--pairs", type=_LINES, metavar="FILE", help="Labelled pairs.")
@click.option("--log", type=_LINES, metavar="FILE", help="Questions without labels.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --log: where the pairs go that would share an answer, for a person to label.",
)
@click.option(
    "--budget",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of the pairs with different answers that may be served wrongly.",
)
@click.option(
    "--confidence",
    default=0.95,
    show_default=True,
    type=click.FloatRange(0.5, 1, max_open=True),
    help="Of the intervals; the upper end has to be within the budget.",
)
@click.option("--keep-checks", is_flag=True, help="Choose the threshold only; all checks stay on.")
@click.option(
    "--embedder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="tokenizer.json and model.onnx or model_int8.onnx, instead of those of a RECIPE.",
)
@click.option(
    "--scorer/--no-scorer", default=None, help="Whether the learned scorer decides; by default where it can."
)
@json_option
@set_option
@store_option
@click.pass_context
def tune(
    context: click.Context,
    recipe: str | None,
    pairs: TextIO | None,
    log: TextIO | None,
    output: Path | None,
    budget: float,
    confidence: float,
    keep_checks: bool,
    embedder: Path | None,
    scorer: bool | None,
    as_json: bool,
    overrides: tuple[str, ...],
    store: Path | None,
) -> None:
    """Choose the threshold and the checks of semantic lookup.

    Where the learned scorer decides, the threshold is that of its score (min_score), else that of the similarity.

    --pairs holds a JSON object a line, {"a": "…", "b": "…", "same": 1, "category": "…"}, where same is 0 if the answer
    to one does not serve the other. --log holds questions, a line each, or what `pipeline cache export` writes: it
    tells how many are near each other, and --output takes those pairs for a person to label. Exit code 1 if the pairs
    do not show that the budget is met.
    """
    if (pairs is None) == (log is None):
        raise click.UsageError("give --pairs FILE or --log FILE")
    if (recipe is None) == (embedder is None):
        raise click.UsageError("give a RECIPE or --embedder FOLDER")
    if output is not None and log is None:
        raise click.UsageError("--output goes with --log: pairs have labels already")
    from pipeline import progress as progress_to
    from pipeline.cache.tuning.choosing import choose
    from pipeline.cache.tuning.measuring import measure
    from pipeline.cache.tuning.pairs import read_log, read_pairs
    from pipeline.cli.render.cache_tune import choice_json, choice_page

    report = progress_to.Silent() if as_json else progress_to.for_stream()
    if pairs is not None:
        labelled = _read(pairs, read_pairs)
        embed = _embedder(recipe, embedder, overrides, store, report)
        with _told(embed, report, 2 * len(labelled)) as told:
            measured = measure(
                labelled,
                told,
                _verifier(embed, scorer),
                min_similarity=_min_similarity(recipe, overrides, store),
            )
        choice = choose(measured, budget=budget, confidence=confidence, may_skip=not keep_checks)
        click.echo(choice_json(measured, choice) if as_json else choice_page(measured, choice))
        context.exit(0 if choice.meets_budget else 1)
    if log is not None:
        questions = _read(log, read_log)
        embed = _embedder(recipe, embedder, overrides, store, report)
        _survey(questions, embed, _verifier(embed, scorer), report, output, as_json=as_json)


def _survey(
    log: Sequence[LoggedQuestion],
    embedder: Embed,
    verifier: Verifier,
    report: Progress,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from pipeline.cache.tuning.repeats import find_repeats
    from pipeline.cli.render.repeats import repeats_json, repeats_page

    with _told(embedder, report, len(set(log))) as embed:
        found = find_repeats(log, embed, verifier)
    click.echo(repeats_json(found) if as_json else repeats_page(found))
    if output is not None:
        rows = [
            {"a": near.a, "b": near.b, "similarity": round(near.similarity, 4), "same": None}
            for near in found.merged()
        ]
        with opened(str(output)) as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        report.say(f"{len(rows)} pairs are in {output}: put 1 or 0 in place of null, then give it as --pairs")


@contextmanager
def _told(embedder: Embed, report: Progress, total: int) -> Iterator[Embed]:
    """The embedder, telling how far it is."""
    with report.task("questions", total, "questions") as task:

        def embed(text: str) -> Vector | None:
            task.advance()
            return embedder(text)

        yield embed


def _read(file: TextIO, read: Callable[[Iterable[str]], list[Row]]) -> list[Row]:
    from pipeline.cache.tuning.pairs import BadLines

    name = file.name
    try:
        return read(file)
    except BadLines as error:
        faults = [Fault(problem, where=name, line=line or None) for line, problem in error.faults]
    raise InvalidInput(name, faults)


def _embedder(
    recipe: str | None, folder: Path | None, overrides: tuple[str, ...], store: Path | None, report: Progress
) -> Embedder:
    from pipeline.cache.semantic.embedder import Embedder

    try:
        return Embedder(folder or _encoder(str(recipe), overrides, store, report))
    except FileNotFoundError as error:
        raise UserError(f"--embedder {error}") from error
    except ImportError as error:
        raise missing("embedding", error, "cache") from error


def _verifier(embedder: Embedder, scorer: bool | None) -> Learned | Checked:
    from pipeline.cache.semantic.scoring import verifier_for

    try:
        return verifier_for(embedder, scorer=scorer)
    except ValueError as error:
        raise UserError(f"--scorer: {error}") from error


def _min_similarity(recipe: str | None, overrides: tuple[str, ...], store: Path | None) -> float:
    """What hits need, where the score is chosen."""
    from pipeline.cli.named import recipe_of
    from pipeline.recipe.response_cache import SemanticSettings
    from pipeline.store import Store

    given = recipe_of(recipe, overrides, Store.at(store)).cache.semantic if recipe is not None else None
    return (given or SemanticSettings()).min_similarity


def _encoder(text: str, overrides: tuple[str, ...], store: Path | None, report: Progress) -> Path:
    """That of the recipe, or that which it would take if semantic lookup were on."""
    from pipeline.cli.named import recipe_of
    from pipeline.stages.response_cache import obtain_encoder
    from pipeline.store import Store

    shelf = Store.at(store)
    recipe = recipe_of(text, overrides, shelf)
    if recipe.cache.semantic is None:
        recipe = recipe_of(text, (*overrides, "cache.enabled=true", "cache.semantic={}"), shelf)
    return obtain_encoder(recipe, shelf, report).folder
