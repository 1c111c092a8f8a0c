"""The reference of the gateway's metrics, found where the sources declare them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"
TYPES = {
    "Counter": "counter",
    "CounterMetricFamily": "counter",
    "Gauge": "gauge",
    "GaugeMetricFamily": "gauge",
    "Histogram": "histogram",
}


def page() -> str:
    """Markdown: every family with its type, its labels and its help."""
    lines = [
        "# Gateway metrics",
        "",
        "What `pipeline gateway` serves at `/metrics`. Triton has metrics of its own, on its own port (8002 by",
        "default); the `cpu` engine adds its KV cache and drafts there, under the names of TensorRT-LLM's backend.",
        "",
        "| metric | type | labels | what it counts |",
        "| --- | --- | --- | --- |",
    ]
    found = list(_families())
    if not found:
        raise ValueError("no metric was found in pipeline/gateway")
    for name, kind, labels, about in found:
        shown = name + ("_total" if kind == "counter" else "")
        lines.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {about} |")
    lines += [
        "",
        "`state` of the queue is `running` or `waiting`. `event` of the cache is one of "
        + ", ".join(f"`{name}`" for name in _cache_events())
        + ". `failed_…` says that something inside the cache failed; the model then answered.",
    ]
    return "\n".join(lines) + "\n"


def _families() -> Iterator[tuple[str, str, list[str], str]]:
    """Name, type, labels and help of each metric that the gateway makes."""
    for path in sorted((PACKAGE / "gateway").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in TYPES or not node.args:
                continue
            name, about, *rest = node.args
            given = [*rest, *(one.value for one in node.keywords if one.arg in ("labels", "labelnames"))]
            if isinstance(name, ast.Constant) and str(name.value).startswith("pipeline_"):
                labels = ast.literal_eval(given[0]) if given else []
                yield str(name.value), TYPES[node.func.id], list(labels), ast.literal_eval(about)


def _cache_events() -> list[str]:
    """What the sources of the cache count, by name."""
    text = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "cache").rglob("*.py"))
    calls = re.findall(r"counters\.add\((.*)\)", text)
    names = {name for call in calls for name in re.findall(r'"([a-z_]+(?:\{\w+)?)', call)}
    return sorted(re.sub(r"\{\w+", "…", name) for name in names)
