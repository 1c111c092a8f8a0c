"""Settings of `pipeline compare`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import DirectoryPath, Field

from pipeline.bench.load_settings import LoadSettings
from pipeline.bench.settings import output_faults, read_slo_target
from pipeline.errors import Fault
from pipeline.settings import Option, Settings

# What two stored runs may be compared with; all else says how something is measured or asked.
_OF_FILES = frozenset({"threshold", "max_regression", "max_length_change", "max_more_failed"})
_OF_ANSWERS = ("judge", "min_passed", "min_equal", "min_similar", "max_perplexity_increase", "max_lost")

_LEAST_DECIDING = 5  # rounds that a budget of speed needs

Kind = Literal["file", "package", "deployment", "url"]


class CompareCriteria(Settings):
    """Rounds and questions of a comparison, and how much worse B may be."""

    rounds: int = Field(
        default=6,
        ge=0,
        le=400,
        description="Loads on A and B each, in turns: A B B A. With 0 only answers are compared.",
    )
    most_rounds: int | None = Field(
        default=None,
        le=400,
        description="While a budget is neither kept nor over, the rounds are doubled, up to this number.",
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
        description="Budget: how much worse than that of A a figure of speed may be. Kept where the interval of every "
        "figure excludes more.",
    )
    max_length_change: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: how much longer or shorter B's answers may be on average.",
    )
    max_more_failed: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: by which share of the requests B may fail more often than A.",
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
        description="Budget: relative increase of the perplexity of A's answers under B.",
    )
    max_lost: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions where the judge may prefer A.",
    )
    by_turns: bool = Field(
        default=False, description="Serve packages by turns, even if both fit into memory."
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
        if 0 < self.rounds < 3:
            yield Fault("must be 0, or at least 3: fewer show nothing", key="rounds", value=self.rounds)
        for name in ("max_regression", "max_length_change", "max_more_failed"):
            if getattr(self, name) is not None and self.rounds < _LEAST_DECIDING:
                yield Fault(f"needs rounds: {_LEAST_DECIDING} or more", key=name)
        if self.most_rounds is not None and not 0 < self.rounds <= self.most_rounds:
            yield Fault("must be as many as rounds, or more", key="most_rounds", value=self.most_rounds)

    @property
    def looks(self) -> int:
        """Times that the figures are looked at, if no budget is decided before."""
        looks, rounds = 1, self.rounds
        while self.most_rounds is not None and 0 < rounds < self.most_rounds:
            looks, rounds = looks + 1, 2 * rounds
        return looks


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
    tokenizer: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="With addresses: the tokenizer.json and chat template of the models, for prompts of a length.",
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
    """Tell by its form what A or B is: an address, a package's folder, a file of JSON, or the name of a deployment."""
    if name.startswith(("http://", "https://")):
        return "url"
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
    if "url" in kinds:
        if settings.tokenizer is None and settings.load.file is None:
            fix = "or give --load prompts=FILE"
            yield Fault("is needed for prompts of a length", key="--tokenizer", fix=fix)
        if not settings.criteria.skip_golden and (
            settings.criteria.questions or not settings.criteria.rounds
        ):
            yield Fault("are asked of Triton, and an address is that of an OpenAI API", key="questions")
    elif settings.tokenizer is not None:
        yield Fault("goes with addresses only: a package has its own", key="--tokenizer")
    if len(set(kinds)) == 2 and "file" in kinds:
        fix = "compare two files, or two of deployments and packages"
        yield Fault("a stored run cannot be compared with what runs", fix=fix)
    if kinds == ["file", "file"]:
        problem = "says how something is measured or asked, and two stored runs have been"
        for name in sorted(settings.model_fields_set - {"criteria", "output"}):
            yield Fault(problem, key=f"--{name}")
        for name in sorted(settings.criteria.model_fields_set - _OF_FILES):
            yield Fault(problem, where="--criteria", key=name)
