"""The table of an engine's settings and the arguments of the LLM API that say the same."""

from __future__ import annotations

from itertools import groupby

from pipeline.contracts import llm_args, migration
from pipeline.contracts.migration import EngineSetting

_TITLES = {
    "flags": "`trtllm-build`",
    "parameters": "`config.pbtxt` of `tensorrt_llm`: `parameters`",
    "triton": "`config.pbtxt` of `tensorrt_llm`: the rest",
}


def table() -> str:
    """Markdown: one table for each kind of setting; those with the same argument and reason share a row."""
    newest = llm_args.versions()[-1]
    lines: list[str] = []
    for kind, settings in groupby(migration.settings(), key=lambda setting: setting.kind):
        lines += [
            f"### {_TITLES[kind]}",
            "",
            "| setting | argument | key of the recipe | |",
            "| --- | --- | --- | --- |",
        ]
        for _, alike in groupby(
            settings, key=lambda setting: (setting.argument, setting.key, setting.near, setting.because)
        ):
            lines.append(_row(list(alike), newest))
        lines.append("")
    return "\n".join(lines)


def _row(alike: list[EngineSetting], newest: str) -> str:
    first = alike[0]
    remark = [first.reason] if first.reason else []
    if first.argument and not llm_args.has_argument(llm_args.versions()[0], first.argument):
        since = next(
            version for version in llm_args.versions() if llm_args.has_argument(version, first.argument)
        )
        remark.append(f"from {since}")
    if first.argument and not llm_args.has_argument(newest, first.argument):
        remark.append(f"not in {newest}")
    cells = (
        ", ".join(f"`{setting.name}`" for setting in alike),
        f"`{first.argument}`" if first.argument else "–",
        f"`{first.key}`" if first.key else "",
        "; ".join(remark),
    )
    return f"| {' | '.join(cells)} |"
