"""`pipeline rules`: every rule of preflight, what it compares, why, and who says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from pipeline.cli.options import Verb, json_option
from pipeline.cli.output import print_cut, print_json
from pipeline.contracts.rules import GROUPS, Rule, rules, similar_ids, source
from pipeline.errors import UserError

_RUNTIMES = ("tensorrt", "pytorch", "cpu")
_SEVERITIES = ("error", "warning", "note")


@click.command(name="rules", cls=Verb)
@click.argument("words", metavar="[RULE|WORD]...", nargs=-1)
@json_option
def command(words: tuple[str, ...], as_json: bool) -> None:
    """List the rules that plan, build and deploy hold recipes and machines against, or print one with its sources.

    An error stops a build unless --allow RULE lets it pass; warnings are kept in the manifests of what is built.

    A WORD keeps only the rules of that group, runtime (tensorrt, pytorch, cpu) or severity (error, warning, note).

    \b
    pipeline rules error tensorrt
    pipeline rules tp.awq_block
    """
    filters = {word: _filter(word) for word in words if word in (*GROUPS, *_RUNTIMES, *_SEVERITIES)}
    named = [_found(word) for word in words if word not in filters]
    chosen = named or [one for one in rules() if all(keeps(one) for keeps in filters.values())]
    if as_json:
        rows = [_row(one) for one in chosen]
        print_json(rows[0] if len(named) == 1 else rows)
    elif named:
        click.echo("\n\n".join(map(_page, named)))
    else:
        _print_table(chosen)


def _filter(word: str) -> Callable[[Rule], bool]:
    return lambda one: word in (one.group, *one.runtimes, *one.severities.values())


def _found(name: str) -> Rule:
    for one in rules():
        if one.id == name:
            return one
    near = ", ".join(similar_ids(name))
    raise UserError(
        f"there is no rule {name}" + (f"; did you mean {near}?" if near else "; pipeline rules lists them")
    )


def _row(one: Rule) -> dict[str, Any]:
    texts = {name: source(name) for name in one.sources}
    return asdict(one) | {"sources": texts, "allowable": one.gravest == "error" and not one.never_allowed}


def _page(one: Rule) -> str:
    lines = {
        "severity": _severity(one),
        "about": ", ".join(one.runtimes) + _releases(one),
        "fields": ", ".join(one.fields),
        "when": one.when,
        "check": one.check,
        "reason": one.reason,
        "fix": one.fix,
        "--allow": _allowing(one),
        "differs": one.differs,
        "held": f"{one.held} ({one.by})" if one.held else "",
        "confidence": one.confidence,
    }
    text = [one.id, *(f"  {title:<11} {value}" for title, value in lines.items() if value)]
    return "\n".join([*text, *(f"  {'source':<11} {source(name)}" for name in one.sources)])


def _severity(one: Rule) -> str:
    if len(set(one.severities.values())) == 1:
        return one.gravest
    return ", ".join(f"{severity} with {runtime}" for runtime, severity in one.severities.items())


def _releases(one: Rule) -> str:
    bounds = [f"from {one.since}" if one.since else "", f"before {one.until}" if one.until else ""]
    return "".join(f", {bound}" for bound in bounds if bound)


def _allowing(one: Rule) -> str:
    if one.gravest != "error":
        return ""
    return f"no: {one.never_allowed}" if one.never_allowed else "yes"


def _print_table(chosen: list[Rule]) -> None:
    longest = max((len(one.id) for one in chosen), default=0)
    group = ""
    for one in chosen:
        if one.group != group:
            click.echo(f"{one.group}" if not group else f"\n{one.group}")
            group = one.group
        print_cut(f"  {one.id:<{longest}}  {one.gravest:<7}  {one.check}")
    click.echo(f"\n{len(chosen)} rules; pipeline rules RULE prints one with its reason and sources")
