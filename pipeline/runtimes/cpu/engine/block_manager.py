"""Paged KV cache, as bookkeeping: which block holds what, who uses it, and what may be reused.

After nano-vllm's block manager. Complete blocks are named by a digest of their tokens and of all tokens before them,
so that a later prompt with the same beginning takes them as they are. A block without a user keeps its content until
it is needed for something else; the least recently used one goes first.

Layers that see a window of tokens have blocks apart from those that see all, one pool for each length of window
(TensorRT-LLM: variable sliding window attention). Blocks that no later token sees leave the sequence and stay reusable,
as there. A prompt takes the longest cached beginning of which each pool still has what the next token sees.

A sequence is admitted only when the most blocks it can ever need are free, and they are then reserved for it. So no
running sequence is ever interrupted for want of memory, and no answer depends on load.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Tokens that the layers of a model keep, in groups of layers that keep the same ones."""

    block_size: int  # tokens in a block
    windows: tuple[int | None, ...] = (None,)  # of each group: tokens that a token sees; None: all
    step_tokens: int = 0  # computed before blocks are given back, of all sequences together
    draft_tokens: int = 0  # of a sequence, computed besides those and perhaps rejected

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def first(self, window: int | None, filled: int) -> int:
        """Index of the first block that may still be read when `filled` tokens are computed and final.

        The last of them may be computed again (`Drafter._slice`), so one token more than the window is kept.
        """
        return 0 if window is None else max(0, filled - window) // self.block_size

    def most(self, window: int | None, blocks: int) -> int:
        """Most blocks that a sequence of `blocks` holds between steps; `slack` has those of the tokens of a step."""
        if window is None:
            return blocks
        return min(blocks, self.blocks_for(window + self.draft_tokens + self.block_size - 2) + 1)

    @property
    def slack(self) -> int:
        """Blocks for the tokens of one step, of all sequences together."""
        return self.blocks_for(self.step_tokens)

    def pools(self, blocks: int, longest: int) -> list[int]:
        """Blocks of each group, in proportion to what the longest sequences need.

        Whatever fits the `blocks` of layers that keep all tokens fits those of the windows if it is one sequence, or
        if all have the longest length.

        Args:
            blocks: For layers that keep all tokens.
            longest: Blocks of the longest sequence.
        """
        return [
            blocks if window is None else min(blocks, self._share(window, blocks, longest) + self.slack)
            for window in self.windows
        ]

    def _share(self, window: int, blocks: int, longest: int) -> int:
        return max(self.most(window, blocks), -(-blocks * self.most(window, longest) // longest))


class BlockTable:
    """Blocks of one sequence in one group."""

    __slots__ = ("blocks", "first")

    def __init__(self, blocks: npt.NDArray[np.int32], first: int = 0) -> None:
        self.blocks = blocks  # [max_blocks]
        self.first = first  # those before it have left the window


class Pages:
    """The blocks of one sequence in the cache of one model."""

    __slots__ = ("count", "digests", "filled", "max_blocks", "new", "reused", "salt", "tables")

    def __init__(self, max_blocks: int, groups: int, salt: bytes = b"") -> None:
        self.tables = [BlockTable(np.zeros(max_blocks, np.int32)) for _ in range(groups)]  # [] once released
        self.max_blocks = max_blocks
        self.count = 0  # entries of each table that are in use, or have been
        self.filled = 0  # tokens whose keys and values are in the blocks
        self.digests: list[bytes] = []  # of the complete blocks at the beginning
        self.new = 0  # blocks taken, of all groups
        self.reused = 0  # blocks found in the cache, of all groups
        self.salt = salt  # sequences share blocks with those of the same salt alone


class BlockManager:
    """The blocks of one model's KV cache.

    Args:
        pools: Blocks of each group.
        layout: Windows of the groups, and sizes of a step.
        caching: Whether blocks are reused by prompts with the same beginning.
    """

    def __init__(self, pools: abc.Sequence[int], layout: CacheLayout, *, caching: bool = True) -> None:
        self.layout = layout
        self._caching = caching
        self._pools = [
            _Pool(blocks, window, layout) for blocks, window in zip(pools, layout.windows, strict=True)
        ]

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(pool.num_blocks for pool in self._pools)

    @property
    def used(self) -> int:
        """Blocks that a sequence uses."""
        return sum(pool.num_blocks - len(pool.free) - len(pool.idle) for pool in self._pools)

    @property
    def available(self) -> int:
        """Blocks that new sequences could be promised."""
        return sum(pool.available for pool in self._pools)

    def needs(self, tokens: int) -> list[tuple[int, int]]:
        """For each group, blocks that a sequence of so many tokens needs, and blocks that there are."""
        blocks = self.layout.blocks_for(tokens)
        return [(pool.demand(blocks), pool.num_blocks) for pool in self._pools]

    def admit(
        self, prompt: abc.Sequence[int], max_tokens: int, *, reuse: bool = True, salt: bytes = b""
    ) -> Pages | None:
        """Make pages with the cached beginning of `prompt` and room for `max_tokens`; None if it does not fit.

        Args:
            prompt: Its tokens.
            max_tokens: Most tokens of prompt and answer.
            reuse: False computes the whole prompt, because what is wanted of its beginning is not in the cache.
            salt: Distinguishes sequences whose keys and values differ with the same tokens.
        """
        digests = self._longest_cached(prompt, salt) if reuse and self._caching else []
        pages = Pages(self.layout.blocks_for(max_tokens), len(self._pools), salt)
        count, filled = len(digests), len(digests) * self.layout.block_size
        firsts = [self.layout.first(pool.window, filled) for pool in self._pools]
        hits = [
            [pool.cached[digest] for digest in digests[first:]]
            for pool, first in zip(self._pools, firsts, strict=True)
        ]
        if not all(
            pool.fits(pages.max_blocks, cached) for pool, cached in zip(self._pools, hits, strict=True)
        ):
            return None
        for pool, table, first, cached in zip(self._pools, pages.tables, firsts, hits, strict=True):
            pool.reserve(pages.max_blocks, cached)
            table.blocks[first:count] = cached
            table.first = first
            pages.reused += len(cached)
        pages.count, pages.filled, pages.digests = count, filled, digests
        return pages

    def extend(self, pages: Pages, tokens: int) -> None:
        """Take blocks until `pages` can hold `tokens`; they were reserved at admission."""
        while pages.count * self.layout.block_size < tokens:
            if pages.count == pages.max_blocks:
                raise IndexError(f"{tokens} tokens do not fit the {pages.max_blocks} blocks reserved")
            for pool, table in zip(self._pools, pages.tables, strict=True):
                table.blocks[pages.count] = pool.take()
            pages.count += 1
            pages.new += len(self._pools)

    def publish(self, pages: Pages, tokens: abc.Sequence[int], filled: int) -> None:
        """Record that the first `filled` of `tokens` are computed and final.

        Their complete blocks are offered for reuse, and those that no later token sees are given back.

        Args:
            pages: The blocks of the sequence.
            tokens: Its tokens, prompt and answer.
            filled: Number of them with keys and values in the blocks.
        """
        pages.filled = filled
        while self._caching and (len(pages.digests) + 1) * self.layout.block_size <= filled:
            index = len(pages.digests)
            pages.digests.append(self._digest(tokens, index, pages.digests, pages.salt))
            for pool, table in zip(self._pools, pages.tables, strict=True):
                pool.offer(int(table.blocks[index]), pages.digests[index])
        for pool, table in zip(self._pools, pages.tables, strict=True):
            first = self.layout.first(pool.window, filled)
            if first > table.first:
                pool.give_back(table.blocks[table.first : first].tolist())
                table.first = first

    def release(self, pages: Pages) -> None:
        """Free all blocks of a sequence, the last ones first, so that its beginning stays cached longest."""
        for pool, table in zip(self._pools, pages.tables, strict=True):
            pool.unreserve(pages.max_blocks, pages.count)
            pool.give_back(table.blocks[table.first : pages.count].tolist()[::-1])
        pages.tables = []

    def _longest_cached(self, prompt: abc.Sequence[int], salt: bytes) -> list[bytes]:
        """Digests of the cached beginning; the last token always stays out, for its logits are wanted."""
        layout, digests, usable = self.layout, list[bytes](), 0
        runs = [0] * len(self._pools)  # cached blocks in a row, up to the last digest
        for count in range(1, (len(prompt) - 1) // layout.block_size + 1):
            digests.append(self._digest(prompt, count - 1, digests, salt))
            runs = [
                run + 1 if digests[-1] in pool.cached else 0
                for pool, run in zip(self._pools, runs, strict=True)
            ]
            missing = [
                run < count - layout.first(pool.window, count * layout.block_size)
                for pool, run in zip(self._pools, runs, strict=True)
            ]
            if not any(missing):
                usable = count
            elif any(lacks and pool.window is None for pool, lacks in zip(self._pools, missing, strict=True)):
                break
        return digests[:usable]

    def _digest(self, tokens: abc.Sequence[int], index: int, before: list[bytes], salt: bytes) -> bytes:
        size = self.layout.block_size
        parent = before[index - 1] if index else salt
        block = np.asarray(tokens[index * size : (index + 1) * size], np.int64)
        return blake2b(parent + block.tobytes(), digest_size=16).digest()


class _Pool:
    """Blocks of the layers that see the same window.

    Of layers that keep all tokens, blocks that sequences share are reserved once: who has them keeps them. A window
    leaves shared blocks behind and then needs others, so there each sequence has a reservation of its own.
    """

    def __init__(self, num_blocks: int, window: int | None, layout: CacheLayout) -> None:
        self.num_blocks = num_blocks
        self.window = window
        self.free = list(range(num_blocks - 1, -1, -1))
        # cached blocks nobody uses, least recently used first
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.cached: dict[bytes, int] = {}  # digest -> cached block
        self.digests: dict[int, bytes] = {}  # cached block -> digest
        self.users = [0] * num_blocks
        self._layout = layout
        # Without a window, blocks promised to sequences and not yet taken; else `most` of each.
        self._reserved = 0
        self._whole = 0  # blocks of all sequences, were they kept to their ends

    @property
    def available(self) -> int:
        if self.window is None:
            return len(self.free) + len(self.idle) - self._reserved
        return self.num_blocks - min(self._reserved + self._layout.slack, self._whole)

    def demand(self, blocks: int) -> int:
        """Blocks that a sequence of `blocks` needs if it is alone."""
        slack = 0 if self.window is None else self._layout.slack
        return min(blocks, self._layout.most(self.window, blocks) + slack)

    def fits(self, blocks: int, hits: list[int]) -> bool:
        """Whether a sequence of `blocks` that begins with cached ones can be promised all that it may need."""
        if self.window is None:
            in_use = sum(self.users[block] > 0 for block in hits)
            return blocks - in_use <= self.available
        reserved = self._reserved + self._layout.most(self.window, blocks) + self._layout.slack
        return min(reserved, self._whole + blocks) <= self.num_blocks

    def reserve(self, blocks: int, hits: list[int]) -> None:
        for block in hits:
            self.idle.pop(block, None)
            self.users[block] += 1
        self._whole += blocks
        self._reserved += (
            blocks - len(hits) if self.window is None else self._layout.most(self.window, blocks)
        )

    def unreserve(self, blocks: int, taken: int) -> None:
        self._whole -= blocks
        self._reserved -= blocks - taken if self.window is None else self._layout.most(self.window, blocks)

    def take(self) -> int:
        block = self.free.pop() if self.free else self._evict()
        self.users[block] = 1
        if self.window is None:
            self._reserved -= 1
        return block

    def offer(self, block: int, digest: bytes) -> None:
        # Unless another sequence computed the same: then this one is freed after use.
        if digest not in self.cached:
            self.cached[digest] = block
            self.digests[block] = digest

    def give_back(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            if self.users[block]:
                continue
            if block in self.digests:
                self.idle[block] = None
            else:
                self.free.append(block)

    def _evict(self) -> int:
        block, _ = self.idle.popitem(last=False)
        del self.cached[self.digests.pop(block)]
        return block
