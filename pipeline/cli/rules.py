"""`pipeline rules`: every rule of preflight, what it compares, why, and who says so."""

from __future__ import annotations

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
@click.argument("name", metavar="[RULE]", required=False)
@click.option("--group", type=click.Choice(GROUPS), help="Only rules of this group.")
@click.option("--runtime", type=click.Choice(_RUNTIMES), help="Only rules about this runtime.")
@click.option("--severity", type=click.Choice(_SEVERITIES), help="Only rules that are this grave somewhere.")
@json_option
def command(
    name: str | None, group: str | None, runtime: str | None, severity: str | None, as_json: bool
) -> None:
    """List the rules that plan, build and deploy hold recipes and machines against, or print one with its sources.

    An error stops a build unless --allow RULE lets it pass; warnings are kept in the manifests of what is built.

    \b
    pipeline rules --severity error --runtime tensorrt
    pipeline rules tp.awq_block
    """
    if name is not None:
        one = _found(name)
        if as_json:
            print_json(_row(one))
        else:
            click.echo(_page(one))
        return
    chosen = [
        one
        for one in rules()
        if group in (None, one.group)
        and (runtime is None or runtime in one.runtimes)
        and (severity is None or severity in one.severities.values())
    ]
    if as_json:
        print_json([_row(one) for one in chosen])
    else:
        _print_table(chosen)


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
