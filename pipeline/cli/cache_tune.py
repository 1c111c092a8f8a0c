"""`pipeline cache tune`: threshold and checks of a semantic cache, from labelled pairs or a log of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import click

from pipeline.cli.options import set_option, store_option
from pipeline.errors import Fault, InvalidInput


@click.command()
@click.argument("encoder", metavar="RECIPE|ENCODER")
@click.argument("file", metavar="FILE", type=click.File(encoding="utf-8"))
@click.option(
    "--budget",
    default=0.01,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of wrong hits among pairs with different answers that is acceptable.",
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
    "--to-label",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With a log: write pairs for a person to label into this file.",
)
@click.option(
    "--samples", default=200, show_default=True, type=click.IntRange(1), help="Most pairs to write there."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")
@set_option
@store_option
@click.pass_context
def tune(
    context: click.Context,
    encoder: str,
    file: TextIO,
    budget: float,
    confidence: float,
    keep_checks: bool,
    to_label: Path | None,
    samples: int,
    as_json: bool,
    overrides: tuple[str, ...],
    store: Path | None,
) -> None:
    """Choose the threshold and the checks of semantic lookup.

    FILE holds a JSON object a line: labelled pairs, {"a": "…", "b": "…", "same": 1, "category": "…"}, where same is 0
    if the answer to one does not serve the other; or a log of questions, as `pipeline cache export` writes it, of which
    pairs can be taken for a person to label. ENCODER is a folder with tokenizer.json and model.onnx, by default that
    of RECIPE. Exit code 1 if the pairs do not show that the budget is met.
    """
    from pipeline.cache.semantic.embedder import Embedder
    from pipeline.cache.tuning.pairs import BadLines, Pair, read_lines

    name = getattr(file, "name", "-")
    try:
        rows = read_lines(file)
    except BadLines as error:
        faults = [Fault(problem, where=name, line=line or None) for line, problem in error.faults]
        raise InvalidInput(name, faults) from None
    except UnicodeDecodeError as error:
        raise InvalidInput(name, [Fault(f"is not UTF-8: {error}", where=name)]) from None
    pairs = [row for row in rows if isinstance(row, Pair)]
    logged = [row for row in rows if not isinstance(row, Pair)]
    if pairs and to_label is not None:
        raise click.UsageError("--to-label is for a log of questions: these pairs have labels")
    embedder = Embedder(_encoder(encoder, overrides, store))
    if pairs:
        from pipeline.cache.tuning.choosing import choose
        from pipeline.cache.tuning.measuring import measure
        from pipeline.cli.cache_tune_page import choice_json, choice_page

        measured = measure(pairs, embedder)
        choice = choose(measured, budget=budget, confidence=confidence, may_skip=not keep_checks)
        click.echo(choice_json(measured, choice) if as_json else choice_page(measured, choice))
        context.exit(0 if choice.meets_budget else 1)
    from pipeline.cache.semantic.verification import default_verifier
    from pipeline.cache.tuning.repeats import repeats
    from pipeline.cli.cache_tune_page import repeats_json, repeats_page

    found = repeats(logged, embedder, default_verifier())
    if to_label is not None:
        chosen = found.sample(samples)
        lines = (json.dumps({"a": near.a, "b": near.b, "same": None}, ensure_ascii=False) for near in chosen)
        to_label.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        click.echo(
            f"{len(chosen)} pairs to label are in {to_label}: put 1 or 0 in place of null, then tune with it",
            err=True,
        )
    click.echo(repeats_json(found) if as_json else repeats_page(found))


def _encoder(text: str, overrides: tuple[str, ...], store: Path | None) -> Path:
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    from pipeline.recipe import load_recipe
    from pipeline.stages.embedder import encoder
    from pipeline.store import Store

    recipe = load_recipe(text, overrides)
    if recipe.cache.semantic is None:
        recipe = load_recipe(text, (*overrides, "cache.semantic={}"))
    return encoder(recipe, Store.at(store)).folder
