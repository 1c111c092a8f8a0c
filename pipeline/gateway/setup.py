"""From a recipe and the server that runs it to what the gateway serves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Refused
from pipeline.errors import UserError
from pipeline.gateway.admission import Admission
from pipeline.gateway.caching import embedder_of, response_cache
from pipeline.gateway.served import Bounds, Served
from pipeline.progress import Silent
from pipeline.recipe import Recipe
from pipeline.store import Store
from pipeline.triton.deployment import Deployment
from pipeline.triton.integrity import check_without_weights

_log = logging.getLogger("pipeline.gateway")


def template_of(tokenizer: Path) -> ChatTemplate | None:
    """The chat template of a packaged tokenizer; None where there is none: such a model completes texts only."""
    try:
        return ChatTemplate.from_directory(tokenizer).compile()
    except Refused as error:
        _log.warning("no chats: %s", error)
        return None


def served(
    recipe: Recipe, package: Path, url: str | Sequence[str], store: Store, *, max_waiting: int
) -> Served:
    """What requests for the recipe's model are answered with.

    Args:
        package: the folder of deployment.json, whose tokenizer and limits are used.
        url: host:port of Triton's gRPC; several if several servers run it.
        store: in which the response cache lies if the recipe names no place, and its encoder.

    Raises:
        UserError: the cache that the recipe asks for cannot be had. DamagedArtifact: the tokenizer, the chat template
        or the limits are not those that were built.
    """
    check_without_weights(package, store.hashes, Silent())
    deployment = Deployment.load(package)
    tokenizer = package / deployment.tokenizer_dir
    limits = deployment.limits
    try:
        prompts = PromptLimit.from_tokenizer(tokenizer, limits.max_input_tokens)
    except Refused as error:
        raise UserError(str(error)) from error
    counter: Any = prompts.tokenizer
    cache = response_cache(recipe, store)
    template = template_of(tokenizer)
    return Served(
        name=recipe.name,
        created=int((package / "deployment.json").stat().st_mtime),
        deployment=deployment.digest,
        plain=AsyncClient(url, model=deployment.entry_model, template=template),
        template=template,
        tokenizer=counter,
        bounds=Bounds(limits.max_input_tokens, limits.max_output_tokens, prompts.max_chars_per_token),
        admission=Admission(limits.max_concurrency, max_waiting=max_waiting),
        cache=cache,
        embedder=embedder_of(cache),
        guides=deployment.guided_decoding,
        likeliest=deployment.runtime == "cpu",  # other engines return logits only if they were built to
    )
