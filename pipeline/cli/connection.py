"""Settings of a request, the way to a recipe's server, and its client, for `stream`, `chat` and `generate`.

The client has the recipe's limits and chat template, and its response cache if it has one.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import click
from pydantic import BeforeValidator, DirectoryPath, Field

from pipeline.cli.options import is_http, open_store
from pipeline.errors import PipelineError, ServerError, UserError
from pipeline.settings import Option, Settings

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

# gRPC logs lost connections on standard error unless this is set before it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _parameter(text: str) -> tuple[str, Any]:
    """Read NAME=VALUE, whose value is YAML.

    Raises:
        ValueError: It is not NAME=VALUE, or NAME is unknown or has an option of its own.
    """
    from pipeline.client.sampling import PARAMETERS
    from pipeline.document_faults import did_you_mean
    from pipeline.documents import Document
    from pipeline.overrides import apply_overrides

    name, equals, _ = text.partition("=")
    if name in _SAMPLING_OPTIONS:
        raise ValueError(f"has an option of its own: --{name.replace('_', '-')}")
    known = [parameter for parameter in PARAMETERS if parameter not in _SAMPLING_OPTIONS]
    if not equals:
        raise ValueError(f"is not NAME=VALUE; names: {', '.join(known)}")
    if name not in known:
        near = did_you_mean(name, [*known, *_SAMPLING_OPTIONS])
        raise ValueError(f"names no parameter; {near}names: {', '.join(known)}")
    document = Document("--param", line=None)
    apply_overrides(document, [text], "--param")
    if document.faults:
        raise ValueError(document.faults[0].problem)
    try:
        PARAMETERS[name].read(document.data[name])
    except ValueError as error:
        raise ValueError(str(error)) from None
    return name, document.data[name]


class RequestSettings(Settings):
    """Server, model, sampling parameters and cache of the requests of a command."""

    url: Annotated[str | None, Option(metavar="URL")] = Field(
        default=None,
        description="Ask this address instead of the server of a recipe: host:port of Triton's gRPC, or "
        "http://host:port/v1 of a gateway or another OpenAI API.",
    )
    tokenizer: Annotated[DirectoryPath | None, Option(metavar="FOLDER")] = Field(
        default=None,
        description="Tokenizer files whose chat template to use; by default the deployment's.",
    )
    wait_s: Annotated[float, Option(metavar="S")] = Field(
        default=0.0, description="Seconds to wait for the server to be ready."
    )
    model: Annotated[str | None, Option(metavar="NAME")] = Field(
        default=None,
        description="Triton model to ask, by default the deployment's entry model; of an OpenAI API by default its "
        "only one.",
    )
    system: Annotated[str, Option(metavar="TEXT")] = Field(default="", description="System prompt.")
    max_tokens: Annotated[int | None, Option(metavar="N")] = Field(
        default=None, description="Most new tokens; by default as many as the model allows."
    )
    temperature: Annotated[float | None, Option(metavar="T")] = Field(
        default=None, description="0 always takes the likeliest token."
    )
    params: Annotated[
        Mapping[str, Any],
        BeforeValidator(lambda pairs: dict(pairs) if isinstance(pairs, list | tuple) else pairs),
        Option("--param", metavar="NAME=VALUE", parse=_parameter),
    ] = Field(
        default={},
        description="Sampling parameter, such as top_p=0.9, seed=7 or stop=END; the value is YAML. May be repeated.",
    )
    tenant: Annotated[str, Option(metavar="NAME")] = Field(
        default="", description="Tenant whose cached answers may be used."
    )

    def sampling(self, max_tokens: int | None) -> Sampling:
        """Return the sampling parameters, with the limit of the destination."""
        return {**self.params, "temperature": self.temperature, "max_tokens": max_tokens}  # type: ignore[typeddict-item]


_SAMPLING_OPTIONS = ("max_tokens", "temperature")  # parameters with an option of their own
# Tokens of an answer where no deployment limits them.
_WITHOUT_LIMITS = 256


@dataclass(frozen=True, slots=True)
class Destination:
    """Server and model that requests go to.

    Attributes:
        model: None: the only one of an OpenAI API.
        tokenizer: folder with the chat template.
        max_tokens: default of requests.
        package: folder of deployment.json, where it is known.
    """

    url: str
    model: str | None
    tokenizer: Path | None
    max_tokens: int | None
    package: Path | None = None
    recipe: Recipe | None = None
    store: Store | None = None


def find_destination(recipe: str | None, overrides: Sequence[str], request: RequestSettings) -> Destination:
    """Find the server of a recipe, or the one that --url names.

    Args:
        recipe: file or packaged name of a recipe, or name of a running deployment; None with --url.

    Raises:
        ServerError: the recipe's server is not running.
    """
    if request.url is not None and is_http(request.url):
        wrong = [name for name in ("tokenizer", "tenant") if getattr(request, name)]
        if wrong:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise click.UsageError(f"{named}: no effect on an OpenAI API")
        return Destination(request.url, request.model, None, request.max_tokens)
    if request.url is not None:
        return Destination(
            url=request.url,
            model=request.model or "tensorrt_llm_bls",
            tokenizer=request.tokenizer,
            max_tokens=_first(request.max_tokens, _WITHOUT_LIMITS),
        )
    assert recipe is not None, "the verbs ask for one or the other"
    from pipeline.serving.deployments import find_deployment
    from pipeline.triton.deployment import Deployment

    artifacts = open_store()
    deployed = find_deployment(recipe, overrides, artifacts, wait_s=request.wait_s)
    server = deployed.require_server(artifacts)
    package = server.deployment.parent
    deployment = Deployment.load(package)
    return Destination(
        url=server.target,
        model=request.model or deployment.entry_model,
        tokenizer=request.tokenizer or package / deployment.tokenizer_dir,
        max_tokens=_first(request.max_tokens, deployment.limits.max_output_tokens),
        package=package,
        recipe=deployed.recipe,
        store=artifacts,
    )


def _first(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


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
    """Describe where an answer came from, if not from the model for this request.

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
def connected(destination: Destination, request: RequestSettings, *, raw: bool) -> Iterator[AnyClient]:
    """Open a client with the sampling options as defaults; its errors become errors of the command.

    Args:
        raw: send prompts without a chat template.

    Raises:
        UserError: the server refused a request.
        ServerError: it cannot be reached, or failed.
    """
    from pipeline.client import ClientError

    try:
        with _client(destination, request, raw=raw) as client:
            yield client
    except ClientError as error:
        raise as_pipeline_error(error) from error


