"""Settings of a load, as `bench`, `compare` and `tune` take them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field

from pipeline.bench.lengths import Lengths
from pipeline.document_faults import refusal
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.settings import Settings

_DURATION_S, _WARMUP_S, _CONCURRENCY = 30.0, 3.0, 8

TokensBy = Literal["server", "tokenizer", "chunks"]  # who counted the tokens of an answer


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


def _several(value: Any) -> Any:
    """One value where a list is meant; a text with commas is a list, too."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list | tuple) else (value,)


Several = BeforeValidator(_several)


def _lengths(value: Any) -> Any:
    if value is None or isinstance(value, Lengths):
        return value
    try:
        return Lengths.parse(str(value))
    except ValueError as error:
        raise refusal(str(error)) from None


_Lengths = Annotated[Lengths | None, BeforeValidator(_lengths)]


class LoadSettings(Settings):
    """Load that is put on a deployment."""

    alternatives: ClassVar[tuple[str, ...]] = ("concurrency", "rate", "trace")

    concurrency: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Several] = Field(
        default=(),
        description="Closed loop: conversations at a time. Several values are measured one after the other. 8 if "
        "neither `rate` nor `trace` is given.",
        examples=[[1, 8, 32]],
    )
    rate: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Several] = Field(
        default=(),
        description="Open loop: conversations that begin per second, at random times (Poisson), answered or not.",
        examples=[[2, 4.5]],
    )
    trace: Path | None = Field(
        default=None,
        description="Open loop: at the times of the file's lines (`timestamp`, in milliseconds).",
    )
    speed: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="How many times as fast the trace is; 1 if not given.",
    )
    prompts: Path | Literal["calibration"] | None = Field(
        default=None,
        description="Ask the questions of a file, or the held-out questions of the recipe's calibration set "
        "(`calibration`), again and again. Words at random if not given.",
    )
    prompt_tokens: _Lengths = Field(
        default=None,
        description="Tokens of each question of words at random: N, MEAN~DEVIATION or LOW-HIGH. 512, or what fits, if "
        "not given.",
    )
    output_tokens: _Lengths = Field(
        default=None,
        description="Exact number of tokens of each answer, in the same form. If not given, 128 for words at random; "
        "for a file as many as the model likes.",
    )
    prefix_tokens: int = Field(
        default=0, ge=0, description="Tokens of a system prompt that conversations of words at random share."
    )
    prefixes: int = Field(default=1, ge=1, description="Number of different shared system prompts.")
    turns: int = Field(
        default=1,
        ge=1,
        description="Questions of a conversation of words at random, each with everything said before.",
    )
    think_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds between an answer and the next question of its conversation.",
    )
    cancel: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of conversations whose client leaves within an answer, 0 to 1.",
    )
    raw: bool = Field(
        default=False, description="Send words at random as they are, without the chat template."
    )
    temperature: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Temperature of all requests; 0 takes the likeliest token.",
    )
    duration_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Seconds in which requests begin, for each load. If not given, 30; without a bound beside "
        "`requests` or `trace`.",
    )
    requests: int | None = Field(
        default=None, ge=1, description="Requests of each load, if they end before duration_s."
    )
    warmup_s: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        description="Seconds at the start of each load that are not counted. If not given, 3, or 0 for a trace.",
    )
    grace_s: float = Field(
        default=60.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds to wait for answers after `duration_s`; requests without an end by then have failed.",
    )
    timeout_s: float = Field(
        default=600.0, gt=0, allow_inf_nan=False, description="Seconds for each answer; then it has failed."
    )
    seed: int = Field(default=0, ge=0, description="Seed of prompts and arrival times.")

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads, in the order in which they are measured."""
        if self.trace is not None:
            return (Load("trace", self.speed or 1.0),)
        if self.rate:
            return tuple(Load("rate", value) for value in self.rate)
        return tuple(Load("concurrency", value) for value in self.concurrency or (_CONCURRENCY,))

    def at(self, *loads: Load, **changes: Any) -> Self:
        """Return the same settings with other loads, all of the kind of the first."""
        kind = loads[0].kind
        levels: dict[str, Any] = {"concurrency": (), "rate": ()}
        if kind == "trace":
            levels["speed"] = loads[0].value
        else:
            levels[kind] = tuple(round(load.value) if kind == "concurrency" else load.value for load in loads)
        return self.model_copy(update=levels | changes)

    @property
    def file(self) -> Path | Literal["calibration"] | None:
        """File of prompts, or "calibration" for the recipe's calibration set; None for words at random."""
        if self.trace is not None:
            return self.trace
        return self.prompts

    @property
    def period_s(self) -> float | None:
        """Seconds in which requests of a load begin; None for no bound."""
        bounded = self.duration_s or self.requests or self.trace
        return self.duration_s if bounded else _DURATION_S

    @property
    def uncounted_s(self) -> float:
        """Seconds at the start of each load that are not counted."""
        usual = 0.0 if self.trace is not None else _WARMUP_S
        return usual if self.warmup_s is None else self.warmup_s

    def conflicts(self) -> Iterator[Fault]:
        """Yield keys that exclude or need each other, and files that are missing or wrong."""
        faults = list(self._load_conflicts())
        yield from faults
        if faults:
            yield from self._file_faults()

    def _load_conflicts(self) -> Iterator[Fault]:
        kinds = [name for name in self.alternatives if getattr(self, name)]
        if len(kinds) > 1:
            yield Fault(f"{' and '.join(kinds)} exclude each other: one kind of load a run")
        if self.speed is not None and self.trace is None:
            yield Fault("goes with trace only", key="speed")
        if self.trace is not None and self.prompts is not None:
            yield Fault("trace and prompts exclude each other: a trace holds its prompts")
        if self.file is not None:
            for name, value in (
                ("prompt_tokens", self.prompt_tokens),
                ("prefix_tokens", self.prefix_tokens),
                ("raw", self.raw),
                ("turns", self.turns > 1),
            ):
                if value:
                    yield Fault("goes with words at random only", key=name)
        if self.raw and self.turns > 1:
            yield Fault("a conversation needs the chat template that raw leaves out", key="turns")
        if self.prefixes > 1 and not self.prefix_tokens:
            yield Fault("goes with prefix_tokens", key="prefixes")
        for name, file in (("trace", self.trace), ("prompts", self.prompts)):
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


def section_argv(option: str, settings: Settings) -> Iterator[str]:
    """Yield the arguments of a command that give these settings by one option; defaults are left out."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default:
            yield from (option, f"{name}={_written(value)}")


def _written(value: Any) -> str:
    """A value of a load as it is given on a command line."""
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
