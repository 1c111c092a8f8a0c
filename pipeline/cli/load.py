"""What `bench` and `compare` put on a deployment, from a command line: the options of a load, and their faults."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from pipeline.errors import Fault, InvalidInput, UserError

if TYPE_CHECKING:
    from pipeline.bench.run import BenchOptions

Command = TypeVar("Command", bound=Callable[..., Any])
Value = TypeVar("Value")

_FAULTS = "pipeline.bench.faults"  # key of click's `Context.meta`
_SECONDS, _WARM_UP_S, _CONCURRENCY = 30.0, 3.0, 8


def checked(
    read: Callable[[str], Value],
) -> Callable[[click.Context, click.Parameter, str | None], Value | None]:
    """A callback that reads an option, and keeps what is wrong with it, so that all faults can be told at once."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> Value | None:
        if value is None:
            return None
        try:
            return read(value)
        except ValueError as error:
            faults = context.meta.setdefault(_FAULTS, [])
            faults.append(Fault(str(error), key=parameter.opts[0], value=value))
            return None

    return callback


def number(
    least: float, most: float = math.inf, *, whole: bool = False, above: bool = False
) -> Callable[[str], float]:
    """A reader of numbers from `least` (or above it) to `most`."""
    kind = "a whole number" if whole else "a number"
    wanted = f"{kind} {'above' if above else 'of at least'} {least:g}"
    wanted += f" and at most {most:g}" if most < math.inf else ""

    def read(text: str) -> float:
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            raise ValueError(f"must be {wanted}") from None
        if not (least < value if above else least <= value) or not value <= most or math.isinf(value):
            raise ValueError(f"must be {wanted}")
        return value

    return read


def _numbers(*, whole: bool) -> Callable[[str], tuple[float, ...]]:
    """A reader of one or more numbers above 0, with commas between them."""
    one = number(1, whole=True) if whole else number(0, above=True)
    return lambda text: tuple(one(part) for part in text.split(","))


def _lengths(text: str) -> Any:
    from pipeline.bench.workload import Lengths

    return Lengths.parse(text)


def _count(name: str, least: int, default: int, help_: str) -> Callable[[Any], Any]:
    read = checked(number(least, whole=True))
    return click.option(name, callback=read, default=str(default), show_default=True, metavar="N", help=help_)


