"""The loop of draft and target with models that are scripts: whatever the draft says, the target's text comes out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repo" / "tensorrt_llm_bls" / "1"))
from draft_target import DecodePosition, DraftTarget, Proposal, TargetOutput, VerifiedTokens

VOCABULARY = 5  # few, so that drafts are often right and stop words often there
END = 0
Words = tuple[tuple[int, ...], ...]
Model = Callable[[Sequence[int]], int]  # the next token after these


@dataclass
class ModelPair:
    """A target that does what the C++ backend does: it ends at `end_id`, which stays out, and at stop words."""

    target: Model
    draft: Model
    stop_words: Words = ()
    end_id: int | None = END
    fails_at: int | None = None  # call of the draft that raises
    drops: int = 0  # draft tokens that the engine has no room for
    says_checked: bool = False
    calls: list[tuple[str, int]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    on_call: Callable[[str], None] = lambda _: None

    def propose(self, at: DecodePosition, count: int) -> Proposal:
        self._called("propose", count)
        if self.fails_at is not None and sum(name == "propose" for name, _ in self.calls) > self.fails_at:
            raise ConnectionError("the draft is gone")
        return Proposal(tuple(self._generate(self.draft, at, count)))

    def verify(self, at: DecodePosition, proposal: Proposal) -> TargetOutput:
        self._called("verify", len(proposal.tokens))
        checked = proposal.tokens[: max(1, len(proposal.tokens) - self.drops)]
        made: list[int] = []
        for token in self._generate(self.target, at, len(checked) + 1):
            made.append(token)
            if len(made) > len(checked) or token != checked[len(made) - 1]:
                break
        return TargetOutput(tuple(made), checked=len(checked) if self.says_checked else None)

    def go_on(self, at: DecodePosition, count: int) -> Iterator[TargetOutput]:
        self._called("go_on", count)
        for token in self._generate(self.target, at, count):
            yield TargetOutput((token,))

    def give_up(self, error: Exception) -> None:
        self.errors.append(error)

    def _called(self, name: str, count: int) -> None:
        self.calls.append((name, count))
        self.on_call(name)

    def _generate(self, model: Model, at: DecodePosition, count: int) -> Iterator[int]:
        tokens = list(at.tokens)
        for made in range(count):
            token = model(tokens)
            if token == self.end_id:
                if made >= at.min_tokens:
                    return
                token = 1
            yield token
            tokens.append(token)
            if any(tuple(tokens[-len(word) :]) == word for word in self.stop_words):
                return


def scripted(seed: int) -> Model:
    return lambda tokens: hash((seed, *tokens[-3:], len(tokens))) % VOCABULARY


def run(pair: ModelPair, prompt: Sequence[int], **limits: int) -> tuple[list[VerifiedTokens], DraftTarget]:
    loop = DraftTarget(pair, prompt, stop_words=pair.stop_words, **limits)
    return list(loop.steps()), loop


def tokens_of(steps: Sequence[VerifiedTokens]) -> list[int]:
    return [token for step in steps for token in step.tokens]


seeds = st.integers(0, 1000)
prompts = st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=4)
stop_words = st.lists(
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=4).map(tuple), max_size=3
).map(tuple)


@given(
    target=seeds,
    draft=st.one_of(st.none(), seeds),
    prompt=prompts,
    words=stop_words,
    max_tokens=st.integers(1, 30),
    draft_tokens=st.integers(1, 8),
    min_tokens=st.integers(0, 12),
    end_id=st.sampled_from([None, END, 3]),
    fails_at=st.one_of(st.none(), st.integers(0, 4)),
    drops=st.integers(0, 3),
    adapts=st.booleans(),
)
def test_any_draft_gives_the_text_of_the_target(
    target: int,
    draft: int | None,
    prompt: list[int],
    words: Words,
    max_tokens: int,
    draft_tokens: int,
    min_tokens: int,
    end_id: int | None,
    fails_at: int | None,
    drops: int,
    adapts: bool,
) -> None:
    scripts = scripted(target), scripted(target if draft is None else draft)
    alone = ModelPair(*scripts, words, end_id)
    pair = ModelPair(*scripts, words, end_id, fails_at, drops, says_checked=drops > 0)
    limits = {"max_tokens": max_tokens, "min_tokens": min_tokens}
    expected, _ = run(alone, prompt, draft_tokens=0, **limits)
    steps, loop = run(pair, prompt, draft_tokens=draft_tokens, adapts=adapts, **limits)
    assert tokens_of(steps) == tokens_of(expected)
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert loop.made == len(tokens_of(steps)) <= max_tokens
    assert 0 <= loop.accepted <= min(loop.proposed, loop.made)
    assert all(count <= draft_tokens for name, count in pair.calls if name == "propose")
    assert len(pair.errors) == (("go_on" in dict(pair.calls)) and fails_at is not None)
    if draft is None and fails_at is None and not drops:
        assert loop.rounds <= -(-loop.made // (draft_tokens + 1)) + 1
        assert loop.accepted == loop.proposed


def names(pair: ModelPair) -> list[str]:
    """Calls in order; of the first two, which run at once, the draft's first."""
    called = [name for name, _ in pair.calls]
    return sorted(called[:2]) + called[2:]


