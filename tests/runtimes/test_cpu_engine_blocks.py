"""The KV cache's bookkeeping: nothing is lost, nothing is given twice, and what is shared is shared rightly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pipeline.runtimes.cpu.engine.block_manager import BlockManager, Pages

SIZE = 4


def fill(blocks: BlockManager, pages: Pages, tokens: list[int]) -> None:
    blocks.extend(pages, len(tokens))
    blocks.publish(pages, tokens, len(tokens))


def admit(blocks: BlockManager, tokens: list[int], max_tokens: int) -> Pages:
    pages = blocks.admit(tokens, max_tokens)
    assert pages is not None
    return pages


def test_a_prompt_with_the_same_beginning_takes_its_blocks() -> None:
    blocks = BlockManager(16, SIZE)
    first = admit(blocks, list(range(10)), 12)
    fill(blocks, first, list(range(10)))
    second = admit(blocks, [*range(9), 99], 12)
    assert second.reused == 2
    assert second.filled == 8
    assert second.table[:2].tolist() == first.table[:2].tolist()
    assert (
        admit(blocks, [99, *range(1, 9)], 12).reused == 0
    )  # a block is named by all that comes before it, too


def test_the_last_token_is_always_computed() -> None:
    blocks = BlockManager(16, SIZE)
    first = admit(blocks, list(range(8)), 8)
    fill(blocks, first, list(range(8)))
    assert admit(blocks, list(range(8)), 8).filled == 4


def test_blocks_are_cached_after_use_and_the_longest_unused_go_first() -> None:
    blocks = BlockManager(4, SIZE)
    for start in (0, 100):
        pages = admit(blocks, [*range(start, start + 8)], 8)
        fill(blocks, pages, [*range(start, start + 8)])
        blocks.release(pages)
    assert blocks.used == 0
    assert blocks.cached == 4
    newcomer = admit(blocks, [7] * 4, 4)
    fill(blocks, newcomer, [7] * 4)  # evicts the end of the older one
    blocks.release(newcomer)
    for start, reused in ((0, 1), (100, 2)):
        pages = admit(blocks, [*range(start, start + 9)], 9)
        assert pages.reused == reused
        blocks.release(pages)


def test_without_caching_nothing_is_reused() -> None:
    blocks = BlockManager(8, SIZE, caching=False)
    pages = admit(blocks, [*range(8)], 8)
    fill(blocks, pages, [*range(8)])
    blocks.release(pages)
    assert blocks.cached == 0
    assert admit(blocks, [*range(8)], 8).reused == 0


def test_the_worst_case_is_reserved() -> None:
    blocks = BlockManager(4, SIZE)
    first = admit(blocks, [1], 12)
    assert blocks.used == 0
    assert blocks.available == 1
    assert blocks.admit([2], 5) is None
    second = admit(blocks, [2], 4)
    blocks.extend(first, 12)
    blocks.extend(second, 4)
    with pytest.raises(IndexError, match="reserved"):
        blocks.extend(second, 5)


class Machine(RuleBasedStateMachine):
    """Random sequences over two tokens, so that beginnings coincide all the time."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(12, SIZE)
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, as computed
        self.held: list[tuple[list[int], Pages]] = []

    @rule(
        target=live,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        more=st.integers(1, 12),
    )
    def admit(self, prompt: list[int], more: int) -> tuple[list[int], Pages] | None:
        available = self.blocks.available
        pages = self.blocks.admit(prompt, len(prompt) + more)
        if pages is None:
            return None
        assert available >= self.blocks.available >= 0
        assert pages.filled < len(prompt)
        for index in range(pages.reused):  # what is reused is what would have been computed
            assert self.content[int(pages.table[index])] == tuple(prompt[: (index + 1) * SIZE])
        sequence = (list(prompt), pages)
        self.held.append(sequence)
        return sequence

    @rule(sequence=live, count=st.integers(1, 9), token=st.integers(0, 1), rejected=st.integers(0, 3))
    def compute(
        self, sequence: tuple[list[int], Pages] | None, count: int, token: int, rejected: int
    ) -> None:
        if sequence is None or sequence not in self.held:
            return
        tokens, pages = sequence
        room = len(pages.table) * SIZE
        end = min(pages.filled + count, len(tokens))
        self.blocks.extend(pages, min(end + rejected, room))
        for position in range(pages.filled, end):
            self.content[int(pages.table[position // SIZE])] = tuple(tokens[: position + 1])
        self.blocks.publish(pages, tokens, end)
        if end == len(tokens) and len(tokens) < room:
            tokens.append(token)

    @rule(sequence=consumes(live))
    def release(self, sequence: tuple[list[int], Pages] | None) -> None:
        if sequence is not None and sequence in self.held:
            self.held.remove(sequence)
            self.blocks.release(sequence[1])

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        users = Counter(block for _, pages in self.held for block in pages.table[: pages.count].tolist())
        assert self.blocks._users == [users[block] for block in range(12)]
        free, idle = self.blocks._free, list(self.blocks._idle)
        assert sorted([*free, *idle, *users]) == list(range(12))
        assert self.blocks.used == len(users)

    @invariant()
    def reservations_can_be_kept(self) -> None:
        assert self.blocks._reserved == sum(pages.reserved for _, pages in self.held)
        assert self.blocks.available >= 0

    @invariant()
    def names_and_blocks_agree(self) -> None:
        assert {block: name for name, block in self.blocks._cached.items()} == self.blocks._digests
        assert set(self.blocks._idle) <= set(self.blocks._digests)

    @precondition(lambda self: not self.held)
    @rule()
    def all_comes_back(self) -> None:
        assert self.blocks.available == 12


Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
test_random_use = Machine.TestCase
