"""What text and time are taken to be: encodings and locale, and the clock; and of which batch system this is a job."""

from __future__ import annotations

import locale
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_JOBS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}


@dataclass(frozen=True, slots=True)
class Text:
    """How this process reads and writes text."""

    encoding: str  # of files, unless they say otherwise
    output: str  # of standard output
    file_names: str
    language: str  # LC_ALL, LC_CTYPE or LANG, whichever holds; "" for none

    @property
    def is_utf8(self) -> bool:
        """Whether all text of a model can be printed and written."""
        names = (self.encoding, self.output, self.file_names)
        return all(name.lower().replace("-", "").replace("_", "") == "utf8" for name in names)


def read_text(environment: Mapping[str, str] = os.environ) -> Text:
    """That of this process."""
    language = next(
        (value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), ""
    )
    output = getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)
    return Text(locale.getpreferredencoding(False), output, sys.getfilesystemencoding(), language)


def now() -> str:
    """The time as this machine has it, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def batch_system(environment: Mapping[str, str] = os.environ) -> str | None:
    """Within a job of which this runs, by the variable that it sets; None: of none."""
    return next((name for variable, name in _JOBS.items() if environment.get(variable)), None)
