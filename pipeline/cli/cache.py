"""`pipeline cache`: what a response cache keeps, whether it may keep it, and getting rid of it."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from typing import Any

import click

from pipeline.cache.backend import EntryFilter, StoredEntry
from pipeline.cache.key import tenant_id
from pipeline.cli.cache_review import review
from pipeline.cli.cache_target import CacheTarget, of_cache, utc_time
from pipeline.cli.cache_tune import tune
from pipeline.cli.options import VerbGroup, json_option, opened, output_option
from pipeline.cli.output import cut, note, print_json
from pipeline.errors import UserError

# Fields that `purge` may be narrowed by, as the question names them.
_FIELDS = {
    "older_than": "older than", "tenant": "of tenant", "engine": "of engine", "scope": "of scope", "key": "of key",
}  # fmt: skip
_LINE = 90  # characters of a question or an answer in a list
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@click.group(name="cache", cls=VerbGroup)
def command() -> None:
    """Look after the answers that a deployment's response cache keeps.

    The cache is that of RECIPE's `cache` section, whether it is enabled there or not; or the one at an ADDRESS, such as
    answers.db, redis://host:6379/0 or postgresql://user@host/database. A server may have several caches: #NAME
    behind the ADDRESS, mostly the name of a recipe, says which (#pipeline if nothing does). A password is taken from
    $PIPELINE_CACHE_PASSWORD, and the key of an encrypted cache from $PIPELINE_CACHE_KEY.
    """


command.add_command(tune)
command.add_command(review)


@command.command()
@of_cache
@json_option
def stats(target: CacheTarget, as_json: bool) -> None:
    """Show how full the cache is, and where it lies."""
    from pipeline.store import human_bytes

    with target.opened() as backend:
        fill, place = backend.usage(), backend.describe()
    if as_json:
        oldest = None if fill.oldest is None else utc_time(fill.oldest)
        print_json(
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
        click.echo(f"oldest: {utc_time(fill.oldest)}")
    click.echo("; ".join(f"{name}: {value}" for name, value in place.items()))


@command.command()
@of_cache
@click.argument("key", required=False)
@json_option
@click.option("--limit", default=20, show_default=True, help="Most entries to show, the newest first.")
def show(target: CacheTarget, key: str | None, as_json: bool, limit: int) -> None:
    """Show questions and answers, or with its whole answer the one whose key begins with KEY."""
    with target.opened() as backend:
        entries = [stored for stored in backend.items() if key is None or stored.key.hex().startswith(key)][
            :limit
        ]
    if key is not None and not entries:
        raise UserError(f"no answer has a key that begins with {key}")
    if as_json:
        print_json([_row(stored) for stored in entries])
        return
    for stored in entries:
        text = stored.entry.text if key is not None else _line(stored.entry.text)
        click.echo(
            f"{stored.key.hex()[:12]}  {utc_time(stored.entry.created)}  {_line(stored.turn)}\n              {text}"
        )


@command.command()
@of_cache
@json_option
def audit(target: CacheTarget, as_json: bool) -> None:
    """Hold every answer against the patterns of what may not be kept.

    The exit code is 1 if one holds such a thing, or cannot be read.
    """
    redaction, flagged = target.redaction(), []
    checked = 0
    with target.opened() as backend:
        for stored in backend.items():
            checked += 1
            objection = redaction.objection(stored.turn, stored.entry.text)
            if objection is not None:
                flagged.append(
                    {"key": stored.key.hex(), "holds": objection, "created": utc_time(stored.entry.created)}
                )
        unreadable = backend.unreadable()
    if as_json:
        print_json({"checked": checked, "held": flagged, "unreadable": unreadable})
    else:
        for row in flagged:
            click.echo(f"{row['key'][:12]}  {row['created']}  holds {row['holds']}")
        note(f"{checked} answers checked, {len(flagged)} hold what may not be kept")
        if unreadable:
            click.echo(
                "Some entries cannot be read: damaged, or sealed with another key than $PIPELINE_CACHE_KEY",
                err=True,
            )
    sys.exit(1 if flagged or unreadable else 0)


@command.command()
@of_cache
@click.option(
    "--only",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Only what was kept for this tenant; what is older_than 90s, 15m, 24h or 7d; what this engine answered, or "
    "may answer the conversations of this scope, as `show --json` names them; or the entry whose key begins so.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge(target: CacheTarget, only: tuple[str, ...], yes: bool) -> None:
    """Remove all answers, or only those that match every --only.

    \b
        pipeline cache purge tiny-cpu --only tenant=ada --only older_than=24h
    """
    filters = {name: value for name, _, value in (text.partition("=") for text in only)}
    if wrong := [text for text in only if text.partition("=")[0] not in _FIELDS or "=" not in text]:
        raise click.UsageError(f"--only {wrong[0]}: write FIELD=VALUE; fields: {', '.join(_FIELDS)}")
    key, tenant, older_than = filters.get("key"), filters.get("tenant"), filters.get("older_than")
    chosen = " ".join(f"{_FIELDS[name]} {value}" for name, value in filters.items() if name != "key")
    if key and chosen:
        raise click.UsageError("--only key=… names one answer: it goes with no other field")
    which = EntryFilter(
        scope=_id(filters.get("scope"), "scope"),
        engine=_id(filters.get("engine"), "engine"),
        tenant=None if tenant is None else tenant_id(tenant),
        before=None if older_than is None else datetime.now(UTC).timestamp() - _seconds(older_than),
    )
    with target.opened() as backend:
        keys = [
            stored.key for stored in backend.items() if key is not None and stored.key.hex().startswith(key)
        ]
        if key is not None and len(keys) != 1:
            raise UserError(f"{len(keys)} answers have a key that begins with {key}: name one")
        subject = "this answer" if key else f"answers {chosen}" if chosen else "all answers"
        if not yes:
            click.confirm(f"Remove {subject} of {target.text}?", abort=True)
        gone = backend.remove(keys) if key is not None else backend.purge(which)
        # Questions that were answered from the cache go with the answers; a key names one answer, not its askers.
        if key is None:
            with target.near_hits() as log:
                log.purge(which)
    click.echo(f"{gone} removed")


@command.command()
@of_cache
@output_option
def export(target: CacheTarget, output: str) -> None:
    """Write every question with its answer, a JSON object a line.

    Whose answer it is stands there as a digest, `tenant`: what `pipeline cache purge --only tenant=NAME` finds it by.
    """
    with target.opened() as backend, opened(output) as file:
        for stored in backend.items():
            file.write(json.dumps(_row(stored), ensure_ascii=False) + "\n")


def _row(stored: StoredEntry) -> dict[str, Any]:
    entry = stored.entry
    return {
        "key": stored.key.hex(),
        "scope": stored.scope.hex(),
        "engine": stored.engine.hex(),
        "tenant": stored.tenant.hex(),
        "question": stored.turn,
        "answer": entry.text,
        "created": utc_time(entry.created),
        "expires": utc_time(entry.expires),
        "used": utc_time(stored.used),
        "output_tokens": entry.output_tokens,
        "embedded": stored.has_vector,
    }


def _id(text: str | None, field: str) -> bytes | None:
    try:
        return None if text is None else bytes.fromhex(text)
    except ValueError:
        raise click.BadParameter(
            f"{text}: write it as `show --json` does", param_hint=f"--only {field}"
        ) from None


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age)
    if match is None:
        raise click.BadParameter(
            f"{age}: write a number and s, m, h or d, like 15m", param_hint="--only older_than"
        )
    return float(match[1]) * _UNITS_S[match[2]]


def _line(text: str) -> str:
    return cut(" ".join(text.split()), _LINE)
