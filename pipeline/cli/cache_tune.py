"""`pipeline cache tune`: the dials of a semantic cache, from labelled pairs or a log of questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeVar

import click

from pipeline.cli.options import complete_recipe, json_option, opened, set_option, store_option
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.extras import missing

if TYPE_CHECKING:
    from pipeline.cache.backend import Vector
    from pipeline.cache.semantic.decision import Verifier
    from pipeline.cache.tuning.measuring import Embed, Setting
    from pipeline.cache.tuning.pairs import LoggedQuestion
    from pipeline.progress import Progress
    from pipeline.recipe.response_cache import SemanticSettings

Row = TypeVar("Row")

_LINES = click.File(encoding="utf-8", errors="surrogateescape")
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


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
    help="With which the pairs have to show that the budget is kept.",
)
@click.option(
    "--keep-guards",
    "--keep-checks",
    "keep_guards",
    is_flag=True,
    help="Choose the score only; verifier, guards and floor stay as they are.",
)
@click.option(
    "--embedder",
    type=_FOLDER,
    metavar="FOLDER",
    help="tokenizer.json and model.onnx or model_int8.onnx, instead of those of a RECIPE.",
)
@click.option(
    "--verifier",
    type=_FOLDER,
    metavar="FOLDER",
    help="A cross-encoder in the same form, to be tried beside the cosine; by default that of the RECIPE.",
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
    keep_guards: bool,
    embedder: Path | None,
    verifier: Path | None,
    as_json: bool,
    overrides: tuple[str, ...],
    store: Path | None,
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
    if (recipe is None) == (embedder is None):
        raise click.UsageError("give a RECIPE or --embedder FOLDER")
    if output is not None and log is None:
        raise click.UsageError("--output goes with --log: pairs have labels already")
    from pipeline import progress as progress_to
    from pipeline.cache.semantic.guards import GUARDS, findings
    from pipeline.cache.tuning.choosing import choose
    from pipeline.cache.tuning.measuring import measure
    from pipeline.cache.tuning.pairs import read_log, read_pairs
    from pipeline.cli.render.cache_tune import choice_json, choice_page

    report = progress_to.Silent() if as_json else progress_to.for_stream()
    if pairs is not None:
        labelled = _read(pairs, read_pairs)
        subject = _subject(recipe, embedder, verifier, overrides, store, report)
        with _told(subject.embed, report, 2 * len(labelled)) as told:
            measured = measure(labelled, told, subject.scorers, findings, tuple(GUARDS))
        choice = choose(
            measured,
            subject.setting,
            default=subject.default,
            budget=budget,
            confidence=confidence,
            all_dials=not keep_guards,
        )
        click.echo(choice_json(measured, choice) if as_json else choice_page(measured, choice))
        context.exit(0 if choice.meets_budget else 1)
    if log is not None:
        questions = _read(log, read_log)
        subject = _subject(recipe, embedder, verifier, overrides, store, report)
        _survey(questions, subject, report, output, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is tuned."""

    # None for what is not shared by meaning, too.
    embed: Embed
    # As the recipe has it.
    verifier: Verifier
    # Without guards, by name: what `measure` takes.
    scorers: Mapping[str, Verifier]
    setting: Setting
    # Of a recipe that says nothing of them.
    default: Setting


def _subject(
    recipe: str | None,
    embedder: Path | None,
    verifier: Path | None,
    overrides: tuple[str, ...],
    store: Path | None,
    report: Progress,
) -> _Subject:
    from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
    from pipeline.cache.semantic.decision import default_verifier
    from pipeline.cache.semantic.embedder import Embedder
    from pipeline.cache.semantic.guards import GUARDS
    from pipeline.cache.semantic.layer import is_shareable
    from pipeline.cache.tuning.measuring import Setting
    from pipeline.cli.render.cache_tune import BUILT_IN
    from pipeline.recipe.response_cache import SemanticSettings

    settings, encoder, cross_encoder = _parts(recipe, overrides, store, report)
    folder = verifier or cross_encoder
    guards = tuple(GUARDS) if settings.guards is None else tuple(settings.guards)
    try:
        made = Embedder(embedder or encoder or Path())
        judged: Verifier = default_verifier(made, guards)
        scorers: dict[str, Verifier] = {BUILT_IN: default_verifier(made, ())}
        name = BUILT_IN
        if folder is not None:
            model = CrossEncoder(folder)
            # A folder that holds something else is refused here, and not after a minute.
            model("Where is my parcel?", "When does my parcel come?")
            judged = CrossEncoderVerifier(judged, model)
            name = f"local:{verifier.absolute()}" if verifier is not None else str(settings.verifier)
            scorers[name] = CrossEncoderVerifier(scorers[BUILT_IN], model)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    except ValueError as error:
        raise UserError(f"--verifier {folder}: {error}") from error
    except ImportError as error:
        raise missing("embedding", error, "cache") from error
    score = judged.default_min_score if settings.min_score is None else settings.min_score
    default = Setting(
        BUILT_IN, SemanticSettings().min_similarity, scorers[BUILT_IN].default_min_score, tuple(GUARDS)
    )
    return _Subject(
        embed=lambda text: made(text) if is_shareable(text, settings.languages) else None,
        verifier=judged,
        scorers=scorers,
        setting=Setting(name, settings.min_similarity, score, guards),
        default=default,
    )


def _parts(
    text: str | None, overrides: tuple[str, ...], store: Path | None, report: Progress
) -> tuple[SemanticSettings, Path | None, Path | None]:
    """Settings, encoder and cross-encoder of the recipe, or those that it would have if semantic lookup were on."""
    from pipeline.recipe.response_cache import SemanticSettings
    from pipeline.serving.deployments import recipe_of
    from pipeline.stages.response_cache import obtain_encoder, obtain_verifier
    from pipeline.store import Store

    if text is None:
        return SemanticSettings(), None, None
    shelf = Store.at(store)
    recipe = recipe_of(text, overrides, shelf)
    if recipe.cache.semantic is None:
        recipe = recipe_of(text, (*overrides, "cache.enabled=true", "cache.semantic={}"), shelf)
    settings = recipe.cache.semantic or SemanticSettings()
    return settings, obtain_encoder(recipe, shelf, report).folder, obtain_verifier(recipe, shelf, report)


def _survey(
    log: Sequence[LoggedQuestion],
    subject: _Subject,
    report: Progress,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from pipeline.cache.tuning.repeats import find_repeats
    from pipeline.cli.render.repeats import repeats_json, repeats_page

    with _told(subject.embed, report, len(set(log))) as embed:
        found = find_repeats(log, embed, subject.verifier, subject.setting.min_score)
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
def _told(embed: Embed, report: Progress, total: int) -> Iterator[Embed]:
    """The embedder, telling how far it is."""
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
