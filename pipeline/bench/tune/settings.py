"""Settings of `pipeline tune`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field

from pipeline.bench.settings import LoadSettings, folder_faults, read_gpu
from pipeline.errors import Fault
from pipeline.settings import Option

Objective = Literal["goodput", "throughput", "latency"]

MAX_LENGTH = 64  # of drafts, by the recipe's schema


def read_lengths(text: str) -> tuple[int, ...]:
    """Read `0-8`, `0,2,4` or both mixed.

    Raises:
        ValueError: It is neither.

    >>> read_lengths("0,2-4")
    (0, 2, 3, 4)
    """
    lengths: set[int] = set()
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ValueError(f"{text!r} is no list of lengths: write 0-8 or 0,2,4")
        # One more than there may be, so that `draft_lengths` refuses the lengths out of bounds by name.
        lengths |= set(range(int(low), min(int(high or low), max(int(low), MAX_LENGTH + 1)) + 1))
    return tuple(sorted(lengths))


class TuneSettings(LoadSettings):
    """How values of a recipe are searched."""

    objectives: Annotated[tuple[Objective, ...], Option("--objective")] = Field(
        default=(),
        description="Figure to improve within the recipe's SLO: goodput (requests a second that each meet it), "
        "throughput (tokens a second) or latency (of whole requests, p95, at the largest load). Given twice or more, "
        "trials are spread over the front of them, and the first decides.  [default: goodput; throughput without an "
        "SLO]",
    )
    trials: Annotated[int, Option(metavar="N")] = Field(
        default=12,
        ge=1,
        le=1000,
        description="Trials that are measured. An earlier search goes on to so many.",
    )
    keys: Annotated[tuple[str, ...], Option(metavar="KEY[,KEY…]")] = Field(
        default=(), description="Try these only; by default all that the recipe's runtime reads."
    )
    fix: Annotated[tuple[str, ...], Option(metavar="KEY[=VALUE]")] = Field(
        default=(), description="Leave this one as the recipe has it, or at a value. May be repeated."
    )
    draft_lengths: Annotated[Sequence[int], Option(parse=read_lengths, metavar="LOW-HIGH")] = Field(
        default=(),
        description="Try the number of drafted tokens alone, such as 0-8 or 0,2,4 (0: no draft), and recommend one or "
        "none.",
    )
    rounds: Annotated[int, Option(metavar="N")] = Field(
        default=3,
        ge=0,
        le=100,
        description="Pairs of rounds at the end, in which the best trial and the recipe as it is are measured in "
        "turns; 0: none, and nothing is recommended.",
    )
    restart: bool = Field(
        default=False, description="Forget the trials of this search; by default it goes on where it was."
    )
    executor: Literal["auto", "native", "docker", "print"] = Field(
        default="auto",
        description="Executor that builds engines, as of pipeline build. print: write the trials as a script for "
        "another machine.",
    )
    adopt: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None, description="Take in the figures that such a script left."
    )
    output: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Where the tuned recipe goes; by default NAME-tuned.yaml beside the recipe.",
    )
    force: bool = Field(default=False, description="Overwrite that file.")
    report: Annotated[Path | None, Option(metavar="FILE.json")] = Field(
        default=None, description="Write all trials as JSON there, too."
    )
    page: Annotated[Path | None, Option(metavar="FILE.html")] = Field(
        default=None, description="Write the page with the front there, too."
    )
    gpus: Annotated[tuple[int, ...], Option(parse=read_gpu, separator=",", metavar="0,1,…")] = Field(
        default=(), description="GPUs that may be used; by default all that are needed."
    )

    @property
    def elsewhere(self) -> bool:
        """Whether another machine measures."""
        return self.executor == "print" or self.adopt is not None

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that exclude each other."""
        yield from super().conflicts()
        for name, values in (("--keys", self.keys), ("--fix", self.fix)):
            if values and self.draft_lengths:
                yield Fault("goes without --draft-lengths, which tries one key alone", key=name)
        if self.adopt is not None and self.restart:
            yield Fault("forgets the trials that --adopt has figures of", key="--restart")
        yield from folder_faults(report=self.report, page=self.page)
