"""Output, logs and warnings of libraries, kept out of our output and not lost.

Warnings that are known not to matter are dropped; every other one becomes a
note that is said and kept in calibration.json. What is printed is kept for the message of a failure.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import PipelineError, StageError

# Beginning of a message, and why it does not matter.
_KNOWN = (
    (r"lm_head is not calibrated", "the output projection is left alone on purpose"),
    (r"Enable lm_head quantization", "said of an output projection that is not quantized, too"),
    (r"Cannot export tensorrt_llm checkpoint config.*No module named 'tensorrt_llm'", "it is not needed"),
    (r"To copy construct from a tensor", "ModelOpt's way to copy a scale"),
    (r"Model's original dtype .* differs from target dtype", "exported in float32, stored as the source was"),
    (r"dtype torch\.float32 not fully compatible", "stored as float16, which the documentation says"),
    (r"Received custom quantization formats for search", "ModelOpt's own, with the bits that scales take"),
    (r"AutoQuantize: Huggingface model detected", "checkpointing of gradients is turned off afterwards"),
    (r"Tied weight \(declared\)", "a tied output projection is stored once"),
)
_LAST_LINES = 15


@dataclass(slots=True)
class Notes:
    """Warnings of libraries that are not among those that we know to be harmless."""

    warnings: list[str] = field(default_factory=list)

    def add(self, doing: str, message: str) -> None:
        """Keep a warning, unless it is known.

        Args:
            doing: Work that was being done: "loading the model".
        """
        text = " ".join(message.split())
        if not any(re.match(pattern, text) for pattern, _ in _KNOWN):
            self.warnings.append(f"{doing}: {text}")


@contextlib.contextmanager
def quietly(doing: str, notes: Notes) -> Iterator[None]:
    """Run library code with its output kept back and its warnings noted.

    Args:
        doing: Work that is being done, for messages: "loading the model".

    Raises:
        StageError: The code failed; says what was being done, why it failed, and what was printed last.
    """
    printed = io.StringIO()
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
            warnings.simplefilter("always")
            with _quiet_transformers(), _listening(doing, notes):
                yield
    except PipelineError:
        raise
    except Exception as error:
        last = "".join(f"\n  {line}" for line in printed.getvalue().splitlines()[-_LAST_LINES:])
        raise StageError(f"{doing} failed: {type(error).__name__}: {error}{last}") from error
    finally:
        for warning in caught:
            # A deprecation is the libraries' own affair: their versions are pinned.
            if not issubclass(
                warning.category, DeprecationWarning | FutureWarning | PendingDeprecationWarning
            ):
                notes.add(doing, str(warning.message))


class _Handler(logging.Handler):
    """Takes the warnings of a logger as notes."""

    def __init__(self, doing: str, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._doing, self._notes = doing, notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.add(self._doing, record.getMessage())


@contextlib.contextmanager
def _listening(doing: str, notes: Notes) -> Iterator[None]:
    """ModelOpt warns through `logging` as well, and has no handler of its own."""
    logger, handler = logging.getLogger("modelopt"), _Handler(doing, notes)
    passed_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = passed_on


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    from transformers.utils import logging as untyped

    transformers_logging: Any = untyped
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