def test_tokens_go_out_after_each_round() -> None:
    pair = ModelPair(lambda tokens: 1 + len(tokens) % 4, lambda tokens: 1 + len(tokens) % 4)
    steps, loop = run(pair, [1], max_tokens=12, draft_tokens=3)
    assert [len(step.tokens) for step in steps] == [1, 3, 4, 4]
    assert (loop.rounds, loop.proposed, loop.accepted) == (3, 8, 8)
    assert names(pair) == ["propose", "verify", "verify", "propose", "verify", "propose", "verify"]


def test_fewer_are_proposed_where_few_are_kept() -> None:
    """And more again, where the draft is right again."""
    pair = ModelPair(
        lambda tokens: 1 + len(tokens) % 4, lambda tokens: 1 + len(tokens) % 4 if len(tokens) > 20 else 9
    )
    _, loop = run(pair, [1], max_tokens=60, draft_tokens=5, adapts=True)
    counts = [count for name, count in pair.calls if name == "propose"]
    assert counts[:6] == [5, 5, 4, 3, 2, 1]
    assert counts[-3:-1] == [5, 5]
    _, fixed = run(replace(pair, calls=[]), [1], max_tokens=60, draft_tokens=5)
    assert loop.proposed < 0.7 * fixed.proposed
    assert loop.accepted == pytest.approx(fixed.accepted, abs=4)


def test_a_head_start_that_began_otherwise_is_dropped() -> None:
    pair = ModelPair(
        lambda tokens: 1 + len(tokens) % 4, lambda tokens: 1 + len(tokens) % 4 if len(tokens) > 1 else 9
    )
    steps, loop = run(pair, [1], max_tokens=9, draft_tokens=3)
    assert [len(step.tokens) for step in steps] == [1, 4, 4]
    assert (loop.proposed, loop.accepted) == (6, 6)
    assert names(pair) == ["propose", "verify", "propose", "verify", "propose", "verify"]


def test_the_first_token_does_not_wait_for_the_draft() -> None:
    arrived = Event()

    def wait(name: str) -> None:
        if name == "propose":
            assert arrived.wait(10)

    pair = ModelPair(scripted(1), scripted(2), end_id=None, on_call=wait)
    steps = DraftTarget(pair, [1], max_tokens=9, draft_tokens=3).steps()
    assert len(next(steps).tokens) == 1
    arrived.set()
    assert len(tokens_of(list(steps))) == 8


def test_the_last_token_needs_no_draft() -> None:
    pair = ModelPair(scripted(1), lambda _: 4, end_id=None)
    run(pair, [1], max_tokens=1, draft_tokens=5)
    assert pair.calls == [("verify", 0)]


def test_logits_stay_beside_their_tokens() -> None:
    proposal = Proposal((4, 5, 6), [[4], [5], [6]])
    assert proposal.rest(1).first(1) == Proposal((5,), [[5]])
    assert Proposal((4, 5)).rest(1) == Proposal((5,))


def test_an_end_within_a_checked_block_is_the_end() -> None:
    """The target says nothing of why it made less; that it made only what it was given tells."""
    answer = [1, 2, 3, 4, END]
    pair = ModelPair(lambda tokens: answer[len(tokens) - 1], lambda tokens: 1 + (len(tokens) - 1) % 4)
    steps, loop = run(pair, [9], max_tokens=20, draft_tokens=7)
    assert [step.tokens for step in steps] == [(1,), (2, 3, 4)]
    assert names(pair) == ["propose", "verify", "verify"]
    assert (loop.proposed, loop.accepted) == (6, 3)


