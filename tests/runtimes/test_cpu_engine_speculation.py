"""A draft model changes how soon tokens come, never which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.runtimes.cpu.engine import EngineRequest, FinishReason, SamplingParams
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.speculation import AdaptiveDrafting, DraftMode
from tests.runtimes.conftest import Pair
from tests.support.engine import Answer, Broken, answer, finish_all, load, prompts, questions, request

END_ID = 5


def make(target: Path, draft: Path | None, **settings: Any) -> EngineCore:
    return load(target, draft, **{"max_concurrency": 16, "adapt_speculation": False} | settings)


@pytest.fixture(scope="module")
def alone(cpu_pair: Pair) -> EngineCore:
    return make(cpu_pair.target, None)


@pytest.fixture(scope="module")
def drafted(cpu_pair: Pair) -> EngineCore:
    return make(cpu_pair.target, cpu_pair.draft)


def test_questions_of_the_trained_kind_are_accepted_in_runs(alone: EngineCore, drafted: EngineCore) -> None:
    asked = [request(name, prompt, 48, end_id=END_ID) for name, prompt in enumerate(questions())]
    expected, got = answer(alone, *asked), answer(drafted, *asked)
    assert [answered.tokens for answered in got] == [answered.tokens for answered in expected]
    total = sum(answered.metrics.draft_tokens_total for answered in got)
    accepted = sum(answered.metrics.draft_tokens_accepted for answered in got)
    assert accepted / total > 0.4
    assert max(len(output.tokens) for answered in got for output in answered.outputs) == 6
    assert max(len(answered.outputs) for answered in got) < max(
        len(answered.outputs) for answered in expected
    )
    assert drafted.stats().acceptance > 0.4


@pytest.mark.parametrize("adapt", [False, True])
def test_joins_and_cancels_beside_a_draft(alone: EngineCore, cpu_pair: Pair, adapt: bool) -> None:
    asked = [request(name, prompt, 24) for name, prompt in enumerate(questions() + prompts(12))]
    expected = answer(alone, *asked)
    core = make(cpu_pair.target, cpu_pair.draft, adapt_speculation=adapt, max_concurrency=9)
    answers = [Answer() for _ in asked]
    for name, sink in enumerate(answers):
        core.add(asked[name], sink)
        core.step()
        if name in (6, 11):
            core.cancel(str(name - 1))
    finish_all(core)
    for name in set(range(16)) - {5, 10}:
        assert answers[name].tokens == expected[name].tokens, name
    stats = core.stats()
    assert stats.kv_blocks_used == 0
    assert stats.finished[FinishReason.CANCELLED] == 2


def variants(prompt: list[int], plain: list[int]) -> list[EngineRequest]:
    """Everything that shapes an answer, placed to strike within a run of accepted tokens."""
    common = {
        "end inside a run": {"end_id": plain[7]},
        "stop word inside a run": {"stop_words": (tuple(plain[6:8]),)},
        "minimum": {"end_id": plain[3], "min_new_tokens": 12},
        "bad word": {"bad_words": ((plain[4],), tuple(plain[8:10]))},
        "penalties": {
            "sampling": SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
        },
        "top k": {"sampling": SamplingParams(temperature=0.8, top_k=20, seed=1)},
        "top p": {"sampling": SamplingParams(top_p=0.9, seed=2)},
        "decay": {"sampling": SamplingParams(top_p=0.99, top_p_decay=0.9, top_p_reset_id=plain[5], seed=3)},
        "all at once": {
            "sampling": SamplingParams(temperature=1.2, top_p=0.95, repetition_penalty=1.1, seed=4),
            "bad_words": ((plain[2],),),
            "stop_words": ((plain[9],),),
            "log_probs": True,
        },
        "one token": {"tokens": 1},
        "two tokens": {"tokens": 2},
        "not wanted": {"speculate": False},
    }
    return [request(name, prompt, **{"tokens": 30} | more) for name, more in common.items()]


def test_everything_that_shapes_an_answer_works_token_by_token(
    alone: EngineCore, drafted: EngineCore, cpu_pair: Pair
) -> None:
    itself = make(cpu_pair.target, cpu_pair.target)  # as its own draft: everything is accepted
    prompt = questions()[0]
    (plain,) = answer(alone, request(0, prompt, 30))
    asked = variants(prompt, plain.tokens)
    expected = answer(alone, *asked)
    for core in (drafted, itself):
        for variant, before, made in zip(asked, expected, answer(core, *asked), strict=True):
            assert (made.tokens, made.finish) == (before.tokens, before.finish), variant.id
            assert made.log_probs == pytest.approx(before.log_probs, abs=1e-3)
            if variant.id in ("not wanted", "one token"):
                assert made.metrics.draft_tokens_total == 0
            elif core is itself:
                assert made.metrics.draft_tokens_accepted >= made.metrics.draft_tokens_total - 5
    assert itself.stats().acceptance > 0.9


def test_callers_drafts_beside_the_engines_own(alone: EngineCore, drafted: EngineCore) -> None:
    prompt = questions()[0]
    (plain,) = answer(alone, request(0, prompt, 30))
    (both,) = answer(drafted, request(0, prompt, 30, draft_tokens=tuple(plain.tokens[:5])))
    assert both.tokens == plain.tokens
    assert both.outputs[0].tokens == tuple(plain.tokens[:6])


def test_a_later_turn_finds_the_drafts_blocks_too(drafted: EngineCore, alone: EngineCore) -> None:
    prompt = questions()[0] * 4
    (first,) = answer(drafted, request(1, prompt, 20))
    asked = request(2, [*prompt, *first.tokens], 20)
    (second,), (expected,) = answer(drafted, asked), answer(alone, asked)
    assert second.tokens == expected.tokens
    assert second.metrics.kv_blocks_reused == (len(prompt) + 19) // 32


def test_a_failing_draft_model_is_given_up(cpu_pair: Pair, alone: EngineCore) -> None:
    core = make(cpu_pair.target, cpu_pair.draft)
    assert core._drafter is not None
    asked = [request(name, prompt, 20) for name, prompt in enumerate(questions())]
    expected = answer(alone, *asked)
    for after in range(4):
        core._drafter._model = Broken(core._drafter._model, 0)  # type: ignore[assignment]
        answers = [Answer() for _ in asked]
        for request_, sink in zip(asked, answers, strict=True):
            core.add(request_, sink)
        for _ in range(after):
            core.step()
        core._drafter._model.failures = 1
        finish_all(core)
        assert [answer.tokens for answer in answers] == [answered.tokens for answered in expected]
    assert core._scheduler._draft is not None
    assert core._scheduler._draft.used == 0


def test_models_of_different_vocabularies_are_refused(cpu_pair: Pair, tmp_path: Path) -> None:
    draft = copy_with(cpu_pair.draft, tmp_path, '"vocab_size": 2048', '"vocab_size": 4096')
    with pytest.raises(ValueError, match="vocabulary of 4096, the target of 2048"):
        make(cpu_pair.target, draft)


def drive(pace: AdaptiveDrafting, steps: int, gain: float, batch: int = 1) -> list[DraftMode]:
    modes = []
    for _ in range(steps):
        modes.append(pace.mode(batch))
        drafted = modes[-1] is not DraftMode.PLAIN
        pace.record(batch, drafted=drafted, tokens=10, seconds=1 / gain if drafted else 1)
    return modes


@pytest.mark.parametrize(("gain", "better"), [(1.5, DraftMode.DRAFT), (0.7, DraftMode.PLAIN)])
def test_pace_keeps_what_is_faster(gain: float, better: DraftMode) -> None:
    modes = drive(AdaptiveDrafting(), 2000, gain)
    assert modes.count(better) > 1800
    assert modes[-1] is better


def test_pace_notices_a_change_and_knows_batch_sizes_apart() -> None:
    pace = AdaptiveDrafting()
    drive(pace, 300, 1.5)
    assert drive(pace, 3000, 0.5)[-1] is DraftMode.PLAIN
    assert drive(pace, 300, 1.5, batch=8)[-1] is DraftMode.DRAFT
    assert pace.mode(1) is DraftMode.PLAIN
    assert pace.mode(9) is DraftMode.DRAFT


def test_a_draft_of_fewer_positions_helps_as_far_as_it_goes(
    cpu_pair: Pair, alone: EngineCore, tmp_path: Path
) -> None:
    draft = copy_with(
        cpu_pair.draft, tmp_path, '"max_position_embeddings": 1024', '"max_position_embeddings": 64'
    )
    core = make(cpu_pair.target, draft)
    short, long = request("short", questions()[0], 30), request("long", questions()[0] * 3, 30)
    answers = answer(core, short, long)
    assert [answer.tokens for answer in answers] == [
        answered.tokens for answered in answer(alone, short, long)
    ]
    assert answers[0].metrics.draft_tokens_total > 0
    assert answers[1].metrics.draft_tokens_total == 0


def copy_with(folder: Path, into: Path, old: str, new: str) -> Path:
    facts = (folder / "engine.json").read_text()
    assert old in facts
    (into / "engine.json").write_text(facts.replace(old, new))
    for name in ("openvino_model.xml", "openvino_model.bin"):
        (into / name).symlink_to(folder / name)
    return into
