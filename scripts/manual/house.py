"""The map of the package, drawn from its imports: rooms on floors, each above all that it imports."""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"

PURPOSE = {
    "cli": "one file a verb: parse, call, print",
    "doctor": "what a machine can do",
    "stages": "fetch, dataset, calibrate, evaluate",
    "prepare": "facts first, then the plan",
    "sources": "what a recipe's sources are",
    "serving": "start, check, watch and end Triton",
    "gateway": "OpenAI's interface over HTTP",
    "bench": "load, percentiles, SLO verdicts",
    "runtimes": "cpu, pytorch, tensorrt: build, package",
    "cache": "exact and semantic response cache",
    "machine": "probes: GPUs, memory, disks, Docker",
    "triton": "config.pbtxt, deployment.json",
    "client": "streaming client over gRPC",
    "plan": "memory, speed, rules, the plan",
    "contracts": "facts about upstream, as data",
    "models": "config, tensors, chat template",
    "recipe": "the YAML file, validated",
    "store": "artifacts named by digest",
}
_WIDTH, _HEIGHT, _GAP, _RISE, _MARGIN = 236, 58, 24, 56, 20


def rooms() -> dict[str, set[str]]:
    """Each room of the package with the rooms that it imports."""
    names = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    found: dict[str, set[str]] = {}
    for name in sorted(names):
        files = (PACKAGE / name).rglob("*.py")
        found[name] = {room for path in files for room in _imports(path, names)} - {name}
    return found


def floors(imports: dict[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the ground first: a room's floor is one above the highest that it imports.

    Raises:
        ValueError: rooms import each other in a circle.
    """
    level: dict[str, int] = {}
    while len(level) < len(imports):
        ready = [name for name, used in imports.items() if name not in level and used <= set(level)]
        if not ready:
            raise ValueError(f"rooms import each other: {sorted(set(imports) - set(level))}")
        for name in ready:
            level[name] = 1 + max((level[imported] for imported in imports[name]), default=-1)
    return [
        [name for name in sorted(level) if level[name] == floor] for floor in range(max(level.values()) + 1)
    ]


def drawing() -> str:
    """The map as SVG. An arrow is drawn where no longer way leads to the same room."""
    imports = rooms()
    stories = floors(imports)[::-1]
    wide = max(len(story) for story in stories)
    width = wide * (_WIDTH + _GAP) - _GAP + 2 * _MARGIN
    height = len(stories) * (_HEIGHT + _RISE) - _RISE + 2 * _MARGIN
    corner: dict[str, tuple[float, float]] = {}
    for row, story in enumerate(stories):
        left = (width - len(story) * (_WIDTH + _GAP) + _GAP) / 2
        for column, name in enumerate(story):
            corner[name] = (left + column * (_WIDTH + _GAP), _MARGIN + row * (_HEIGHT + _RISE))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#607d8b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for name, used in imports.items():
        for other in sorted(used - {far for near in used for far in _reachable(near, imports)}):
            parts.append(_arrow(corner[name], corner[other]))
    for name, (x, y) in corner.items():
        parts.append(_box(name, x, y))
    return "\n".join([*parts, "</svg>"]) + "\n"


def table() -> str:
    """Markdown: every room with its files and lines."""
    lines = ["| room | what it does | files | lines |", "| --- | --- | --- | --- |"]
    for story in floors(rooms())[::-1]:
        for name in story:
            files, count = _size(name)
            lines.append(f"| `pipeline/{name}/` | {PURPOSE.get(name, '')} | {files} | {count:,} |")
    return "\n".join(lines)


def _box(name: str, x: float, y: float) -> str:
    middle = x + _WIDTH / 2
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#eceff1" stroke="#607d8b"/>'
        f'<text x="{middle}" y="{y + 24}" text-anchor="middle" font-size="16" font-weight="bold" fill="#263238">{name}'
        f'</text><text x="{middle}" y="{y + 44}" text-anchor="middle" font-size="12" fill="#455a64">'
        f"{escape(PURPOSE.get(name, ''))}</text>"
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x1, y1 = start[0] + _WIDTH / 2, start[1] + _HEIGHT
    x2, y2 = end[0] + _WIDTH / 2, end[1]
    bend = (y2 - y1) / 2
    path = f"M{x1} {y1}C{x1} {y1 + bend} {x2} {y2 - bend} {x2} {y2}"
    return f'<path d="{path}" fill="none" stroke="#90a4ae" stroke-width="1.5" marker-end="url(#tip)"/>'


def _reachable(name: str, imports: dict[str, set[str]]) -> set[str]:
    return imports[name] | {far for near in imports[name] for far in _reachable(near, imports)}


def _size(name: str) -> tuple[int, int]:
    files = list((PACKAGE / name).rglob("*.py"))
    return len(files), sum(path.read_text(encoding="utf-8").count("\n") for path in files)


def _imports(path: Path, names: set[str]) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module.split(".")[1] for module in modules if module.startswith("pipeline.")} & names
