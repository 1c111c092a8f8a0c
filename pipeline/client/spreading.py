"""Choice of one of several servers for a request: by the beginning of its prompt, by load, or at random.

Affinity sends the turns of one conversation to one server, which has the KV cache of the turns before. It is consistent
hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2017, arXiv:1608.01350): a key belongs to the server that
follows it on a ring, and goes on to the next server while that one has as many requests in flight as `load_bound`
allows. Nothing is remembered and nobody is asked: all clients that know the same servers agree, and when a
server comes or goes, only its own part of the keys moves.

What it does not do: it does not know what a server's cache holds, as routers with a tree of past prompts or with events
of the engine do. Those find a beginning that two conversations share at any length, and have a state that several
routers must share.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, get_args

from pipeline.client.prompt import Prompt

Spread = Literal["affinity", "least-load", "random"]
SPREADS: tuple[Spread, ...] = get_args(Spread)

# The `c` of the paper: most requests in flight of one server, beside the mean of all; and what is always allowed: of
# few requests some meet by chance, and a server answers so many together as fast as one.
LOAD_BOUND, LOAD_FLOOR = 2.0, 4
# Of each server on the ring; a digest gives eight.
_POINTS = 128
# Of the messages up to the first question. Whoever agrees in so much shares most of the KV cache anyway.
_MESSAGE_CHARS = 4096
# Key of a prompt whose turns are unknown. A first turn that is shorter has another key than the next, which costs the
# prefill of that little once; if more counted, it would cost more.
_TEXT_CHARS, _TOKENS = 256, 64


def prompt_beginning(prompt: Prompt) -> str:
    """Return what all turns of a conversation have in common, and other conversations do not.

    A system prompt alone would send everybody who has it to the same server, so the first question counts, too.

    Returns:
        Messages up to the first of the user; the first 256 characters of a text; the first 64 token ids.

    >>> system = {"role": "system", "content": "Be brief."}
    >>> first = [system, {"role": "user", "content": "Hi"}]
    >>> later = [*first, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "And now?"}]
    >>> prompt_beginning(first) == prompt_beginning(later) != prompt_beginning([system])
    True
    """
    if isinstance(prompt, str):
        return prompt[:_TEXT_CHARS]
    parts: list[str] = []
    for item in prompt[:_TOKENS]:
        if not isinstance(item, Mapping):
            parts.append(str(item))
            continue
        content = item.get("content")
        text = content if isinstance(content, str) else repr(content)
        parts += (str(item.get("role")), text[:_MESSAGE_CHARS])
        if item.get("role") == "user":
            break
    return "\0".join(parts)


def load_bound(requests: int, servers: int, bound: float = LOAD_BOUND, floor: int = LOAD_FLOOR) -> float:
    """Return how many requests one server may have in flight before affinity passes it over.

    Args:
        requests: in flight at all servers together, the one to be sent included.
        servers: among which there is a choice.
        bound: times the share of each.
        floor: number that is always allowed.

    >>> load_bound(1, 4), load_bound(100, 4)
    (4, 50)
    """
    return math.inf if bound == math.inf else max(floor, math.ceil(bound * requests / servers))


def affinity_key(text: str) -> int:
    """Return the place of a text on the ring: 64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class HashRing:
    """Names at pseudo-random points of a ring. A key belongs to the names that follow it, the nearest first."""

    def __init__(self, names: Sequence[str]) -> None:
        # The order of names does not matter to where they lie.
        points = sorted(
            (point, at)
            for at, name in enumerate(names)
            for block in range(_POINTS // 8)
            for point in struct.unpack("<8Q", blake2b(f"{block} {name}".encode()).digest())
        )
        self._points = [point for point, _ in points]
        self._owners = [at for _, at in points]
        self._count = len(names)

    def walk(self, key: int) -> Iterator[int]:
        """Yield the index of every name once, in the order in which the ring has them from an `affinity_key` on."""
        owners, visited = self._owners, set[int]()
        first = bisect(self._points, key)
        for at in range(first, first + len(owners)):
            owner = owners[at % len(owners)]
            if owner not in visited:
                visited.add(owner)
                yield owner
                if len(visited) == self._count:
                    return
