"""The reference of preflight rules, from `pipeline/contracts/data/rules`."""

from __future__ import annotations

import itertools
import re

from pipeline.contracts.rules import Rule, rules, source

_ADDRESS = re.compile(r"(?<![<(\w])(https?://[^\s,;)]+)")


def page() -> str:
    """Markdown: every rule, group by group."""
    known = rules()
    lines = [
        "# Rules",
        "",
        f"The {len(known)} rules that `plan`, `build`, `deploy` and `serve` hold recipes and machines against, from",
        "`pipeline/contracts/data/rules`. `pipeline rules RULE` prints one of them. An error stops a build unless",
        "`--allow RULE` lets it pass; where a rule says *never allowed*, it cannot be. Warnings and allowed errors are",
        "kept in the manifests of what is built. How to use them: [check a recipe](../how-to/check-a-recipe.md).",
    ]
    for group, members in itertools.groupby(known, key=lambda rule: rule.group):
        lines += ["", f"## {group.capitalize()}"]
        for rule in members:
            lines += ["", *_rule(rule)]
    return "\n".join(lines) + "\n"


def _rule(rule: Rule) -> list[str]:
    severities = {kind: rule.severity(kind) for kind in rule.runtimes}
    if len(set(severities.values())) == 1:
        grave = f"{rule.gravest}, on {', '.join(rule.runtimes)}"
    else:
        grave = ", ".join(f"{severity} on {kind}" for kind, severity in severities.items())
    rows = [
        ("Severity", grave),
        ("Keys", ", ".join(f"`{field}`" for field in rule.fields)),
        ("Releases", _releases(rule)),
        ("When", rule.when),
        ("Holds if", rule.check),
        ("Why", rule.reason),
        ("What helps", rule.fix),
        ("Never allowed", rule.never_allowed),
        ("Differs from upstream", rule.differs),
        ("Held by construction", f"{rule.held} (`{rule.by}`)" if rule.held else ""),
        ("Sources", "; ".join(_ADDRESS.sub(r"<\1>", source(name)) for name in rule.sources)),
    ]
    body = [f"| {name} | {_cell(text)} |" for name, text in rows if text]
    return [f"### `{rule.id}` {{#{rule.id}}}", "", "| | |", "| --- | --- |", *body]


def _releases(rule: Rule) -> str:
    since = f"from {rule.since}" if rule.since else ""
    until = f"before {rule.until}" if rule.until else ""
    return " ".join(part for part in (since, until) if part)


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
