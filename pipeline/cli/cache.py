"""`pipeline cache`: what the response cache of a deployment keeps, whether it may keep it, and getting rid of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from pipeline.cache.backend import Backend, BackendDown, Kept, Which
from pipeline.cache.redaction import Redaction
from pipeline.cli.options import recipe_argument, store_option
from pipeline.errors import UserError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on standard output.")


def of_recipe(function: Callable[..., Any]) -> Callable[..., Any]:
    """RECIPE, --set and --store."""
    return recipe_argument(store_option(function))


@click.group(name="cache")
def command() -> None:
    """Look after the answers that a deployment's response cache keeps.

    The cache is that of RECIPE's `cache` section, whether it is enabled there or not.
    """


@command.command()
@of_recipe
@json_option
def stats(recipe: str, overrides: tuple[str, ...], store: Path | None, as_json: bool) -> None:
    """How full the cache is, and where it lies."""
    from pipeline.store import human_bytes

    with _backend(recipe, overrides, store) as backend:
        fill, place = backend.fill(), backend.describe()
    if as_json:
        oldest = None if fill.oldest is None else _time(fill.oldest)
        _print(
            {
                **place,
                "entries": fill.entries,
                "bytes": fill.bytes,
                "with_vectors": fill.with_vectors,
                "oldest": oldest,
            }
        )
        return
    click.echo(
        f"{fill.entries} answers, {human_bytes(fill.bytes)}, {fill.with_vectors} of them with an embedding"
    )
    if fill.oldest is not None:
        click.echo(f"oldest: {_time(fill.oldest)}")
    click.echo("; ".join(f"{name}: {value}" for name, value in place.items()))


@command.command()
@of_recipe
@json_option
@click.option("--limit", default=20, show_default=True, help="Most entries to show, the newest first.")
@click.option("--key", metavar="KEY", help="Only the entry whose key begins so, with its whole answer.")
def show(
    recipe: str, overrides: tuple[str, ...], store: Path | None, as_json: bool, limit: int, key: str | None
) -> None:
    """Show questions and answers."""
    with _backend(recipe, overrides, store) as backend:
        found = [kept for kept in backend.items() if key is None or kept.key.hex().startswith(key)][:limit]
    if key is not None and not found:
        raise UserError(f"no answer has a key that begins with {key}")
    if as_json:
        _print([_row(kept) for kept in found])
        return
    for kept in found:
        text = kept.entry.text if key is not None else _line(kept.entry.text)
        click.echo(
            f"{kept.key.hex()[:12]}  {_time(kept.entry.created)}  {_line(kept.turn)}\n              {text}"
        )


@command.command()
@of_recipe
@json_option
def audit(recipe: str, overrides: tuple[str, ...], store: Path | None, as_json: bool) -> None:
    """Hold every answer against the patterns of what may not be kept; exit code 1 if one holds such a thing."""
    redaction, held = Redaction(), []
    checked = 0
    with _backend(recipe, overrides, store) as backend:
        for kept in backend.items():
            checked += 1
            objection = redaction.objection(kept.turn, kept.entry.text)
            if objection is not None:
                held.append({"key": kept.key.hex(), "holds": objection, "created": _time(kept.entry.created)})
    if as_json:
        _print({"checked": checked, "held": held})
    else:
        for row in held:
            click.echo(f"{row['key'][:12]}  {row['created']}  holds {row['holds']}")
        click.echo(f"{checked} answers checked, {len(held)} hold what may not be kept", err=True)
    sys.exit(1 if held else 0)


@command.command()
@of_recipe
@click.option("--older-than", metavar="AGE", help="Only what is older, such as 90s, 15m, 24h or 7d.")
@click.option("--key", metavar="KEY", help="Only the entry whose key begins so.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    older_than: str | None,
    key: str | None,
    yes: bool,
) -> None:
    """Remove answers: all of them, unless an option says which."""
    before = None if older_than is None else datetime.now(UTC).timestamp() - _seconds(older_than)
    with _backend(recipe, overrides, store) as backend:
        keys = [kept.key for kept in backend.items() if key is not None and kept.key.hex().startswith(key)]
        if key is not None and len(keys) != 1:
            raise UserError(f"{len(keys)} answers have a key that begins with {key}: name one")
        what = "this answer" if key else f"answers older than {older_than}" if older_than else "all answers"
        if not yes:
            click.confirm(f"Remove {what} of {recipe}?", abort=True)
        gone = backend.remove(keys) if key is not None else backend.purge(Which(before=before))
    click.echo(f"{gone} removed")


@command.command()
@of_recipe
@click.option(
    "--output", type=click.File("w", encoding="utf-8"), default="-", help="By default standard output."
)
def export(recipe: str, overrides: tuple[str, ...], store: Path | None, output: Any) -> None:
    """Write every question with its answer, a JSON object a line."""
    with _backend(recipe, overrides, store) as backend:
        for kept in backend.items():
            output.write(json.dumps(_row(kept), ensure_ascii=False) + "\n")


@contextmanager
def _backend(recipe: str, overrides: tuple[str, ...], store: Path | None) -> Iterator[Backend]:
    from pipeline.gateway.setup import cache_file, open_backend
    from pipeline.recipe import load_recipe
    from pipeline.store import Store

    loaded = load_recipe(recipe, overrides)
    file = cache_file(loaded, Store.at(store).caches)
    if loaded.cache.backend.kind == "sqlite" and not file.is_file():
        raise UserError(f"{loaded.name} has no response cache here yet ({file})")
    try:
        backend = open_backend(loaded.cache, file)
        try:
            yield backend
        finally:
            backend.close()
    except BackendDown as error:
        raise UserError(f"the response cache cannot be used: {error}") from error


def _row(kept: Kept) -> dict[str, Any]:
    entry = kept.entry
    return {
        "key": kept.key.hex(),
        "scope": kept.scope.hex(),
        "question": kept.turn,
        "answer": entry.text,
        "created": _time(entry.created),
        "expires": _time(entry.expires),
        "used": _time(kept.used),
        "output_tokens": entry.output_tokens,
        "embedded": kept.has_vector,
    }


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age)
    if match is None:
        raise click.BadParameter(
            f"{age}: write a number and s, m, h or d, like 15m", param_hint="--older-than"
        )
    return float(match[1]) * _UNITS_S[match[2]]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _line(text: str, most: int = 90) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def _print(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))
