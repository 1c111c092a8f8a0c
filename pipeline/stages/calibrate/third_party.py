"""What libraries print and warn about, kept out of our output and not lost.

Warnings that are known, and of which we know why they do not matter, are dropped; every other one becomes a
note that is said and kept in calibration.json. What is printed is kept for the message of a failure.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PipelineError, StageError

# (beginning of the message, why it does not matter)
_KNOWN = (
    (r"lm_head is not calibrated", "the output projection is left alone on purpose"),
    (r"Enable lm_head quantization", "said of an output projection that is not quantized, too"),
    (
        r"Cannot export tensorrt_llm checkpoint config.*No module named 'tensorrt_llm'",
        "it is not installed here",
    ),
    (r"To copy construct from a tensor", "ModelOpt's way to copy a scale"),
    (
        r"Model's original dtype .* differs from target dtype",
        "exported in float32, then stored as the source was",
    ),
    (r"dtype torch\.float32 not fully compatible", "said in calibration.json: stored as float16"),
)
_LAST_LINES = 15


@dataclass(slots=True)
class Notes:
    """Warnings that nobody foresaw."""

    warnings: list[str] = field(default_factory=list)


@contextlib.contextmanager
def quietly(doing: str, notes: Notes) -> Iterator[None]:
    """Run library code; its failure becomes a StageError that says what was being done and what was printed
    last.
    """
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            with _quiet_transformers():
                yield
    except PipelineError:
        raise
    except Exception as error:
        last = "".join(f"\n  {line}" for line in printed.getvalue().splitlines()[-_LAST_LINES:])
        raise StageError(f"{doing} failed: {type(error).__name__}: {error}{last}") from error
    finally:
        for warning in caught:
            text = " ".join(str(warning.message).split())
            # A deprecation is the libraries' own affair: their versions are pinned.
            known = issubclass(
                warning.category, DeprecationWarning | FutureWarning | PendingDeprecationWarning
            )
            if not known and not any(re.match(pattern, text) for pattern, _ in _KNOWN):
                notes.warnings.append(f"{doing}: {text}")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as untyped

    logging: Any = untyped
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