def test_a_block_that_the_engine_cut_is_no_end() -> None:
    """It checked two of three tokens, and its own is by chance the third: the answer goes on."""
    pair = ModelPair(
        lambda tokens: len(tokens) % 4 + 1, lambda tokens: len(tokens) % 4 + 1, drops=1, says_checked=True
    )
    steps, _ = run(pair, [1], max_tokens=9, draft_tokens=3)
    assert [len(step.tokens) for step in steps] == [1, 2, 3, 2, 1]


def test_a_stop_word_across_rounds() -> None:
    answer = [1, 2, 3, 4, 1, 2, 3, 4]
    pair = ModelPair(lambda tokens: answer[len(tokens) - 1], lambda _: 9, ((3, 4, 1, 2),), end_id=None)
    steps, _ = run(pair, [9], max_tokens=8, draft_tokens=2)
    assert tokens_of(steps) == [1, 2, 3, 4, 1, 2]
    assert steps[-1].last


@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_an_engine_that_knows_no_stop_words_is_cut(draft_tokens: int) -> None:
    pair = ModelPair(lambda tokens: len(tokens), lambda tokens: len(tokens), end_id=None)
    loop = DraftTarget(pair, [9], max_tokens=20, draft_tokens=draft_tokens, stop_words=((4, 5), (3, 4)))
    assert tokens_of(list(loop.steps())) == [1, 2, 3, 4]


@pytest.mark.parametrize(("fails_at", "calls"), [(0, 1), (1, 2)])
def test_a_failing_draft_is_not_asked_again(fails_at: int, calls: int) -> None:
    pair = ModelPair(
        lambda tokens: 1 + len(tokens) % 4, lambda tokens: 1 + len(tokens) % 4, fails_at=fails_at
    )
    steps, _ = run(pair, [1], max_tokens=20, draft_tokens=3)
    assert len(tokens_of(steps)) == 20
    assert names(pair).count("propose") == calls
    assert names(pair)[-1] == "go_on"
    assert [str(error) for error in pair.errors] == ["the draft is gone"]


def test_what_the_target_raises_is_raised() -> None:
    class Broken(ModelPair):
        def verify(self, at: DecodePosition, proposal: Proposal) -> TargetOutput:
            raise RuntimeError(f"no {len(at.tokens) + len(proposal.tokens)}")

    with pytest.raises(RuntimeError, match="no 1"):
        run(Broken(scripted(1), lambda _: 4), [1], max_tokens=9, draft_tokens=2)


@pytest.mark.parametrize(("during", "made"), [("propose", 4), ("verify", 8)])
def test_stop_ends_it_after_the_call(during: str, made: int) -> None:
    pair = ModelPair(lambda tokens: 1 + len(tokens) % 4, lambda tokens: 1 + len(tokens) % 4, end_id=None)
    loop = DraftTarget(pair, [1], max_tokens=100, draft_tokens=3)
    pair.on_call = lambda name: loop.stop() if name == during and loop.made == 4 else None
    steps = list(loop.steps())
    assert len(tokens_of(steps)) == made
    assert steps[-1] == VerifiedTokens((), last=True)
    assert len([name for name, _ in pair.calls if name == "propose"]) == 2


def test_log_probs_are_those_of_the_tokens_and_their_sum_is_of_all() -> None:
    class Sure(ModelPair):
        def verify(self, at: DecodePosition, proposal: Proposal) -> TargetOutput:
            made = super().verify(at, proposal)
            return TargetOutput(made.tokens, (-0.5,) * len(made.tokens), -0.5 * len(made.tokens))

        def go_on(self, at: DecodePosition, count: int) -> Iterator[TargetOutput]:
            for number, made in enumerate(super().go_on(at, count), 1):
                yield TargetOutput(made.tokens, (-0.25,), -0.25 * number)

    pair = Sure(scripted(1), scripted(1), end_id=None, fails_at=1)
    steps, _ = run(pair, [1], max_tokens=10, draft_tokens=3)
    assert [len(step.log_probs) for step in steps] == [len(step.tokens) for step in steps]
    assert steps[-1].cum_log_prob == -2.0 - 0.25 * 6
