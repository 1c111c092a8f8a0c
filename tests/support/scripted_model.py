"""A scripted model server, and a model of a gateway that is served there: what processes of tests import, too."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from pipeline.cache.response_cache import ResponseCache
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Retries, Timeouts
from pipeline.client.testing import FakeServer, Received, Reply
from pipeline.gateway.api.tools.prompt import ToolSectionTemplate
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.readiness import PROBE_ID
from pipeline.gateway.served_model import EmbeddingModel, ServedModel
from pipeline.gateway.text_processes import TextProcesses
from pipeline.recipe.deployment import Spread

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"""


class Words:
    """Counts a token a word."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self._special = special

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {id: SimpleNamespace(content=token, special=True) for id, token in enumerate(self._special)}

    class Encoding:
        def __init__(self, text: str) -> None:
            self.ids = text.split()
            self.offsets = [(0, len(text))]
            self.special_tokens_mask = [0] * len(self.ids)

        def __len__(self) -> int:
            return len(self.ids)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> Encoding:  # noqa: ARG002
        return self.Encoding(text)

    def encode_batch_fast(self, texts: Sequence[str], /) -> list[Encoding]:
        return [self.Encoding(text) for text in texts]

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return " ".join(map(str, ids))

    def id_to_token(self, id: int | str, /) -> str | None:
        return str(id) if isinstance(id, str) or id < 100 else None

    def token_to_id(self, token: str, /) -> int | None:
        return 90 if token in ("<fim_prefix>", "<fim_suffix>", "<fim_middle>") else None


def tiny(
    url: str | Sequence[str],
    *,
    name: str = "tiny",
    places: int = 4,
    max_waiting: int = 16,
    aliases: tuple[str, ...] = (),
    template: str | None = TEMPLATE,
    tool_section: bool = False,
    cache: ResponseCache | None = None,
    embedder: EmbeddingModel | None = None,
    returns_logits: bool = False,
    max_wait_s: float = 30.0,
    timeouts: Timeouts | None = None,
    spread: Spread = "affinity",
    slots_per_server: int | None = None,
    processes: TextProcesses | None = None,
    strict: bool = False,
    structural_tags: bool = False,
    special: Sequence[str] = (),
) -> ServedModel:
    """A model that takes 50 words and gives 40 (500 and 200 with a section of tools), served at `url`."""
    made = None if template is None else ChatTemplate(template)
    if made is not None and tool_section:
        made = ToolSectionTemplate(made)
    return ServedModel(
        name=name,
        created=1,
        deployment="digest",
        client=AsyncClient(
            url,
            template=made,
            timeouts=timeouts,
            retries=Retries(attempts=1),
            spread=spread,
            slots=slots_per_server,
        ),
        template=made,
        prompt_limit=PromptLimit(Words(special), max_tokens=500 if tool_section else 50),
        max_output_tokens=200 if tool_section else 40,
        queue=FairQueue(places, max_waiting=max_waiting),
        aliases=aliases,
        strict=strict,
        structural_tags=structural_tags,
        cache=cache,
        embedder=embedder,
        returns_logits=returns_logits,
        max_wait_s=max_wait_s,
        slots_per_server=slots_per_server,
        processes=processes,
    )


class Upstream(FakeServer):
    """A fake server that answers the gateway's probes by itself, so that scripts and counts are of requests alone."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.probe = Reply(["."])
        self.probes: list[Received] = []

    def _choose(self, received: Received) -> Reply:
        if received.request_id != PROBE_ID:
            return super()._choose(received)
        self.requests.remove(received)
        self.probes.append(received)
        return self.probe

    def begin(self, reply: Reply | Sequence[Reply] | Callable[[Received], Reply]) -> None:
        """Answer by another script from now on, as if nothing had been asked before."""
        self._reply, self._count = reply, itertools.count()
        self.requests.clear()
