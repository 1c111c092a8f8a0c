"""What `stream`, `chat` and `generate` share: options of a request, the way to a recipe's server, and its client.

The client has the recipe's limits and chat template, and its response cache if it has one.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from pipeline.cli.options import api_key_option, is_http
from pipeline.errors import PipelineError, ServerError, UserError

if TYPE_CHECKING:
    from pipeline.cache.client import CachedStream, CachingClient
    from pipeline.client import (
        ChatTemplate,
        Client,
        ClientError,
        PromptLimit,
        Sampling,
        Stats,
        Stream,
    )
    from pipeline.client.openai_api import OpenAIClient, OpenAIStream
    from pipeline.recipe import Recipe
    from pipeline.store import Store

    AnyClient: TypeAlias = Client | CachingClient | OpenAIClient
    AnyStream: TypeAlias = Stream | CachedStream | OpenAIStream

# gRPC writes of lost connections to standard error by itself. It reads this when it is imported, hence not before here.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

Command = TypeVar("Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--url", metavar="URL",
        help="Ask this address instead of the server of a recipe: host:port of Triton's gRPC, or http://host:port/v1 "
        "of a gateway or another OpenAI API.",
    ),
    api_key_option,
    click.option(
        "--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
        help="Tokenizer files whose chat template to use; by default the deployment's.",
    ),
    click.option("--wait-s", type=float, default=0.0, metavar="S", help="Wait so long for the server to be ready."),
    click.option(
        "--model", metavar="NAME",
        help="Triton model to ask, by default the deployment's entry model; of an OpenAI API by default its only one.",
    ),
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

_SAMPLING_OPTIONS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
_WITHOUT_LIMITS = 256  # tokens, when no deployment says how many it allows


def request_options(command: Command) -> Command:
    """Add the options of a request (server, model, sampling, cache) to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Destination:
    """The server and the model that a request goes to, with what the client needs to know of them."""

    url: str
    model: str | None  # None: the only one of an OpenAI API
    tokenizer: Path | None
    max_tokens: int | None
    package: Path | None = None  # folder of deployment.json, where it is known
    recipe: Recipe | None = None
    store: Store | None = None


def find_destination(
    recipe: str | None, overrides: Sequence[str], store: Path | None, options: dict[str, Any]
) -> Destination:
    """Find the server of a recipe, or the one that --url names.

    Args:
        recipe: its file or packaged name, or the name of a running deployment; None with --url.
        overrides: values of `--set`.
        store: root of the store; None for the default one.
        options: values of `request_options`.

    Raises:
        ServerError: the recipe's server is not running.
    """
    if options["url"] is not None and is_http(options["url"]):
        wrong = [name for name in ("tokenizer", "tenant", "no_cache") if options[name]]
        if wrong:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise click.UsageError(f"{named}: have no effect on an OpenAI API")
        return Destination(options["url"], options["model"], None, options["max_tokens"])
    if options["url"] is not None:
        return Destination(
            url=options["url"],
            model=options["model"] or "tensorrt_llm_bls",
            tokenizer=options["tokenizer"],
            max_tokens=_first(options["max_tokens"], _WITHOUT_LIMITS),
        )
    assert recipe is not None, "the verbs ask for one or the other"
    from pipeline.serving.deployments import find_deployment
    from pipeline.store import Store
    from pipeline.triton.deployment import Deployment

    shelf = Store.at(store)
    found = find_deployment(recipe, overrides, shelf, wait_s=options["wait_s"])
    server = found.require_server(shelf)
    package = server.deployment.parent
    deployment = Deployment.load(package)
    return Destination(
        url=server.target,
        model=options["model"] or deployment.entry_model,
        tokenizer=options["tokenizer"] or package / deployment.tokenizer_dir,
        max_tokens=_first(options["max_tokens"], deployment.limits.max_output_tokens),
        package=package,
        recipe=found.recipe,
        store=shelf,
    )


def _first(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given


def stats_text(stats: Stats, finish_reason: str | None) -> str:
    """Write the figures of an answer in two lines."""

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
        f"{count}{total}{rate}{accepted}{ended}{cached_text(stats)}"
    )


