"""What `stream`, `chat` and `generate` share: the options of a request, and the way from a recipe to its server."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipeline.errors import ServerError

if TYPE_CHECKING:
    from pipeline.client import Stats
    from pipeline.recipe import Recipe
    from pipeline.store import Store

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
    click.option("--no-cache", is_flag=True, help="Neither look into the recipe's response cache nor keep the answer."),
    click.option("--tenant", default="", metavar="NAME", help="Whose answers of the response cache may be given."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End the answer before this text. May be repeated."),
)  # fmt: skip

_WITHOUT_LIMITS = 256  # tokens, when no deployment says how many it allows


def asking_options(command: Command) -> Command:
    """--url, --tokenizer, --wait-s, --model, --system, --no-cache, --tenant and the sampling options."""
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
    package: Path | None = None  # folder of deployment.json, where it is known
    recipe: Recipe | None = None
    store: Store | None = None


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

    loaded, shelf = load_recipe(recipe, overrides), Store.at(store)
    name, folder = loaded.name, shelf.running
    server = RunningServer.find(folder, name, wait_s=options["wait_s"])
    if server is None:
        state = "is not running" if RunningServer.read(folder, name) is None else "is no longer running"
        command = shlex.join(("pipeline", "serve", *loaded.words, *shelf.words))
        raise ServerError(f"{name} {state}. Start it in another terminal:\n  {command}")
    package = server.deployment.parent
    deployment = Deployment.load(package)
    return Destination(
        url=server.grpc_url,
        model=options["model"] or deployment.entry_model,
        tokenizer=options["tokenizer"] or package / deployment.tokenizer_dir,
        max_tokens=_first(options["max_tokens"], deployment.limits.max_output_tokens),
        package=package,
        recipe=loaded,
        store=shelf,
    )


def _first(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


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
    return (
        f"TTFT {ms(stats.ttft_ms)} ms, ITL p50 {p50} p95 {p95} p99 {p99} ms\n"
        f"{count}{total}{rate}{accepted}{ended}{source(stats)}"
    )


def source(stats: Stats) -> str:
    """Where an answer came from, if not from the model for this request.

    >>> from pipeline.client import Cached, Stats
    >>> source(Stats(cached=Cached("semantic", 0.934)))
    ', from the cache (semantic, similarity 0.93)'
    """
    match stats.cached:
        case None:
            return ""
        case cached if cached.kind == "semantic":
            return f", from the cache (semantic, similarity {cached.similarity:.2f})"
        case cached:
            return ", shared with an equal request" if cached.kind == "shared" else ", from the cache (exact)"
