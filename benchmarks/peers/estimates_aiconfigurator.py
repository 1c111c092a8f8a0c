"""Asks AIConfigurator for estimates: reads a JSON list of arguments of `cli_estimate`, prints a list of answers.

Run by benchmarks/forecasts.py in AIConfigurator's own environment. An answer is [first token, time of a token] in
milliseconds, or null where it has no estimate. What its operators' data has not is asked again as HYBRID.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

logging.disable(logging.CRITICAL)
os.environ["HF_HUB_OFFLINE"] = "1"

from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found]  # noqa: E402


def estimate(arguments: dict[str, Any]) -> list[float] | None:
    """Ask for one estimate."""
    for mode in ("SILICON", "HYBRID"):
        try:
            found = cli_estimate(**arguments, database_mode=mode)
        except Exception:
            continue
        if found.ttft > 0 and found.tpot > 0:
            return [float(found.ttft), float(found.tpot)]
    return None


asked = json.load(sys.stdin)
printed, sys.stdout = sys.stdout, sys.stderr
answers = [estimate(question) for question in asked]
json.dump(answers, printed)
