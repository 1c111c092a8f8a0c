"""From settings of a YAML file to what LLM takes."""

from __future__ import annotations

import os
from typing import Any


class Decoding:
    """A decoding config, chosen by decoding_type; versions before 1.3 take no other."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings


def update_llm_args_with_extra_dict(llm_args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    if "speculative_config" in extra and os.environ.get("STANDIN_VERSION", "1.2.1") < "1.3":
        extra = {**extra, "speculative_config": Decoding(extra["speculative_config"])}
    return llm_args | extra
