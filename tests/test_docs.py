"""The manual: paths, commands, options and names that it shows are there, and the README stays short."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pipeline.cli.main import cli
from pipeline.client.sampling import PARAMETERS, is_neutral
from pipeline.contracts.releases import TRACKS, half

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
)
FOLDERS = (
    "pipeline",
    "model_repo",
    "tests",
    "scripts",
    "recipes",
    "calibration",
    "benchmarks",
    "docs",
    ".ci",
)
# A path from the root in backticks, perhaps with a pattern or a place in the file: `pipeline/plan/*.py`, `a/b.py:12`.
_PATH = re.compile(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]+)`")
_MODULE = re.compile(r"\bpipeline(?:\.[a-z_]+)+")
_COMMAND = re.compile(r"(?:^    |`)pipeline((?: [a-z][a-z-]*)+)(?P<rest>[^`\n]*)", re.MULTILINE)


def test_no_merge_has_left_its_marks() -> None:
    marks = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
    assert [page.name for page in PAGES if marks.search(page.read_text(encoding="utf-8"))] == []


def test_paths_and_commands_are_there() -> None:
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = [name for name in _PATH.findall(text) if not any(ROOT.glob(name.rstrip("/")))]
        modules = [name for name in _MODULE.findall(text) if not any(ROOT.glob(name.replace(".", "/") + "*"))]
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in (*paths, *modules, *_unknown(text))]
    assert wrong == []


def test_examples_import_what_is_there() -> None:
    wrong = []
    for page in PAGES:
        for block in re.findall(
            r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline"):
                    module = importlib.import_module(str(node.module))
                    missing = [name.name for name in node.names if not hasattr(module, name.name)]
                    wrong += [f"{page.relative_to(ROOT)}: {node.module}.{name}" for name in missing]
    assert wrong == []


def test_the_front_page_is_one_page() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert "On a GPU nothing has run yet" in "\n".join(lines[:15])


def test_links_of_the_root_lead_somewhere() -> None:
    for page in PAGES[:3]:
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        assert [link for link in links if not (ROOT / link).exists()] == []


def _unknown(text: str) -> list[str]:
    """Commands of `pipeline` that do not exist, and their options that do not."""
    wrong = []
    for found in _COMMAND.finditer(text):
        command: click.Command = cli
        for word in found[1].split():
            if not isinstance(command, click.Group):
                break
            inner = command.get_command(click.Context(command), word)
            if inner is None and command.params:
                # The plain form of a command with verbs: the word is its argument.
                break
            if inner is None:
                wrong.append(f"pipeline{found[1]}")
                break
            command = inner
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        } | {"--help"}
        rest = found["rest"].partition(" #")[0].partition("   ")[0].partition(" | ")[0]
        wrong += [
            f"pipeline{found[1]} {name}"
            for name in re.findall(r" (--[a-z][\w-]*)", rest)
            if name not in known
        ]
    return wrong


def test_what_a_room_offers_is_documented() -> None:
    """Each function and method behind an `__all__` has a docstring, unless its class refers to a protocol."""
    package = ROOT / "pipeline"
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    lacking = []
    rooms = {path.parent: offered(tree) for path, tree in trees.items() if path.name == "__init__.py"}
    for path, tree in trees.items():
        names = set().union(*(rooms.get(folder, ()) for folder in path.parents))
        for node in tree.body:
            if getattr(node, "name", None) in names:
                lacking += [f"{path.relative_to(ROOT)}: {name}" for name in undocumented(node)]
    assert sorted(set(lacking)) == []


def offered(tree: ast.Module) -> set[str]:
    """The names of `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {element.value for element in ast.walk(node.value) if isinstance(element, ast.Constant)}
    return set()


def undocumented(node: ast.stmt) -> Iterator[str]:
    """Public functions of a definition that have no docstring."""
    if isinstance(node, ast.ClassDef) and (ast.get_docstring(node) or "").startswith("See `"):
        return
    functions = [node] if not isinstance(node, ast.ClassDef) else node.body
    for function in functions:
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in function.decorator_list}
        hidden = function.name.startswith("_") and function.name != "__init__"
        if hidden or decorators & {"property", "cached_property", "overload"}:
            continue
        text = ast.get_docstring(function) or ""
        if function.name == "__init__" and isinstance(node, ast.ClassDef):
            text += ast.get_docstring(node) or ""
        if not text:
            yield f"{node.name}.{function.name}" if isinstance(node, ast.ClassDef) else function.name


def test_the_table_of_parameters_knows_each_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    parameters = importlib.import_module("manual.parameters")
    assert set(parameters.EXAMPLES) == set(PARAMETERS)
    assert all(not is_neutral(name, value) for name, value in parameters.EXAMPLES.items())
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| (?:yes|no|`)", parameters.table(), re.MULTILINE)
    assert rows == list(PARAMETERS)
    for title, name, expected in (
        ("cpu", "min_p", "yes"),
        ("tensorrt 1.2.1", "min_p", "no"),
        ("tensorrt 1.2.1", "ignore_eos", "yes"),
        ("tensorrt 1.2.1", "prompt_log_probs", "serving.prompt_log_probs"),
        ("pytorch 1.2.1", "presence_penalty", "no"),
        ("pytorch 1.3.0rc29", "presence_penalty", "yes"),
    ):
        assert parameters.takes(title, name) == expected


def test_the_status_has_the_state_of_each_runtime_upstream() -> None:
    """It has the words of the contract, as the commands do."""
    text = " ".join((ROOT / "docs/status.md").read_text(encoding="utf-8").replace("`", "").split())
    for track in TRACKS:
        assert half(track) in text.replace("runtime.kind: ", "runtime.kind ")