def file_option(name: str, ending: str, help_: str) -> Callable[[Any], Any]:
    """An option that names a file to write; `load_faults` looks whether its folder can be written to."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option(name, type=kind, metavar=f"FILE.{ending}", help=help_)


_LOAD = (
    click.option(
        "--concurrency",
        callback=checked(_numbers(whole=True)),
        metavar="N[,N…]",
        help="Closed loop: so many conversations at a time. Several are measured one after the other.  [default: 8]",
    ),
    click.option(
        "--rate",
        callback=checked(_numbers(whole=False)),
        metavar="R[,R…]",
        help="Open loop: so many conversations begin a second, at random times (Poisson), answered or not.",
    ),
    click.option(
        "--trace",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Open loop: at the times that the file's lines have as `timestamp`, in milliseconds.",
    ),
    click.option(
        "--speed",
        callback=checked(number(0, above=True)),
        metavar="X",
        help="With --trace: so many times as fast.  [default: 1]",
    ),
    click.option(
        "--prompts",
        metavar="FILE|calibration",
        help="Ask what a file holds, or the held-out questions of the recipe's calibration set, again and again.",
    ),
    click.option(
        "--prompt-tokens",
        callback=checked(_lengths),
        metavar="LENGTH",
        help="Words at random, so many tokens a question: N, MEAN~DEVIATION or LOW-HIGH.  [default: 512, or what fits]",
    ),
    click.option(
        "--output-tokens",
        callback=checked(_lengths),
        metavar="LENGTH",
        help="Exactly so many tokens an answer.  [default: 128 for words at random; for a file as many as the model "
        "likes]",
    ),
    _count(
        "--prefix-tokens",
        0,
        0,
        "Words at random begin with a system prompt of so many tokens that others share.",
    ),
    _count("--prefixes", 1, 1, "Different ones of those."),
    _count(
        "--turns", 1, 1, "Questions of a conversation of words at random, each with all that was said before."
    ),
    click.option(
        "--think-s",
        callback=checked(number(0)),
        default="0",
        show_default=True,
        metavar="S",
        help="Seconds between an answer and the next question of its conversation.",
    ),
    click.option(
        "--cancel",
        callback=checked(number(0, 1)),
        default="0",
        show_default=True,
        metavar="SHARE",
        help="Share of conversations whose client leaves within an answer, 0 to 1.",
    ),
    click.option("--raw", is_flag=True, help="Send words at random as they are, without the chat template."),
    click.option(
        "--temperature",
        callback=checked(number(0)),
        default="0",
        show_default=True,
        metavar="T",
        help="Of all requests.",
    ),
    click.option(
        "--duration",
        callback=checked(number(0, above=True)),
        metavar="S",
        help="Seconds in which requests begin, for each load.  [default: 30, without a bound with --requests or "
        "--trace]",
    ),
    click.option(
        "--requests",
        callback=checked(number(1, whole=True)),
        metavar="N",
        help="Requests of each load, if that is sooner.",
    ),
    click.option(
        "--warmup",
        callback=checked(number(0)),
        metavar="S",
        help="Seconds at the start of each load that are not counted.  [default: 3, or 0 of a trace]",
    ),
    click.option(
        "--grace",
        callback=checked(number(0)),
        default="60",
        show_default=True,
        metavar="S",
        help="With --duration: wait so long for answers after it; what has no end by then has failed.",
    ),
    click.option(
        "--timeout",
        callback=checked(number(0, above=True)),
        default="600",
        show_default=True,
        metavar="S",
        help="For each answer; then it has failed.",
    ),
    _count("--seed", 0, 0, "The same seed makes the same prompts at the same times."),
)


def load_options(command: Command) -> Command:
    """Add the options that say what load is put on a deployment to a command."""
    for option in reversed(_LOAD):
        command = option(command)
    return command


def load_faults(context: click.Context, given: dict[str, Any]) -> list[Fault]:
    """Everything that is wrong with the options of `load_options`, those of files included.

    Args:
        context: Of the command, which has what is wrong with single values.
        given: The options as click gives them.
    """
    faults = [*context.meta.get(_FAULTS, ())]
    kinds = [f"--{one}" for one in ("concurrency", "rate", "trace") if given[one]]
    if len(kinds) > 1:
        faults.append(Fault(f"{' and '.join(kinds)} exclude each other: one kind of load a run"))
    if given["speed"] and not given["trace"]:
        faults.append(Fault("goes with --trace only", key="--speed"))
    if given["trace"] and given["prompts"]:
        faults.append(Fault("--trace and --prompts exclude each other: a trace holds its prompts"))
    if given["trace"] or given["prompts"]:
        words = ("prompt_tokens", "prefix_tokens", "raw") + (("turns",) if given["turns"] != 1 else ())
        faults += [
            Fault("goes with words at random only", key=f"--{one.replace('_', '-')}")
            for one in words
            if given[one]
        ]
    if given["raw"] and given["turns"] and given["turns"] > 1:
        faults.append(Fault("a conversation needs the chat template that --raw leaves out", key="--turns"))
    if given["prefixes"] and given["prefixes"] > 1 and not given["prefix_tokens"]:
        faults.append(Fault("goes with --prefix-tokens", key="--prefixes"))
    if given.get("url") and not given["tokenizer"] and not (given["trace"] or given["prompts"]):
        faults.append(Fault("is needed for prompts of a length", key="--tokenizer", fix="or give --prompts"))
    for one in ("trace", "prompts"):
        if given[one] and given[one] != "calibration" and not os.path.isfile(given[one]):
            faults.append(Fault("there is no such file", key=f"--{one}", value=str(given[one])))
    if faults:
        faults += _file_faults(given["trace"] or given["prompts"])
    for one in ("output", "page"):
        if given[one] and not os.access(given[one].absolute().parent, os.W_OK):
            faults.append(Fault("its folder cannot be written to", key=f"--{one}", value=str(given[one])))
    return faults


def _file_faults(file: Path | str | None) -> list[Fault]:
    """What is wrong with a file of prompts. Without other faults, whoever reads it says so."""
    from pipeline.bench.prompt_file import PromptFile

    if file is None or not os.path.isfile(file):
        return []
    try:
        PromptFile.read(Path(file))
    except InvalidInput as error:
        return [replace(fault, where=error.subject) for fault in error.faults]
    except UserError as error:
        return [Fault(str(error))]
    return []


def options_of(given: dict[str, Any]) -> BenchOptions:
    """Turn the options of `load_options` into those of the room.

    Args:
        given: The options as click gives them, without faults.
    """
    from pipeline.bench.arrivals import Load
    from pipeline.bench.run import BenchOptions
    from pipeline.bench.workload import Shape

    kind: Literal["concurrency", "rate", "trace"]
    values: tuple[float, ...]
    if given["trace"]:
        kind, values = "trace", (given["speed"] or 1.0,)
    elif given["rate"]:
        kind, values = "rate", given["rate"]
    else:
        kind, values = "concurrency", given["concurrency"] or (_CONCURRENCY,)
    prompts = given["prompts"]
    bounded = given["duration"] or given["requests"] or given["trace"]
    return BenchOptions(
        loads=tuple(Load(kind, value) for value in values),
        file=given["trace"]
        or ("calibration" if prompts == "calibration" else prompts and Path(prompts))
        or None,
        prompts=given["prompt_tokens"],
        answers=given["output_tokens"],
        shape=Shape(given["prefix_tokens"], given["prefixes"], given["turns"], given["cancel"]),
        chat=not given["raw"],
        seconds=given["duration"] if bounded else _SECONDS,
        requests=given["requests"],
        warm_up_s=given["warmup"] if given["warmup"] is not None else 0.0 if given["trace"] else _WARM_UP_S,
        grace_s=given["grace"],
        think_s=given["think_s"],
        temperature=given["temperature"],
        timeout_s=given["timeout"],
        seed=given["seed"],
    )
