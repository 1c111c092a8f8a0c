"""The reference of the gateway's log, from the table that its lines are made by."""

from __future__ import annotations

from pipeline.gateway.access_log import LOG_FIELDS


def page() -> str:
    """Markdown: every key of the line of a request."""
    lines = [
        "# Log of requests",
        "",
        "Keys of the line that each request leaves with `gateway.log_format: json`, in this order; null where there is",
        "nothing. `gateway.log_prompts` adds `prompts` and `answers`, lists of texts.",
        "",
        "| key | what it holds |",
        "| --- | --- |",
        *(f"| `{name}` | {about} |" for name, about in LOG_FIELDS.items()),
    ]
    return "\n".join(lines) + "\n"