def _client(destination: Destination, request: RequestSettings, *, raw: bool) -> AnyClient:
    """Make the client: of an OpenAI API, or of Triton, behind the recipe's response cache if it has one."""
    from pipeline.client import AsyncClient, Client
    from pipeline.client.openai_api import OpenAIClient

    defaults = request.sampling(destination.max_tokens)
    if is_http(destination.url):
        return OpenAIClient(
            destination.url,
            model=destination.model,
            key=os.environ.get("PIPELINE_API_KEY"),
            defaults=defaults,
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
    if recipe is None or package is None or store is None or not recipe.cache.enabled:
        return make()
    from pipeline.cache.client import CachingClient
    from pipeline.cache.key import Origin
    from pipeline.stages.response_cache import open_response_cache
    from pipeline.triton.deployment import Deployment

    origin = Origin(Deployment.load(package).digest, recipe.name, request.tenant)
    client = AsyncClient(*make.args, **make.keywords)
    cache = open_response_cache(recipe, store)
    assert cache is not None, "it is enabled"
    return CachingClient(client, cache, origin)


def as_pipeline_error(error: ClientError, fields: Collection[str] = ()) -> PipelineError:
    """Give an error of the client the exit code of its kind: 2 for a refused request or an unknown model, 1 for others.

    Args:
        error: names sampling parameters, which are written as the options that gave them.
        fields: parameters that a line of --input gave.
    """
    from pipeline.client import ModelNotFound, Refused

    def option(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        typed = name in _SAMPLING_OPTIONS and name not in fields
        return f"--{name.replace('_', '-')}" if typed else match[0]

    text = re.sub(r"\b([a-z_]+)(?= = )|'([a-z_]+)'", option, str(error))
    if text.startswith("HTTP 401"):
        has = "holds the key that was sent" if os.environ.get("PIPELINE_API_KEY") else "is not set"
        text += f" ($PIPELINE_API_KEY {has})"
    return UserError(text) if isinstance(error, Refused | ModelNotFound) else ServerError(text)


def _prompt_limit(destination: Destination) -> PromptLimit | None:
    """Limit of the package; None without a package or a tokenizer here: the server then refuses by itself."""
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
