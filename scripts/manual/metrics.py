"""The reference of the gateway's metrics, from the table that its page is rendered by."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline.gateway.metric_names import OTHER_VIEWS, OWN_VIEWS, View

PACKAGE = Path(__file__).resolve().parents[2] / "pipeline"
TITLES = {"vllm": "Names of vLLM", "gen_ai": "Names of OpenTelemetry's conventions for GenAI"}

# What only other names show.
_ALONE = {
    "prefill": "from sending a choice to the model to its first chunk",
    "decode": "from its first chunk to its last",
    "kv_usage": "`nv_trt_llm_kv_cache_block_metrics` of Triton's page, used by max",
}


def page() -> str:
    """Markdown: every family with its type, its labels and its help, and the names that an option adds."""
    lines = [
        "# Gateway metrics",
        "",
        "What `pipeline gateway` serves at `/metrics`. Triton has metrics of its own, on its own port (8002 by",
        "default); the `cpu` engine adds its KV cache and drafts there, under the names of TensorRT-LLM's backend.",
        "",
        "| metric | type | labels | what it is |",
        "| --- | --- | --- | --- |",
        *(f"| `{_shown(view)}` | {view.kind} | {_labels(view)} | {view.help} |" for view in OWN_VIEWS),
        "",
        "`event` of the cache is one of "
        + ", ".join(f"`{name}`" for name in _cache_events())
        + ". `failed_…` says that something inside the cache failed; the model then answered.",
        "",
        "`gateway.metric_names: [vllm, gen_ai]` shows the same observations under these names, too:",
    ]
    for names, views in OTHER_VIEWS.items():
        lines += [
            "",
            f"## {TITLES[names]}",
            "",
            "| metric | type | labels | same as |",
            "| --- | --- | --- | --- |",
        ]
        lines += [
            f"| `{_shown(view)}` | {view.kind} | {_labels(view)} | {_same_as(view)} |" for view in views
        ]
    return "\n".join(lines) + "\n"


def _shown(view: View) -> str:
    return view.name + ("_total" if view.kind == "counter" else "")


def _labels(view: View) -> str:
    constant = [f'{name}="{value}"' for name, value in view.constant.items()]
    return ", ".join(f"`{label}`" for label in (*view.labels, *constant))


def _same_as(view: View) -> str:
    """The gateway's own families that show the same observation, in the same form where there is one."""
    same = [own for own in OWN_VIEWS if own.source == view.source]
    like = [own for own in same if own.where == view.where] or same
    return ", ".join(f"`{_shown(own)}`" for own in like) or _ALONE[view.source]


def _cache_events() -> list[str]:
    """Names of the counters in the sources of the cache."""
    text = "".join(path.read_text(encoding="utf-8") for path in (PACKAGE / "cache").rglob("*.py"))
    calls = re.findall(r"counters\.add\((.*)\)", text)
    names = {name for call in calls for name in re.findall(r'"([a-z_]+(?:\{\w+)?)', call)}
    return sorted(re.sub(r"\{\w+", "…", name) for name in names)
