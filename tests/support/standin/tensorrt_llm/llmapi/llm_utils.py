"""From settings of a YAML file to what LLM takes."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.release import VERSION, bound


class Decoding:
    """A decoding config, chosen by decoding_type; versions before 1.3 take no other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings


def update_llm_args_with_extra_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    given, extra, _ = bound("update_llm_args_with_extra_dict", *args, **kwargs).values()
    if "speculative_config" in extra and VERSION < "1.3":
        extra = {**extra, "speculative_config": Decoding(extra["speculative_config"])}
    return {**given, **extra}
