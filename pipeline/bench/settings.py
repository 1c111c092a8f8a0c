"""Settings of a load, as `bench`, `compare` and `tune` take them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import DirectoryPath, Field

from pipeline.bench.lengths import Lengths
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.settings import Option, Settings

_SECONDS, _WARM_UP_S, _CONCURRENCY = 30.0, 3.0, 8


@dataclass(frozen=True, slots=True)
class Load:
    """One level of load.

    A closed loop (`concurrency`) keeps that many conversations under way; it slows down with the server, and so never
    shows what a queue does to people who come when they like. An open loop (`rate`, `trace`) sends at times that are
    fixed beforehand.

    Attributes:
        kind: `concurrency`: conversations at a time; `rate`: conversations that begin per second, at random times
            (Poisson); `trace`: at the times of the workload, `value` times as fast.
        value: See `kind`.
    """

    kind: Literal["concurrency", "rate", "trace"]
    value: float

    @property
    def open(self) -> bool:
        """Whether requests are sent without waiting for the answers to others."""
        return self.kind != "concurrency"

    @property
    def concurrency(self) -> int:
        """Conversations at a time in a closed loop."""
        return round(self.value)

    def __str__(self) -> str:
        match self.kind:
            case "concurrency":
                return f"{self.value:g} at a time"
            case "rate":
                return f"{self.value:g} a second"
            case _:
                return "a trace" if self.value == 1 else f"a trace, {self.value:g} times as fast"


def _whole_number(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("must be a whole number of at least 1, or several with commas between them")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError("must be a number above 0, or several with commas between them")
    return value


def folder_faults(**files: Path | None) -> Iterator[Fault]:
    """Yield a fault for each option whose file is in a folder that cannot be written to."""
    for name, file in files.items():
        if file is not None and not os.access(file.absolute().parent, os.W_OK):
            yield Fault("its folder cannot be written to", key=f"--{name}", value=str(file))


class LoadSettings(Settings):
    """Load that is put on a deployment."""

    concurrency: Annotated[
        tuple[int, ...], Option(parse=_whole_number, separator=",", metavar="N[,N…]", default="8")
    ] = Field(
        default=(),
        description="Closed loop: conversations at a time. Several values are measured one after the other.",
    )
    rate: Annotated[tuple[float, ...], Option(parse=_rate, separator=",", metavar="R[,R…]")] = Field(
        default=(),
        description="Open loop: conversations that begin per second, at random times (Poisson), answered or not.",
    )
    trace: Annotated[Path | None, Option(metavar="FILE")] = Field(
        default=None,
        description="Open loop: at the times that the file's lines have as `timestamp`, in milliseconds.",
    )
    speed: Annotated[float | None, Option(metavar="X", default="1")] = Field(
        default=None, gt=0, description="With --trace: how many times as fast."
    )
    prompts: Annotated[str | None, Option(metavar="FILE|calibration")] = Field(
        default=None,
        description="Ask the questions of a file, or the held-out questions of the recipe's calibration set, again and "
        "again.",
    )
    prompt_tokens: Annotated[
        Lengths | None, Option(parse=Lengths.parse, metavar="LENGTH", default="512, or what fits")
    ] = Field(
        default=None, description="Tokens of each question of words at random: N, MEAN~DEVIATION or LOW-HIGH."
    )
    output_tokens: Annotated[
        Lengths | None,
        Option(
            parse=Lengths.parse,
            metavar="LENGTH",
            default="128 for words at random; for a file as many as the model likes",
        ),
    ] = Field(default=None, description="Exact number of tokens of each answer.")
    prefix_tokens: Annotated[int, Option(metavar="N")] = Field(
        default=0, ge=0, description="Tokens of a system prompt that conversations of words at random share."
    )
    prefixes: Annotated[int, Option(metavar="N")] = Field(
        default=1, ge=1, description="Number of different shared system prompts."
    )
    turns: Annotated[int, Option(metavar="N")] = Field(
        default=1,
        ge=1,
        description="Questions of a conversation of words at random, each with everything said before.",
    )
    think_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0,
        ge=0,
        description="Seconds between an answer and the next question of its conversation.",
    )
    cancelled: Annotated[float, Option("--cancel", metavar="SHARE")] = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of conversations whose client leaves within an answer, 0 to 1.",
    )
    raw: bool = Field(
        default=False, description="Send words at random as they are, without the chat template."
    )
    temperature: Annotated[float, Option(metavar="T")] = Field(
        default=0.0, ge=0, description="Temperature of all requests; 0 takes the likeliest token."
    )
    seconds: Annotated[
        float | None,
        Option("--duration", metavar="S", default="30, without a bound with --requests or --trace"),
    ] = Field(default=None, gt=0, description="Seconds in which requests begin, for each load.")
    requests: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, ge=1, description="Requests of each load, if that is sooner."
    )
    warm_up_s: Annotated[float | None, Option("--warmup", metavar="S", default="3, or 0 with --trace")] = (
        Field(default=None, ge=0, description="Seconds at the start of each load that are not counted.")
    )
    grace_s: Annotated[float, Option("--grace", metavar="S")] = Field(
        default=60.0,
        ge=0,
        description="With --duration: seconds to wait for answers after it; requests without an end by then have "
        "failed.",
    )
    timeout_s: Annotated[float, Option("--timeout", metavar="S")] = Field(
        default=600.0, gt=0, description="Seconds for each answer; then it has failed."
    )
    seed: Annotated[int, Option(metavar="N")] = Field(
        default=0, ge=0, description="Seed of prompts and arrival times."
    )

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads, in the order in which they are measured."""
        if self.trace is not None:
            return (Load("trace", self.speed or 1.0),)
        if self.rate:
            return tuple(Load("rate", value) for value in self.rate)
        return tuple(Load("concurrency", value) for value in self.concurrency or (_CONCURRENCY,))

    def at(self, *loads: Load, **changes: Any) -> Self:
        """Return the same settings with other loads, all of the kind of the first.

        Args:
            *loads: One or more.
            **changes: Fields to replace as well.
        """
        kind = loads[0].kind
        levels: dict[str, Any] = {"concurrency": (), "rate": ()}
        if kind == "trace":
            levels["speed"] = loads[0].value
        else:
            levels[kind] = tuple(round(one.value) if kind == "concurrency" else one.value for one in loads)
        return self.model_copy(update=levels | changes)

    @property
    def file(self) -> Path | Literal["calibration"] | None:
        """File of prompts, or "calibration" for the recipe's calibration set; None for words at random."""
        if self.trace is not None:
            return self.trace
        return (
            "calibration" if self.prompts == "calibration" else Path(self.prompts) if self.prompts else None
        )

    @property
    def duration_s(self) -> float | None:
        """Seconds in which requests of a load begin; None for no bound."""
        bounded = self.seconds or self.requests or self.trace
        return self.seconds if bounded else _SECONDS

    @property
    def warm_up(self) -> float:
        """Seconds at the start of each load that are not counted."""
        usual = 0.0 if self.trace is not None else _WARM_UP_S
        return usual if self.warm_up_s is None else self.warm_up_s

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that exclude or need each other, and files that are missing or wrong."""
        faults = [*super().conflicts(), *self._load_conflicts()]
        yield from faults
        if faults:
            yield from self._file_faults()

    def _load_conflicts(self) -> Iterator[Fault]:
        kinds = [f"--{name}" for name in ("concurrency", "rate", "trace") if getattr(self, name)]
        if len(kinds) > 1:
            yield Fault(f"{' and '.join(kinds)} exclude each other: one kind of load a run")
        if self.speed is not None and self.trace is None:
            yield Fault("goes with --trace only", key="--speed")
        if self.trace is not None and self.prompts is not None:
            yield Fault("--trace and --prompts exclude each other: a trace holds its prompts")
        if self.file is not None:
            for name, value in (
                ("--prompt-tokens", self.prompt_tokens),
                ("--prefix-tokens", self.prefix_tokens),
                ("--raw", self.raw),
                ("--turns", self.turns > 1),
            ):
                if value:
                    yield Fault("goes with words at random only", key=name)
        if self.raw and self.turns > 1:
            yield Fault("a conversation needs the chat template that --raw leaves out", key="--turns")
        if self.prefixes > 1 and not self.prefix_tokens:
            yield Fault("goes with --prefix-tokens", key="--prefixes")
        for name, file in (("--trace", self.trace), ("--prompts", self.prompts)):
            if file is not None and file != "calibration" and not os.path.isfile(file):
                yield Fault("there is no such file", key=name, value=str(file))

    def _file_faults(self) -> Iterator[Fault]:
        """Yield what is wrong with the file of prompts. Without other faults, its reader reports that."""
        from pipeline.bench.prompts import PromptFile

        if not isinstance(self.file, Path) or not self.file.is_file():
            return
        try:
            PromptFile.read(self.file)
        except InvalidInput as error:
            yield from (replace(fault, where=error.subject) for fault in error.faults)
        except UserError as error:
            yield Fault(str(error))


def option_name(model: type[Settings], field: str) -> str:
    """Option of a field of a settings model."""
    metadata = model.model_fields[field].metadata
    marker = next((part for part in metadata if isinstance(part, Option)), Option())
    return marker.name or f"--{field.replace('_', '-')}"


def load_argv(settings: LoadSettings) -> Iterator[str]:
    """Yield the arguments of `pipeline bench` that give a load; defaults are left out."""
    for name, field in LoadSettings.model_fields.items():
        value = getattr(settings, name)
        if value == field.default:
            continue
        yield option_name(LoadSettings, name)
        if isinstance(value, tuple):
            yield ",".join(f"{one:g}" for one in value)
        elif value is not True:
            yield f"{value:g}" if isinstance(value, float) else str(value)


def read_slo_target(text: str) -> tuple[str, float]:
    """Read a target such as `ttft_p95_ms=500`.

    Raises:
        ValueError: It is none; the text says what is expected.
    """
    from pipeline.recipe import Slo

    key, _, value = text.partition("=")
    try:
        target = float(value)
    except ValueError:
        target = 0.0
    if key not in Slo.model_fields or not 0 < target < math.inf:
        raise ValueError(f"must be {' or '.join(Slo.model_fields)}, =, and milliseconds")
    return key, target


def read_gpu(text: str) -> int:
    """Read the number of a GPU in a list with commas."""
    if not text.strip().isdecimal():
        raise ValueError("write numbers of GPUs with commas between them, like 0,1")
    return int(text)


class SubjectSettings(Settings):
    """Server that is measured: a deployment of this machine, or an address."""

    url: Annotated[str | None, Option(metavar="URL")] = Field(
        default=None,
        description="Ask this address instead of a deployment of this machine: http://host:port of an OpenAI API, or "
        "host:port of Triton's gRPC.",
    )
    model: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None, description="With --url: the model to ask; of Triton by default tensorrt_llm_bls."
    )
    tokenizer: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="With --url: the model's tokenizer.json and chat template, for prompts of a length and chats of "
        "Triton.",
    )
    way: Literal["gateway", "triton"] | None = Field(
        default=None,
        description="Through the deployment's gateway, or straight to Triton; by default through its gateway, if it "
        "has one.",
    )
    api_key: Annotated[str | None, Option(envvar="PIPELINE_API_KEY", metavar="KEY")] = Field(
        default=None,
        repr=False,
        description="Key of the gateway. In the environment it is not seen by others on this machine.",
    )
    slo: Annotated[tuple[tuple[str, float], ...], Option(parse=read_slo_target, metavar="KEY=MS")] = Field(
        default=(),
        description="A target, such as ttft_p95_ms=500, instead of the recipe's. May be repeated.",
    )
    wait_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0, ge=0, description="Seconds to wait for the deployment to be ready."
    )
    store: Annotated[Path | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Where artifacts lie; by default $PIPELINE_STORE, or ~/.cache/pipeline/store.",
    )

    @property
    def is_http(self) -> bool:
        """Whether `url` is the address of an OpenAI API rather than that of Triton's gRPC."""
        return self.url is not None and self.url.startswith(("http://", "https://"))

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that only go with an address, or only with a deployment."""
        yield from super().conflicts()
        if self.url is None:
            for name, value in (("--model", self.model), ("--tokenizer", self.tokenizer)):
                if value is not None:
                    yield Fault("goes with --url only", key=name)
            return
        if self.is_http and self.model is None:
            yield Fault("is needed with the address of an OpenAI API", key="--model")
        if not self.is_http and not re.fullmatch(r"[^/\s]+:\d+", self.url):
            yield Fault("must be http://host:port, or host:port of gRPC", key="--url", value=self.url)
        if self.way is not None:
            problem = "goes with the name of a deployment: an address says it by its form"
            yield Fault(problem, key="--way")


class BenchSettings(LoadSettings, SubjectSettings):
    """Settings of `pipeline bench`."""

    sweep: bool = Field(
        default=False, description="Double the load until the SLO breaks, then narrow down where."
    )
    most: Annotated[float | None, Option(metavar="N", default="1024")] = Field(
        default=None, gt=0, description="With --sweep: largest load that is tried."
    )
    max_failed: Annotated[float, Option(metavar="SHARE")] = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of requests that may fail before the exit code is 3.",
    )
    output: Annotated[Path | None, Option(metavar="FILE.json")] = Field(
        default=None, description="Write the result as JSON."
    )
    page: Annotated[Path | None, Option(metavar="FILE.html")] = Field(
        default=None, description="Write the result as one HTML page."
    )

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads; a sweep begins with one conversation at a time unless a load is given."""
        if self.sweep and not (self.concurrency or self.rate):
            return (Load("concurrency", 1),)
        return super().loads

    @property
    def sweep_to(self) -> float | None:
        """Largest load of a sweep; None to measure the given loads alone."""
        return (self.most or 1024) if self.sweep else None

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that do not go together."""
        yield from super().conflicts()
        if self.url is not None and self.tokenizer is None and self.file is None:
            yield Fault("is needed for prompts of a length", key="--tokenizer", fix="or give --prompts")
        if self.most is not None and not self.sweep:
            yield Fault("goes with --sweep only", key="--most")
        if self.sweep and self.trace is not None:
            yield Fault("a trace has one load", key="--sweep")
        for name, values in (("--concurrency", self.concurrency), ("--rate", self.rate)):
            if self.sweep and len(values) > 1:
                yield Fault("begins with one load and finds the others", key=name, fix="name one, or none")
        yield from folder_faults(output=self.output, page=self.page)