def cached_text(stats: Stats) -> str:
    """Say where an answer came from, if not from the model for this request.

    >>> from pipeline.client import Cached, Stats
    >>> cached_text(Stats(cached=Cached("semantic", 0.934)))
    ', from the cache (semantic, similarity 0.93)'
    """
    match stats.cached:
        case None:
            return ""
        case cached if cached.kind == "semantic":
            return f", from the cache (semantic, similarity {cached.similarity:.2f})"
        case cached:
            return ", shared with an equal request" if cached.kind == "shared" else ", from the cache (exact)"


@contextmanager
def connected(destination: Destination, options: dict[str, Any], *, raw: bool) -> Iterator[AnyClient]:
    """Open a client with the sampling options as defaults; its errors become errors of the command.

    Args:
        destination: the server, from `find_destination`.
        options: values of `request_options`.
        raw: send prompts without a chat template.

    Raises:
        UserError: the server refused a request.
        ServerError: it cannot be reached, or failed.
    """
    from pipeline.client import ClientError

    try:
        with _client(destination, options, raw=raw) as client:
            yield client
    except ClientError as error:
        raise as_pipeline_error(error) from error


def _client(destination: Destination, options: dict[str, Any], *, raw: bool) -> AnyClient:
    """Make the client: of an OpenAI API, or of Triton, behind the recipe's response cache if it has one."""
    from pipeline.client import AsyncClient, Client
    from pipeline.client.openai_api import OpenAIClient

    defaults = _sampling(destination, options)
    if is_http(destination.url):
        return OpenAIClient(
            destination.url, model=destination.model, key=options["api_key"], defaults=defaults
        )
    assert destination.model is not None, "only an OpenAI API may have a model that is not named"
    make = partial(
        Client,
        destination.url,
        model=destination.model,
        template=None if raw else _template(destination),
        defaults=defaults,
        prompt_limit=_prompt_limit(destination),
    )
    recipe, package, store = destination.recipe, destination.package, destination.store
    if options["no_cache"] or recipe is None or package is None or store is None or not recipe.cache.enabled:
        return make()
    from pipeline.cache.client import CachingClient
    from pipeline.cache.key import Origin
    from pipeline.stages.response_cache import open_response_cache
    from pipeline.triton.deployment import Deployment

    origin = Origin(Deployment.load(package).digest, recipe.name, options["tenant"])
    client = AsyncClient(*make.args, **make.keywords)
    cache = open_response_cache(recipe, store)
    assert cache is not None, "it is enabled"
    return CachingClient(client, cache, origin)


def as_pipeline_error(error: ClientError, fields: Collection[str] = ()) -> PipelineError:
    """Give an error of the client the exit code of its kind: 2 for a refused request, 1 for others.

    Args:
        error: names sampling parameters, which are written as the options that gave them.
        fields: those that were given as fields of a line of --input.
    """
    from pipeline.client import Refused

    def option(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        typed = name in _SAMPLING_OPTIONS and name not in fields
        return f"--{name.replace('_', '-')}" if typed else found[0]

    text = re.sub(r"\b([a-z_]+)(?= = )|'([a-z_]+)'", option, str(error))
    return UserError(text) if isinstance(error, Refused) else ServerError(text)


def _prompt_limit(destination: Destination) -> PromptLimit | None:
    """None where the package is not at hand, or nothing here counts tokens: the server then refuses by itself."""
    if destination.package is None or importlib.util.find_spec("tokenizers") is None:
        return None
    from pipeline.client import PromptLimit

    return PromptLimit.from_package(destination.package)


def _template(destination: Destination) -> ChatTemplate:
    from pipeline.client import ChatTemplate

    if destination.tokenizer is None:
        raise UserError(
            "--url needs --tokenizer FOLDER for the chat template, or (not for `chat`) --raw for none"
        )
    return ChatTemplate.from_directory(destination.tokenizer)


def _sampling(destination: Destination, options: dict[str, Any]) -> Sampling:
    given = {name: options[name] for name in _SAMPLING_OPTIONS}
    return {**given, "stop": options["stop"] or None, "max_tokens": destination.max_tokens}  # type: ignore[typeddict-item]
