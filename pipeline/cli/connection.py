"""The client of a verb that asks: with the recipe's limits and template, and its response cache if it has one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.cli.request_options import Destination
from pipeline.errors import PipelineError, ServerError, UserError

if TYPE_CHECKING:
    from pipeline.cache.client import CachedStream, CachingClient
    from pipeline.client import (
        Answer,
        ChatTemplate,
        Client,
        ClientError,
        Message,
        PromptLimit,
        Sampling,
        Stream,
    )

    AnyStream: TypeAlias = Stream | CachedStream


@dataclass(frozen=True, slots=True)
class Connection:
    """Asks the model, by way of the response cache where there is one."""

    client: Client
    caching: CachingClient | None = None

    def stream(self, prompt: str | Sequence[Message]) -> AnyStream:
        """An answer, chunk by chunk."""
        return self.client.stream(prompt) if self.caching is None else self.caching.stream(prompt)

    def generate(self, prompt: str | Sequence[Message], sampling: Sampling) -> Answer:
        """A whole answer."""
        if self.caching is None:
            return self.client.generate(prompt, **sampling)
        return self.caching.generate(prompt, **sampling)


@contextmanager
def connected(destination: Destination, options: dict[str, Any], *, raw: bool) -> Iterator[Connection]:
    """A client with the sampling options as defaults; its errors as errors of the command."""
    from pipeline.client import Client, ClientError

    try:
        with ExitStack() as stack:
            client = stack.enter_context(
                Client(
                    destination.url,
                    model=destination.model,
                    template=None if raw else _template(destination),
                    defaults=_sampling(destination, options),
                    prompt_limit=_prompt_limit(destination),
                )
            )
            yield Connection(
                client, None if options["no_cache"] else _caching(client, destination, options, stack)
            )
    except ClientError as error:
        raise as_pipeline_error(error) from error


def as_pipeline_error(error: ClientError) -> PipelineError:
    """The same message with the exit code of its kind."""
    from pipeline.client import Refused

    return UserError(str(error)) if isinstance(error, Refused) else ServerError(str(error))


def _caching(
    client: Client, destination: Destination, options: dict[str, Any], stack: ExitStack
) -> CachingClient | None:
    recipe, package, store = destination.recipe, destination.package, destination.store
    if recipe is None or package is None or store is None or not recipe.cache.enabled:
        return None
    from pipeline.cache.client import CachingClient
    from pipeline.cache.key import Origin
    from pipeline.stages.response_cache import open_response_cache
    from pipeline.triton.deployment import Deployment

    cache = open_response_cache(recipe, store)
    assert cache is not None, "it is enabled"
    stack.callback(cache.close)
    return CachingClient(
        client, cache, Origin(Deployment.load(package).digest, recipe.name, options["tenant"])
    )


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
    given = {name: options[name] for name in ("temperature", "top_p", "top_k", "seed")}
    return {**given, "stop": options["stop"] or None, "max_tokens": destination.max_tokens}  # type: ignore[typeddict-item]
