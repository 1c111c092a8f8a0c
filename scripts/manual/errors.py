"""The reference of error messages, found in the sources: every text that is raised, by family.

A part of a message that depends on the case is shown as `…`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"

# Roots of the families, with what a user can do about them.
FAMILIES = {
    "PipelineError": "The command line prints the message and ends with the exit code; `--debug` adds a traceback.",
    "ClientError": "What `pipeline.client` raises; `error.request_id` finds the request in the server's log.",
    "ApiError": 'What `pipeline gateway` answers: a status and `{"error": {"message", "type", "param", "code"}}`.',
}
_HOLE = "…"


@dataclass(frozen=True)
class _Class:
    name: str
    base: str
    doc: str
    exit_code: int | None
    module: str


def page() -> str:
    """Markdown: each class of the three families, with the messages that it is raised with, room by room."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    classes = {found.name: found for path, tree in trees.items() for found in _classes(path, tree)}
    messages: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for path, tree in trees.items():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name, text in _raised(tree, set(classes)):
            messages[name].add((room, text))
    lines = [
        "# Errors",
        "",
        f"Every message that the package can give, found in its sources, by family; `{_HOLE}` stands for what depends",
        "on the case. Search this site for a few words of the message. Messages of preflight rules end with",
        "the rule's id in brackets: look there ([rules](rules.md)).",
    ]
    for root, about in FAMILIES.items():
        lines += ["", f"## {root}", "", about]
        for name in _family(root, classes):
            lines += ["", *_entry(classes[name], classes, messages[name])]
    return "\n".join(lines) + "\n"


def _classes(path: Path, tree: ast.Module) -> Iterator[_Class]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.bases and isinstance(node.bases[0], ast.Name):
            codes = [
                node.value.value
                for node in node.body
                if isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and node.target.id == "exit_code"
                and isinstance(node.value, ast.Constant)
            ]
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            yield _Class(node.name, node.bases[0].id, doc, codes[0] if codes else None, module)


def _family(root: str, classes: dict[str, _Class]) -> list[str]:
    """A class and all below it, each before its own."""
    below = [name for name, class_name in classes.items() if class_name.base == root]
    return (
        [root, *(name for child in sorted(below) for name in _family(child, classes))]
        if root in classes
        else []
    )


def _entry(error_class: _Class, classes: dict[str, _Class], messages: set[tuple[str, str]]) -> list[str]:
    code, walk = error_class.exit_code, error_class
    while code is None and walk.base in classes:
        walk = classes[walk.base]
        code = walk.exit_code
    under = f", a kind of `{error_class.base}`" if error_class.base in classes else ""
    exits = f" Exit code {code}." if code is not None else ""
    lines = [f"### {error_class.name}", "", f"`{error_class.module}`{under}.{exits} {error_class.doc}"]
    for room in sorted({room for room, _ in messages}):
        lines += ["", f"From `{room}`:", ""]
        lines += [f"- `` {text} ``" for where, text in sorted(messages) if where == room]
    return lines


def _raised(tree: ast.Module, names: set[str]) -> Iterator[tuple[str, str]]:
    """Calls of error classes (and of `Fault`, of which InvalidInput consists) with a text."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        name = "InvalidInput" if node.func.id == "Fault" else node.func.id
        if name not in names or node.func.id == "InvalidInput":
            continue
        texts = [text for argument in node.args if len((text := _text(argument)).strip(_HOLE + " :")) > 8]
        if texts:
            status = node.args[0]
            prefix = f"{status.value} " if name == "ApiError" and isinstance(status, ast.Constant) else ""
            yield name, prefix + re.sub(r"\s+", " ", texts[0]).strip()


def _text(node: ast.AST) -> str:
    """A text as it is written, with holes for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.IfExp):
        return _text(node.body)
    return _HOLE
