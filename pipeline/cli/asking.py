"""What `stream` and `chat` share: the options of a request, and the way from a recipe to the server that runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import PipelineError, ServerError, UserError

if TYPE_CHECKING:
    from pipeline.client import ChatTemplate, Client, ClientError, Sampling, Stats

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--url", metavar="HOST:PORT", help="Ask this gRPC address instead of the server of a recipe."),
    click.option(
        "--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
        help="Tokenizer files whose chat template to use; by default the deployment's.",
    ),
    click.option("--wait-s", type=float, default=0.0, metavar="S", help="Wait so long for the server to be ready."),
    click.option("--model", metavar="NAME", help="Triton model to ask; by default the deployment's entry model."),
    click.option("--system", default="", metavar="TEXT", help="System prompt."),
    click.option("--max-tokens", type=int, metavar="N", help="At most so many new tokens; by default all allowed."),
    click.option("--temperature", type=float, metavar="T", help="0 always takes the likeliest token."),
    click.option("--top-p", type=float, metavar="P", help="Only the likeliest tokens, together of this probability."),
    click.option("--top-k", type=int, metavar="K", help="Only the K likeliest tokens."),
    click.option("--seed", type=int, metavar="N", help="The same seed draws the same answer."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated."),
)  # fmt: skip

_POLL_S = 0.1
_WITHOUT_LIMITS = 256  # tokens, when no deployment says how many it allows


def asking_options(command: Command) -> Command:
    """--url, --tokenizer, --wait-s, --model, --system and the sampling options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Destination:
    """Where to ask, and how."""

    url: str
    model: str
    tokenizer: Path | None
    max_tokens: int


def find(
    recipe: str | None, overrides: Sequence[str], store: Path | None, options: dict[str, Any]
) -> Destination:
    """The server of a recipe, or the one that --url names. ServerError if the recipe's is not running."""
    if options["url"] is not None:
        return Destination(
            url=options["url"],
            model=options["model"] or "tensorrt_llm_bls",
            tokenizer=options["tokenizer"],
            max_tokens=_first(options["max_tokens"], _WITHOUT_LIMITS),
        )
    assert recipe is not None, "the verbs ask for one or the other"
    from pipeline.recipe import load_recipe
    from pipeline.store import Store
    from pipeline.triton.deployment import Deployment
    from pipeline.triton.running import RunningServer

    name = load_recipe(recipe, overrides).name
    folder = Store.at(store).running
    server = RunningServer.find(folder, name)
    deadline = time.monotonic() + options["wait_s"]
    while server is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        server = RunningServer.find(folder, name)
    if server is None:
        raise ServerError(_not_running(recipe, name, store, RunningServer.read(folder, name) is not None))
    deployment = Deployment.load(server.deployment.parent)
    return Destination(
        url=server.grpc_url,
        model=options["model"] or deployment.entry_model,
        tokenizer=options["tokenizer"] or server.deployment.parent / deployment.tokenizer_dir,
        max_tokens=_first(options["max_tokens"], deployment.limits.max_output_tokens),
    )


def _first(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


def _not_running(recipe: str, name: str, store: Path | None, was: bool) -> str:
    command = f"pipeline serve {recipe}" + (f" --store {store}" if store else "")
    state = "is no longer running" if was else "is not running"
    return f"{name} {state}. Start it in another terminal:\n  {command}"


@contextmanager
def connected(destination: Destination, options: dict[str, Any], *, raw: bool) -> Iterator[Client]:
    """A client with the sampling options as defaults; its errors as errors of the command."""
    from pipeline.client import Client, ClientError

    try:
        with Client(
            destination.url,
            model=destination.model,
            template=None if raw else _template(destination),
            defaults=_sampling(destination, options),
        ) as client:
            yield client
    except ClientError as error:
        raise as_pipeline_error(error) from error


def as_pipeline_error(error: ClientError) -> PipelineError:
    """The same message with the exit code of its kind."""
    from pipeline.client import Refused

    return UserError(str(error)) if isinstance(error, Refused) else ServerError(str(error))


def _template(destination: Destination) -> ChatTemplate:
    from pipeline.client import ChatTemplate

    if destination.tokenizer is None:
        raise UserError(
            "--url needs --tokenizer FOLDER for the chat template, or (`stream` only) --raw for none"
        )
    return ChatTemplate.from_directory(destination.tokenizer)


def _sampling(destination: Destination, options: dict[str, Any]) -> Sampling:
    given = {name: options[name] for name in ("temperature", "top_p", "top_k", "seed")}
    return {**given, "stop": options["stop"] or None, "max_tokens": destination.max_tokens}  # type: ignore[typeddict-item]


def describe(stats: Stats, finish_reason: str | None) -> str:
    """The figures of an answer in two lines."""

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    p50, p95, p99 = (ms(stats.itl_percentile(percent)) for percent in (50, 95, 99))
    count = f"{stats.chunks} chunks" if stats.output_tokens is None else f"{stats.output_tokens} tokens"
    total = "" if stats.total_ms is None else f" in {stats.total_ms / 1e3:.2f} s"
    rate = "" if stats.tokens_per_s is None else f", {stats.tokens_per_s:.1f} tokens/s"
    accepted = "" if stats.acceptance is None else f", draft accepted {stats.acceptance:.0%}"
    ended = "" if finish_reason in (None, "unknown") else f", ended by {finish_reason}"
    return f"TTFT {ms(stats.ttft_ms)} ms, ITL p50 {p50} p95 {p95} p99 {p99} ms\n{count}{total}{rate}{accepted}{ended}"
