"""Every failure that `pipeline` foresees, as one family.

    PipelineError                 exit 1   something went wrong while working
    ├── UserError                 exit 2   the input is wrong; the message says what would be right
    │   ├── InvalidInput                   one or more faults, each with file, line, key, value and fix
    │   ├── UnreadableFile                 a file is no regular file, or not what it should be (`pipeline.reading`)
    │   ├── SourceError                    a checkpoint cannot be had as asked (missing, gated, wrong hash, …)
    │   └── CheckpointError                a model's files are damaged, or not of the layout they claim
    ├── GateFailed                exit 3   quantization cost more quality than the recipe allows
    ├── SloMissed                 exit 4   a forecast misses the recipe's SLO
    ├── StoreError                         the store, or an artifact in it, cannot be read or written
    │   └── DamagedArtifact       exit 2   files are not those that were published
    ├── StageError                         a stage left something other than what it promised
    └── ServerError                        Triton or the gateway did not start, is not healthy, or died

The command line prints `str(error)` and exits with `error.exit_code`; a traceback is shown with `--debug` only.
The client has a family of its own (`pipeline.client.errors`), because it is installed without the build side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class PipelineError(Exception):
    """Base of all failures that are foreseen."""

    exit_code: ClassVar[int] = 1


class UserError(PipelineError):
    """A request that cannot be carried out as it is; a different one can."""

    exit_code: ClassVar[int] = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong in an input.

    >>> print(Fault("must be 128 to 512", where="r.yaml", line=7, key="quantization.calibration.samples", value=4))
    r.yaml:7: quantization.calibration.samples = 4: must be 128 to 512
    """

    problem: str
    where: str = ""  # file, or "--set" for the command line
    line: int | None = None  # 1-based
    key: str = ""  # dotted path
    value: object = None  # what was given; None if nothing was
    fix: str = ""  # what would be right
    rule: str = ""  # id of the rule that says so, where it has one

    def __str__(self) -> str:
        place = f"{self.where}:{self.line}" if self.line is not None else self.where
        subject = self.key if self.value is None else f"{self.key} = {_short(self.value)}"
        text = ": ".join(part for part in (place, subject, self.problem) if part)
        text = f"{text} ({self.fix})" if self.fix else text
        return f"{text} [{self.rule}]" if self.rule else text


_PASSWORD = re.compile(r"(://[^/@:]*:)[^/@]+@")  # of an address: what is wrong with it is shown without


def _short(value: object, limit: int = 60) -> str:
    text = repr(value) if not isinstance(value, str) else value
    text = _PASSWORD.sub(r"\1…@", text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class InvalidInput(UserError):
    """Everything that is wrong with an input, at once. What several faults have in common is printed once.

    Args:
        subject: the input, such as the path of a recipe.
        faults: Faults in the order to be printed.
        more: how many faults there are besides, which are counted and not described.
    """

    def __init__(self, subject: str, faults: Sequence[Fault], more: int = 0) -> None:
        self.subject = subject
        self.faults = tuple(faults)
        self.more = more
        total = len(self.faults) + more
        lines = [f"{subject}: {'1 fault' if total == 1 else f'{total:,} faults'}"]
        lines += [f"  {line}" for line in _once(self.faults)]
        lines += [f"  and {more:,} more"] if more else []
        super().__init__("\n".join(lines))


# Equal faults of fewer places than these are printed one by one; of more, so many places are named.
_MANY, _PLACES = 3, 10


def _once(faults: Sequence[Fault]) -> list[str]:
    """A line a fault, and one for many that say the same of different keys, lines or values.

    >>> print(*_once([Fault("is missing", key=key) for key in "abcd"]))
    a: is missing (4 times: also b; c; d)
    """
    alike: dict[tuple[str, ...], list[Fault]] = {}
    for fault in faults:
        alike.setdefault((fault.where, fault.problem, fault.fix, fault.rule), []).append(fault)
    lines: list[str] = []
    for first, *others in alike.values():
        if len(others) + 1 < _MANY:
            lines += map(str, (first, *others))
            continue
        places = list(dict.fromkeys(_place(other, first) for other in others))
        shown = "; ".join([*places[:_PLACES], *(["…"] if len(places) > _PLACES else [])])
        lines.append(f"{first} ({len(others) + 1} times: also {shown})")
    return lines


def _place(fault: Fault, first: Fault) -> str:
    """In what a fault differs from one that says the same."""
    if fault.key != first.key:
        return fault.key
    return f"line {fault.line}" if fault.line != first.line else _short(fault.value)


class SourceError(UserError):
    """A checkpoint cannot be fetched as asked."""


class CheckpointError(UserError):
    """The files of a model are damaged, or not of the layout that they claim."""


class GateFailed(PipelineError):
    """The quantized model is further from the original than the recipe allows."""

    exit_code: ClassVar[int] = 3


class SloMissed(PipelineError):
    """The forecast of a deployment misses the SLO of its recipe."""

    exit_code: ClassVar[int] = 4


class StoreError(PipelineError):
    """The store, or an artifact in it, cannot be read or written."""


class DamagedArtifact(StoreError):
    """Files of an artifact or a package are not those that were published; making it again would help."""

    exit_code: ClassVar[int] = 2


class StageError(PipelineError):
    """A stage ended without the files that it promised, or with wrong ones."""


class ServerError(PipelineError):
    """Triton or the gateway did not start, is not healthy, or died."""
