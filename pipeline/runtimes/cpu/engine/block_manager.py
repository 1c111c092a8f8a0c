"""Paged KV cache, as bookkeeping: which block holds what, who uses it, and what may be reused.

After nano-vllm's block manager. Complete blocks are named by a digest of their tokens and of all tokens before them,
so that a later prompt with the same beginning takes them as they are. A block without a user keeps its content until
it is needed for something else; the least recently used one goes first.

A sequence is admitted only when the most blocks it can ever need are free, and they are then reserved for it. So no
running sequence is ever interrupted for want of memory, and no answer depends on load.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from hashlib import blake2b

import numpy as np
import numpy.typing as npt


class Pages:
    """The blocks of one sequence in the cache of one model."""

    __slots__ = ("count", "digests", "filled", "reused", "salt", "table")

    def __init__(self, max_blocks: int, salt: bytes = b"") -> None:
        self.table: npt.NDArray[np.int32] = np.zeros(
            max_blocks, np.int32
        )  # [max_blocks], the first `count` in use
        self.count = 0
        self.filled = 0  # tokens whose keys and values are in the blocks
        self.digests: list[bytes] = []  # of the complete blocks at the beginning
        self.reused = 0  # blocks found in the cache
        self.salt = salt  # sequences share blocks with those of the same salt alone

    @property
    def reserved(self) -> int:
        """Blocks that are promised to the sequence and not yet taken."""
        return len(self.table) - self.count


class BlockManager:
    """The blocks of one model's KV cache.

    Args:
        num_blocks: Blocks in the cache.
        block_size: Tokens in a block.
        caching: Whether blocks are reused by prompts with the same beginning.
    """

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self._users = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = (
            OrderedDict()
        )  # cached blocks nobody uses, least recently used first
        self._reserved = 0  # blocks promised to sequences, not yet taken
        self._digests: dict[int, bytes] = {}  # cached block -> digest
        self._cached: dict[bytes, int] = {}  # digest -> cached block

    @property
    def used(self) -> int:
        """Blocks that a sequence uses."""
        return self.num_blocks - len(self._free) - len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks nobody uses whose content may be reused."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """Blocks that a new sequence could be promised."""
        return len(self._free) + len(self._idle) - self._reserved

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def admit(
        self, prompt: abc.Sequence[int], max_tokens: int, *, reuse: bool = True, salt: bytes = b""
    ) -> Pages | None:
        """Pages with the cached beginning of `prompt` and room reserved for `max_tokens`; None if it does not fit.

        Args:
            prompt: Its tokens.
            max_tokens: Most tokens of prompt and answer.
            reuse: False computes the whole prompt, because what is wanted of its beginning is not in the cache.
            salt: Distinguishes sequences whose keys and values differ with the same tokens.
        """
        digests, hits = self._longest_cached(prompt, salt) if reuse else ([], [])
        pages = Pages(self.blocks_for(max_tokens), salt)
        revived = sum(not self._users[block] for block in hits)
        if len(pages.table) - len(hits) + revived > self.available:
            return None
        for block in hits:
            self._idle.pop(block, None)
            self._users[block] += 1
        pages.table[: len(hits)] = hits
        pages.count = pages.reused = len(hits)
        pages.filled = len(hits) * self.block_size
        pages.digests = digests
        self._reserved += pages.reserved
        return pages

    def extend(self, pages: Pages, tokens: int) -> None:
        """Take blocks until `pages` can hold `tokens`; they were reserved at admission."""
        while pages.count * self.block_size < tokens:
            if not pages.reserved:
                raise IndexError(f"{tokens} tokens do not fit the {len(pages.table)} blocks reserved")
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            self._reserved -= 1
            pages.table[pages.count] = block
            pages.count += 1

    def publish(self, pages: Pages, tokens: abc.Sequence[int], filled: int) -> None:
        """Record that the first `filled` of `tokens` are computed and final, and offer their complete blocks for reuse.

        Args:
            pages: The blocks of the sequence.
            tokens: Its tokens, prompt and answer.
            filled: Number of them with keys and values in the blocks.
        """
        pages.filled = filled
        if not self._caching:
            return
        while (len(pages.digests) + 1) * self.block_size <= filled:
            index = len(pages.digests)
            digest = self._digest(tokens, index, pages.digests, pages.salt)
            pages.digests.append(digest)
            block = int(pages.table[index])
            if digest not in self._cached:  # else another sequence computed the same; ours is freed after use
                self._cached[digest] = block
                self._digests[block] = digest

    def release(self, pages: Pages) -> None:
        """Give everything back. Later blocks become idle first, so that beginnings stay cached longest."""
        self._reserved -= pages.reserved
        for block in reversed(pages.table[: pages.count].tolist()):
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._digests:
                self._idle[block] = None
            else:
                self._free.append(block)
        pages.table = pages.table[:0]
        pages.count = 0

    def _longest_cached(self, prompt: abc.Sequence[int], salt: bytes) -> tuple[list[bytes], list[int]]:
        """Digests and blocks of the cached beginning; the last token always stays out, for its logits are wanted."""
        digests: list[bytes] = []
        hits: list[int] = []
        for index in range((len(prompt) - 1) // self.block_size if self._caching else 0):
            digest = self._digest(prompt, index, digests, salt)
            block = self._cached.get(digest)
            if block is None:
                break
            digests.append(digest)
            hits.append(block)
        return digests, hits

    def _digest(self, tokens: abc.Sequence[int], index: int, before: list[bytes], salt: bytes) -> bytes:
        block = tokens[index * self.block_size : (index + 1) * self.block_size]
        parent = before[index - 1] if index else salt
        return blake2b(parent + np.asarray(block, np.int64).tobytes(), digest_size=16).digest()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._cached[self._digests.pop(block)]
        return block
