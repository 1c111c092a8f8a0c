"""model.yaml: the arguments of the LLM, and `triton_config`, which is this model's own.

Paths in it may be relative to its folder, so that a repository can be moved; upstream's model hands them on as they
are, and the LLM would look for them in the working directory, or on a hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_OWN = "triton_config"
_PATHS = ("model", "tokenizer")
_DRAFT_PATHS = ("speculative_model", "speculative_model_dir")


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """What model.yaml says."""

    arguments: Mapping[str, Any]  # of the LLM, paths absolute
    cancellation_check_period_s: float = 0.1
    max_open_requests: int | None = None  # running and waiting; None: no limit

    @classmethod
    def read(cls, path: Path) -> LlmSettings:
        """The settings of a file.

        Raises:
            ValueError: it is no file of settings, or says something that this model cannot do.
        """
        if not path.is_file():
            raise ValueError(f"{path} is missing: it holds the arguments of the LLM")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError(f"{path} names no model")
        own = content.pop(_OWN, None) or {}
        if own.get("max_batch_size", 0) != 0:
            raise ValueError(f"{path}: {_OWN}.max_batch_size must be 0: there are no batches")
        return cls(
            arguments=_absolute(content, path.parent.resolve()),
            cancellation_check_period_s=own.get("cancellation_check_period_ms", 100) / 1000,
            max_open_requests=own.get("max_open_requests"),
        )


def _absolute(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    arguments = {name: _path(value, folder) if name in _PATHS else value for name, value in content.items()}
    speculation = arguments.get("speculative_config")
    if speculation is not None:
        arguments["speculative_config"] = {
            name: _path(value, folder) if name in _DRAFT_PATHS else value
            for name, value in speculation.items()
        }
    return arguments


def _path(value: Any, folder: Path) -> Any:
    """A folder beside model.yaml as an absolute path; anything else (a path already, a hub's name) as it is."""
    return str(folder / value) if isinstance(value, str) and (folder / value).is_dir() else value
