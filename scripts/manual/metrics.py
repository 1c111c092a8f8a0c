"""The reference of the gateway's metrics, from the page that a gateway serves to Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from pipeline.client import Stats
from pipeline.gateway.metrics import Metrics


def page() -> str:
    """Markdown: every family with its type, its labels and its help."""
    metrics = Metrics({"m": _Anything()})
    metrics.count_request("/v1/models", "m", 200)
    metrics.observe_completion("m", 1, [Stats(ttft_ms=1.0, itl_ms=(1.0,), output_tokens=2)])
    text = metrics.render("")[0].decode()
    lines = [
        "# Gateway metrics",
        "",
        "What `pipeline gateway` serves at `/metrics`. Triton has metrics of its own, on its own port (8002 by",
        "default); the `cpu` engine adds its KV cache and drafts there, under the names of TensorRT-LLM's backend.",
        "",
        "| metric | type | labels | what it counts |",
        "| --- | --- | --- | --- |",
    ]
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = ", ".join(f"`{label}`" for label in sorted(labels))
        lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    lines += [
        "",
        "`state` of the queue is `running` or `waiting`. `event` of the cache is one of "
        + ", ".join(f"`{name}`" for name in _cache_events())
        + ". `failed_…` says that something inside the cache failed; the model then answered.",
    ]
    return "\n".join(lines) + "\n"


class _Anything:
    """Stands for a model whose queue and cache are read: every attribute and call is itself, of one item, worth 1."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any) -> Any:
        return self

    def __iter__(self) -> Any:
        return iter([("m", self)])

    def __float__(self) -> float:
        return 1.0


def _cache_events() -> list[str]:
    """What the sources of the cache count, by name."""
    folder = Path(__file__).resolve().parents[2] / "pipeline" / "cache"
    text = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    calls = re.findall(r"counters\.add\((.*)\)", text)
    names = {name for call in calls for name in re.findall(r'"([a-z_]+(?:\{\w+)?)', call)}
    return sorted(re.sub(r"\{(\w+)", r"<\1>", name) for name in names)
