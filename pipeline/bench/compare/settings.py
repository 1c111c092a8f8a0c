"""Settings of `pipeline compare`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.bench.settings import LoadSettings, folder_conflicts, read_gpu, read_slo_target
from pipeline.settings import Option

# Fields that two stored runs may be compared with; all others say how something is measured or asked.
OF_FILES = frozenset({"threshold", "max_regression", "output", "page"})
_OF_ANSWERS = ("judge", "min_passed", "min_equal", "min_similar", "max_perplexity_increase", "max_lost")
_SHARE = Option(metavar="SHARE")


class CompareSettings(LoadSettings):
    """How two deployments are compared."""

    rounds: Annotated[int, Option(metavar="N")] = Field(
        default=6,
        ge=0,
        le=400,
        description="Loads on A and B each, in turns: A B B A. With 0 only answers are compared.",
    )
    threshold: Annotated[float, _SHARE] = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Difference of speed that you want to see; where the rounds cannot show it, the number of rounds "
        "that can is printed.",
    )
    questions: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Golden questions, as JSON lines; by default those that the package of B carries, or else that of "
        "A.",
    )
    skip_golden: bool = Field(default=False, description="Ask no golden questions.")
    judge: Annotated[str | None, Option(metavar="URL")] = Field(
        default=None, description="Have a model judge the answers: any server of OpenAI's API."
    )
    judge_model: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="Model of the judge."
    )
    judge_key_env: Annotated[str, Option(metavar="NAME")] = Field(
        default="JUDGE_API_KEY", description="Environment variable that holds the API key of the judge."
    )
    max_regression: Annotated[float | None, _SHARE] = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: how much worse a figure of speed may be than that of A, noise left out.",
    )
    min_passed: Annotated[float | None, _SHARE] = Field(
        default=None, gt=0, le=1, description="Budget: share of the questions that B must answer right."
    )
    min_equal: Annotated[float | None, _SHARE] = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions that B must answer as A does, word for word.",
    )
    min_similar: Annotated[float | None, _SHARE] = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions whose answers must be similar.",
    )
    max_perplexity_increase: Annotated[float | None, _SHARE] = Field(
        default=None,
        ge=0,
        description="Budget: how much more perplexed B may be by the answers of A than A is.",
    )
    max_lost: Annotated[float | None, _SHARE] = Field(
        default=None,
        ge=0,
        le=1,
        description="Budget: share of the questions where the judge may prefer A.",
    )
    by_turns: bool = Field(
        default=False, description="Start packages anew for each part of the rounds, though two fit."
    )
    way: Literal["gateway", "triton"] = Field(
        default="triton",
        description="Load the gateways, or Triton itself. A gateway's response cache is then part of the figures.",
    )
    api_key: Annotated[str | None, Option(envvar="PIPELINE_API_KEY", metavar="KEY")] = Field(
        default=None,
        repr=False,
        description="Key of the gateways. In the environment it is not seen by others on this machine.",
    )
    slo: Annotated[tuple[tuple[str, float], ...], Option(parse=read_slo_target, metavar="KEY=MS")] = Field(
        default=(),
        description="A target for goodput, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
    )
    gpus: Annotated[tuple[int, ...], Option(parse=read_gpu, separator=",", metavar="0,1,…")] = Field(
        default=(), description="GPUs that may be used; by default all that are needed."
    )
    store: Annotated[Path | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Where artifacts lie; by default $PIPELINE_STORE, or ~/.cache/pipeline/store.",
    )
    output: Annotated[Path | None, Option(metavar="FILE.json")] = Field(
        default=None, description="Write the result as JSON."
    )
    page: Annotated[Path | None, Option(metavar="FILE.html")] = Field(
        default=None,
        description="Write the result as one HTML page, with the answers that differ side by side.",
    )

    @classmethod
    def conflicts(cls, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Options that exclude or need each other."""
        yield from super().conflicts(given)
        if "questions" in given and "skip_golden" in given:
            yield "", "--questions and --skip-golden exclude each other"
        if ("judge" in given) != ("judge_model" in given):
            yield "", "--judge and --judge-model go together"
        if not given.get("judge", "http://").startswith(("http://", "https://")):
            yield "judge", "must be http://host:port, or https://…"
        if "skip_golden" in given:
            for name in (name for name in _OF_ANSWERS if name in given):
                yield name, "goes with golden questions"
        if "max_lost" in given and "judge" not in given:
            yield "max_lost", "goes with --judge"
        rounds = str(given.get("rounds", 6))
        if rounds == "0" and "skip_golden" in given:
            yield "rounds", "leaves nothing to compare"
        if rounds == "0" and "max_regression" in given:
            yield "max_regression", "needs rounds"
        if rounds in ("1", "2"):
            yield "rounds", "must be 0, or at least 3: fewer show nothing"
        if rounds in ("1", "2", "3", "4") and "max_regression" in given:
            yield "max_regression", "needs --rounds 5 or more"
        yield from folder_conflicts(given, "output", "page")
