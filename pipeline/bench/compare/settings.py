"""Settings of `pipeline compare`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.settings import output_faults, read_slo_target
from pipeline.errors import Fault
from pipeline.settings import Option, Settings

# What two stored runs may be compared with; all else says how something is measured or asked.
_OF_FILES = frozenset({"threshold", "max_regression"})
_OF_ANSWERS = ("judge", "min_passed", "min_equal", "min_similar", "max_perplexity_increase", "max_lost")

Kind = Literal["file", "package", "deployment"]


class CompareCriteria(Settings):
    """Rounds and questions of a comparison, and how much worse B may be."""

    rounds: int = Field(
        default=6,
        ge=0,
        le=400,
        description="Loads on A and B each, in turns: A B B A. With 0 only answers are compared.",
    )
    threshold: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Difference of speed that you want to see; where the rounds cannot show it, the number of rounds "
        "that can is printed.",
    )
    questions: Path | None = Field(
        default=None,
        description="Golden questions, as JSON lines; by default those that the package of B carries, or else that of "
        "A.",
    )
    skip_golden: bool = Field(default=False, description="Ask no golden questions.")
    judge: str | None = Field(
        default=None, description="Have a model judge the answers: any server of OpenAI's API."
    )
    judge_model: str | None = Field(default=None, description="Model of the judge.")
    judge_key_env: str = Field(
        default="JUDGE_API_KEY", description="Environment variable that holds the API key of the judge."
    )
    max_regression: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: how much worse a figure of speed may be than that of A, noise left out.",
    )
    min_passed: float | None = Field(
        default=None, gt=0, le=1, description="Budget: share of the questions that B must answer right."
    )
    min_equal: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions that B must answer as A does, word for word.",
    )
    min_similar: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions whose answers must be similar.",
    )
    max_perplexity_increase: float | None = Field(
        default=None,
        ge=0,
        description="Budget: how much more perplexed B may be by the answers of A than A is.",
    )
    max_lost: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions where the judge may prefer A.",
    )
    by_turns: bool = Field(
        default=False, description="Start packages anew for each part of the rounds, though two fit."
    )

    def conflicts(self) -> Iterator[Fault]:
        """Yield keys that exclude or need each other."""
        if self.questions is not None and self.skip_golden:
            yield Fault("questions and skip_golden exclude each other")
        if (self.judge is None) != (self.judge_model is None):
            yield Fault("judge and judge_model go together")
        if self.judge is not None and not self.judge.startswith(("http://", "https://")):
            yield Fault("must be http://host:port, or https://…", key="judge", value=self.judge)
        if self.skip_golden:
            for name in _OF_ANSWERS:
                if getattr(self, name) is not None:
                    yield Fault("goes with golden questions", key=name)
        if self.max_lost is not None and self.judge is None:
            yield Fault("goes with judge", key="max_lost")
        if self.rounds == 0 and self.skip_golden:
            yield Fault("leaves nothing to compare", key="rounds", value=0)
        if self.rounds == 0 and self.max_regression is not None:
            yield Fault("needs rounds", key="max_regression")
        if 0 < self.rounds < 3:
            yield Fault("must be 0, or at least 3: fewer show nothing", key="rounds", value=self.rounds)
        if 0 < self.rounds < 5 and self.max_regression is not None:
            yield Fault("needs rounds: 5 or more", key="max_regression")


class CompareSettings(Settings):
    """How two deployments are compared."""

    load: LoadSettings = Field(
        default=LoadSettings(), description="Load to put on both: a YAML file, or one key of it."
    )
    criteria: CompareCriteria = Field(
        default=CompareCriteria(),
        description="Rounds, questions and budgets: a YAML file, or one key of it.",
    )
    way: Literal["gateway", "triton"] = Field(
        default="triton",
        description="Load the gateways, or Triton itself. A gateway's response cache is then part of the figures.",
    )
    slo: Annotated[tuple[tuple[str, float], ...], Option(parse=read_slo_target, metavar="KEY=MS")] = Field(
        default=(),
        description="A target for goodput, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
    )
    output: Annotated[tuple[Path, ...], Option(metavar="FILE.json|FILE.html")] = Field(
        default=(),
        description="Write the result as JSON, or as one HTML page with the answers that differ side by side. May be "
        "repeated.",
    )

    def conflicts(self) -> Iterator[Fault]:
        """Yield files that cannot be written."""
        yield from output_faults(self.output, ".json", ".html")


def source_kind(name: str) -> Kind:
    """Tell by its form what A or B is: a package's folder, a file of JSON, or else the name of a deployment."""
    if Path(name).is_dir():
        return "package"
    return "file" if name.endswith(".json") else "deployment"


def source_faults(names: Sequence[str], settings: CompareSettings) -> Iterator[Fault]:
    """Yield why A and B, as on the command line, cannot be compared with these settings."""
    kinds = [source_kind(name) for name in names]
    for side, name, kind in zip("AB", names, kinds, strict=True):
        if kind == "file" and not os.path.isfile(name):
            yield Fault("there is no such file", key=side, value=name)
        if kind == "package" and not os.path.isfile(os.path.join(name, "deployment.json")):
            fix = "name the folder that `pipeline build` made"
            yield Fault("has no deployment.json", key=side, value=name, fix=fix)
    if len(set(kinds)) == 2 and "file" in kinds:
        fix = "compare two files, or two of deployments and packages"
        yield Fault("a stored run cannot be compared with what runs", fix=fix)
    if kinds == ["file", "file"]:
        problem = "says how something is measured or asked, and two stored runs have been"
        for name in sorted(settings.model_fields_set - {"criteria", "output"}):
            yield Fault(problem, key=f"--{name}")
        for name in sorted(settings.criteria.model_fields_set - _OF_FILES):
            yield Fault(problem, where="--criteria", key=name)
