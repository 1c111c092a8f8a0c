"""The KV cache's bookkeeping: nothing is lost, nothing is given twice, and what is shared is shared rightly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from pipeline.runtimes.cpu.engine.block_manager import BlockManager, CacheLayout, Pages

SIZE = 4


def fill(blocks: BlockManager, pages: Pages, tokens: list[int]) -> None:
    blocks.extend(pages, len(tokens))
    blocks.publish(pages, tokens, len(tokens))


def admit(blocks: BlockManager, tokens: list[int], max_tokens: int) -> Pages:
    pages = blocks.admit(tokens, max_tokens)
    assert pages is not None
    return pages


def table(pages: Pages, group: int = 0) -> list[int]:
    """Blocks of a sequence in a group."""
    held = pages.tables[group]
    return held.blocks[held.first : pages.count].tolist()


def test_a_prompt_with_the_same_beginning_takes_its_blocks() -> None:
    blocks = BlockManager([16], CacheLayout(SIZE))
    first = admit(blocks, list(range(10)), 12)
    fill(blocks, first, list(range(10)))
    second = admit(blocks, [*range(9), 99], 12)
    assert second.reused == 2
    assert second.filled == 8
    assert table(second)[:2] == table(first)[:2]
    assert (
        admit(blocks, [99, *range(1, 9)], 12).reused == 0
    )  # a block is named by all that comes before it, too


def test_the_last_token_is_always_computed() -> None:
    blocks = BlockManager([16], CacheLayout(SIZE))
    first = admit(blocks, list(range(8)), 8)
    fill(blocks, first, list(range(8)))
    assert admit(blocks, list(range(8)), 8).filled == 4


def test_blocks_are_cached_after_use_and_the_longest_unused_go_first() -> None:
    blocks = BlockManager([4], CacheLayout(SIZE))
    for start in (0, 100):
        pages = admit(blocks, [*range(start, start + 8)], 8)
        fill(blocks, pages, [*range(start, start + 8)])
        blocks.release(pages)
    assert blocks.used == 0
    newcomer = admit(blocks, [7] * 4, 4)
    fill(blocks, newcomer, [7] * 4)  # evicts the end of the older one
    blocks.release(newcomer)
    for start, reused in ((0, 1), (100, 2)):
        pages = admit(blocks, [*range(start, start + 9)], 9)
        assert pages.reused == reused
        blocks.release(pages)


def test_without_caching_nothing_is_reused() -> None:
    blocks = BlockManager([8], CacheLayout(SIZE), caching=False)
    pages = admit(blocks, [*range(8)], 8)
    fill(blocks, pages, [*range(8)])
    blocks.release(pages)
    assert admit(blocks, [*range(8)], 8).reused == 0


def test_the_worst_case_is_reserved() -> None:
    blocks = BlockManager([4], CacheLayout(SIZE))
    first = admit(blocks, [1], 12)
    assert blocks.used == 0
    assert blocks.available == 1
    assert blocks.admit([2], 5) is None
    second = admit(blocks, [2], 4)
    blocks.extend(first, 12)
    blocks.extend(second, 4)
    with pytest.raises(IndexError, match="reserved"):
        blocks.extend(second, 5)


def test_a_window_gives_back_what_no_later_token_sees() -> None:
    """A step of a prompt still has all that its first token sees; memory does not grow with the sequence."""
    layout = CacheLayout(SIZE, (None, 6), step_tokens=4)
    pools = layout.pools(100, 100)
    assert pools == [100, layout.most(6, 100) + 1]
    blocks = BlockManager(pools, layout)
    tokens = list(range(400))
    pages = admit(blocks, tokens, 400)
    for filled in range(0, 400, SIZE):
        blocks.extend(pages, filled + SIZE)
        assert pages.tables[1].first * SIZE <= max(0, filled - 6)
        assert len(table(pages, 1)) <= pools[1]
        blocks.publish(pages, tokens, filled + SIZE)
    assert (len(table(pages)), len(table(pages, 1))) == (100, 2)
    assert blocks.used == 102


def test_a_beginning_is_reused_only_while_its_window_is_there() -> None:
    layout = CacheLayout(SIZE, (None, 6), step_tokens=SIZE)
    blocks = BlockManager([40, 12], layout)
    for start in (0, 100, 200):  # each leaves 6 blocks of the window, of which the last 2 matter at its end
        tokens = list(range(start, start + 24))
        pages = admit(blocks, tokens, 24)
        for filled in range(SIZE, 25, SIZE):
            blocks.extend(pages, filled)
            blocks.publish(pages, tokens, filled)
        blocks.release(pages)
    for start, reused in ((0, 0), (100, 24), (200, 24)):
        pages = admit(blocks, [*range(start, start + 24), 9], 25)
        assert pages.filled == reused
        assert pages.tables[1].first == max(0, reused - 6) // SIZE
        blocks.release(pages)


LAYOUTS = (
    CacheLayout(SIZE),
    CacheLayout(SIZE, (None, 6), step_tokens=9, draft_tokens=3),
    CacheLayout(SIZE, (5, 9), step_tokens=9, draft_tokens=3),
)


class Machine(RuleBasedStateMachine):
    """Random sequences over two tokens, so that beginnings coincide all the time."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[list[int], Pages]] = []

    @initialize(layout=st.sampled_from(LAYOUTS))
    def start(self, layout: CacheLayout) -> None:
        self.blocks = BlockManager(layout.pools(12, 9), layout)
        # By group: block -> all tokens up to its end, as computed.
        self.content: list[dict[int, tuple[int, ...]]] = [{} for _ in layout.windows]

    @rule(
        target=live,
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        more=st.integers(1, 12),
    )
    def admit(self, prompt: list[int], more: int) -> tuple[list[int], Pages] | None:
        available = self.blocks.available
        pages = self.blocks.admit(prompt, len(prompt) + more)
        if pages is None:
            assert self.held, "alone, every sequence fits"
            return None
        assert available >= self.blocks.available >= 0
        assert pages.filled < len(prompt)
        assert pages.reused == sum(len(table(pages, group)) for group in range(len(self.content)))
        self.sees_its_windows(prompt, pages)
        sequence = (list(prompt), pages)
        self.held.append(sequence)
        return sequence

    def sees_its_windows(self, tokens: list[int], pages: Pages) -> None:
        """Each group has all that the next token sees, and there is in it what would have been computed."""
        for group, window in enumerate(self.blocks.layout.windows):
            first = 0 if window is None else max(0, pages.filled + 1 - window) // SIZE
            held = pages.tables[group]
            assert held.first <= first
            for index in range(held.first, pages.filled // SIZE):
                written = self.content[group][int(held.blocks[index])]
                assert written == tuple(tokens[: (index + 1) * SIZE])

    @rule(sequence=live, count=st.integers(1, 9), token=st.integers(0, 1), rejected=st.integers(0, 3))
    def compute(
        self, sequence: tuple[list[int], Pages] | None, count: int, token: int, rejected: int
    ) -> None:
        if sequence is None or sequence not in self.held:
            return
        tokens, pages = sequence
        room = pages.max_blocks * SIZE
        end = min(pages.filled + count, len(tokens))
        self.blocks.extend(pages, min(end + rejected, room))
        for position in range(pages.filled, end):
            for content, held in zip(self.content, pages.tables, strict=True):
                content[int(held.blocks[position // SIZE])] = tuple(tokens[: position + 1])
        self.blocks.publish(pages, tokens, end)
        self.sees_its_windows(tokens, pages)
        if end == len(tokens) and len(tokens) < room:
            tokens.append(token)

    @rule(sequence=consumes(live))
    def release(self, sequence: tuple[list[int], Pages] | None) -> None:
        if sequence is not None and sequence in self.held:
            self.held.remove(sequence)
            self.blocks.release(sequence[1])

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        used = 0
        for group, pool in enumerate(self.blocks._pools):
            users = Counter(block for _, pages in self.held for block in table(pages, group))
            assert pool.users == [users[block] for block in range(pool.num_blocks)]
            assert sorted([*pool.free, *pool.idle, *users]) == list(range(pool.num_blocks))
            used += len(users)
        assert self.blocks.used == used

    @invariant()
    def reservations_can_be_kept(self) -> None:
        for pool in self.blocks._pools:
            assert pool.available >= 0
            if pool.window is None:
                assert pool._reserved == sum(pages.max_blocks - pages.count for _, pages in self.held)

    @invariant()
    def names_and_blocks_agree(self) -> None:
        for pool in self.blocks._pools:
            assert {block: name for name, block in pool.cached.items()} == pool.digests
            assert set(pool.idle) <= set(pool.digests)

    @precondition(lambda self: not self.held)
    @rule()
    def all_comes_back(self) -> None:
        assert self.blocks.available == self.blocks.num_blocks


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_random_use = Machine.TestCase
