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
    filters = {word for word in words if word in (*GROUPS, *_RUNTIMES, *_SEVERITIES)}
    named = [_found(word) for word in words if word not in filters]
    chosen = named or [
        rule for rule in rules() if filters <= {rule.group, *rule.runtimes, *rule.severities.values()}
    ]
    if as_json:
        rows = [_row(listed) for listed in chosen]
        print_json(rows[0] if len(named) == 1 else rows)
    elif named:
        click.echo("\n\n".join(map(_page, named)))
    else:
        _print_table(chosen)


def _found(name: str) -> Rule:
    for rule in rules():
        if rule.id == name:
            return rule
    near = ", ".join(similar_ids(name))
    raise UserError(
        f"there is no rule {name}" + (f"; did you mean {near}?" if near else "; pipeline rules lists them")
    )


def _row(rule: Rule) -> dict[str, Any]:
    texts = {name: source(name) for name in rule.sources}
    return asdict(rule) | {"sources": texts, "allowable": rule.gravest == "error" and not rule.never_allowed}


def _page(rule: Rule) -> str:
    lines = {
        "severity": _severity(rule),
        "about": ", ".join(rule.runtimes) + _releases(rule),
        "fields": ", ".join(rule.fields),
        "when": rule.when,
        "check": rule.check,
        "reason": rule.reason,
        "fix": rule.fix,
        "--allow": _allowing(rule),
        "differs": rule.differs,
        "held": f"{rule.held} ({rule.by})" if rule.held else "",
        "confidence": rule.confidence,
    }
    text = [rule.id, *(f"  {title:<11} {value}" for title, value in lines.items() if value)]
    return "\n".join([*text, *(f"  {'source':<11} {source(name)}" for name in rule.sources)])


def _severity(rule: Rule) -> str:
    if len(set(rule.severities.values())) == 1:
        return rule.gravest
    return ", ".join(f"{severity} with {runtime}" for runtime, severity in rule.severities.items())


def _releases(rule: Rule) -> str:
    bounds = [f"from {rule.since}" if rule.since else "", f"before {rule.until}" if rule.until else ""]
    return "".join(f", {bound}" for bound in bounds if bound)


def _allowing(rule: Rule) -> str:
    if rule.gravest != "error":
        return ""
    return f"no: {rule.never_allowed}" if rule.never_allowed else "yes"


def _print_table(chosen: list[Rule]) -> None:
    longest = max((len(listed.id) for listed in chosen), default=0)
    group = ""
    for listed in chosen:
        if listed.group != group:
            click.echo(f"{listed.group}" if not group else f"\n{listed.group}")
            group = listed.group
        print_cut(f"  {listed.id:<{longest}}  {listed.gravest:<7}  {listed.check}")
    click.echo(f"\n{len(chosen)} rules; pipeline rules RULE prints one with its reason and sources")
