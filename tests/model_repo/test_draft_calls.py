"""Calls of draft and target as the engine models get them, by release; the engines are scripts that keep what comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "model_repo" / "tensorrt_llm_bls" / "1"))
from draft_calls import AnswerMetrics, EnginePair
from draft_target import DecodePosition, DraftTarget, Proposal, TargetOutput
from engine_call import logits_type
from shared.refusal import RequestRefused
from shared.seeds import call_seed
from speculation import DraftHealth, DraftSettings, TargetBehaviour

from pipeline.contracts.inflight_batcher import tensors, versions

Arrays = Mapping[str, np.ndarray[Any, Any]]


class Engine:
    """Answers with what it is told to, and keeps what it is asked."""

    def __init__(self, *answers: Arrays | Exception | Sequence[Arrays]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.timeouts: list[float | None] = []
        self.stopped: list[str] = []
        self.during: Callable[[], None] = lambda: None

    def responses(
        self,
        request_id: str,
        inputs: Arrays,
        outputs: Sequence[str],
        *,
        timeout_s: float | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
    ) -> Iterator[Arrays]:
        assert on_tokens is None, "these tests have no streams of single tokens"
        self.asked.append({"id": request_id, "outputs": list(outputs), **inputs})
        self.timeouts.append(timeout_s)
        self.during()
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        yield from [given] if isinstance(given, dict) else given

    def stop(self, request_id: str) -> None:
        self.stopped.append(request_id)


def tokens(*ids: int, **more: Any) -> dict[str, Any]:
    return {
        "output_ids": np.array([[ids]], np.int32).reshape(1, 1, -1),
        "sequence_length": np.array([[len(ids)]]),
    } | {name: np.array([[value]]) for name, value in more.items()}


def config(version: str) -> dict[str, Any]:
    have = tensors("tensorrt_llm_bls", version)
    return {
        "input": [{"name": tensor.name} for tensor in have.inputs],
        "output": [{"name": tensor.name, "data_type": tensor.data_type} for tensor in have.outputs],
    }


INPUTS: dict[str, Any] = {
    "input_ids": np.array([[1, 2]], np.int32),
    "request_output_len": np.array([[9]], np.int32),
    "runtime_top_k": np.array([[5]], np.int32),
    "embedding_bias": np.zeros((1, 8), np.float32),
    "lora_task_id": np.array([[7]], np.uint64),
    "streaming": np.array([[True]]),
    "exclude_input_in_output": np.array([[False]]),
}
AT = DecodePosition((1, 2, 3), 1, 0)


def pair(
    target: Engine, draft: Engine, version: str = "1.2.1", inputs: Arrays = INPUTS, **more: Any
) -> EnginePair:
    settings = {name: more.pop(name) for name in ("acceptance_threshold", "behaviour") if name in more}
    settings["logits"] = more.pop("logits", logits_type(config(version)))
    speculation = DraftSettings(draft, DraftHealth(print), max_draft_tokens=4, **settings)  # type: ignore[arg-type]
    rest = {"request_id": "an id", "streams": True, "log_probs": False, "use_logits": False} | more
    return EnginePair(target, speculation, inputs, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", versions())
@pytest.mark.parametrize("use_logits", [False, True])
def test_every_call_has_tensors_of_the_release(version: str, use_logits: bool) -> None:
    target, draft = Engine(tokens(4, 5), tokens(6, 7)), Engine(tokens(4) | {
        "generation_logits": np.zeros((1, 1, 1, 8), np.float32)
    })  # fmt: skip
    inputs = INPUTS | {
        "seed": np.array([[3]], np.uint64),
        "min_tokens": np.array([[6]], np.int32),
    }
    both = pair(
        target, draft, version, inputs, use_logits=use_logits, acceptance_threshold=0.5, log_probs=True
    )
    at = replace(AT, min_tokens=5)
    both.verify(at, both.propose(at, 1))
    list(both.go_on(at, 3))
    have = tensors("tensorrt_llm", version)
    for asked in (*target.asked, *draft.asked):
        given = set(asked) - {"id", "outputs"}
        assert given <= {tensor.name for tensor in have.inputs}
        assert set(asked["outputs"]) <= {tensor.name for tensor in have.outputs}
        assert asked["min_tokens"].item() == 5
        assert "seed" in given
        for tensor in have.inputs:
            if tensor.name in given and tensor.dims == (1,):
                assert asked[tensor.name].shape == (1, 1), tensor.name
    assert ("draft_acceptance_threshold" in target.asked[0]) is use_logits
    assert ("draft_logits" in target.asked[0]) is use_logits
    assert "draft_input_ids" not in target.asked[1]


def test_what_each_model_is_asked() -> None:
    target, draft = Engine(tokens(4, 5, 8)), Engine(tokens(4, 5))
    both = pair(target, draft)
    assert both.propose(AT, 2) == Proposal((4, 5))
    assert both.verify(AT, Proposal((4, 5))) == TargetOutput((4, 5, 8))
    for asked, count in ((draft.asked[0], 2), (target.asked[0], 3)):
        assert asked["input_ids"].tolist() == [[1, 2, 3]]
        assert asked["input_lengths"].item() == 3
        assert asked["request_output_len"].item() == count
        assert asked["streaming"].item() is False
        assert asked["exclude_input_in_output"].item() is True
        assert asked["embedding_bias"].shape == (1, 8)
        assert asked["id"] == "an id"
    assert target.asked[0]["draft_input_ids"].tolist() == [[4, 5]]
    assert ("lora_task_id" in target.asked[0], "lora_task_id" in draft.asked[0]) == (True, False)
    assert (target.timeouts, draft.timeouts) == ([None], [10.0])


@pytest.mark.parametrize(
    ("says", "checked"), [({}, None), ({"total_draft_tokens": 0}, None), ({"total_draft_tokens": 1}, 1)]
)
def test_how_many_were_checked_is_what_the_engine_says(says: dict[str, int], checked: int | None) -> None:
    assert pair(Engine(tokens(4, **says)), Engine()).verify(AT, Proposal((4, 5))).checked == checked


def test_each_round_has_a_seed_of_its_own() -> None:
    seeds = {call_seed(5, made, tag) for made in range(100) for tag in (0, 1)}
    assert len(seeds) == 200
    assert call_seed(5, 0, 0) == 5  # the target alone answers as ever
    assert max(seeds) < 2**64

    for use_logits in (False, True):
        target, draft = (
            Engine(tokens(4)),
            Engine(tokens(4) | {"generation_logits": np.zeros((1, 1, 1, 8), np.float32)}),
        )
        both = pair(
            target, draft, inputs=INPUTS | {"seed": np.array([[5]], np.uint64)}, use_logits=use_logits
        )
        both.verify(AT, both.propose(AT, 1))
        same = target.asked[0]["seed"] == draft.asked[0]["seed"]
        assert same.item() is not use_logits  # the dice that judge must not be those that proposed
        assert target.asked[0]["seed"].item() != 5
    unseeded = [pair(Engine(tokens(4)), Engine()) for _ in range(2)]
    for both in unseeded:
        both.verify(AT, Proposal())
    assert unseeded[0]._target.asked[0]["seed"] != unseeded[1]._target.asked[0]["seed"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_logits_have_the_type_of_the_targets_input(kind: Any) -> None:
    given = np.arange(24, dtype=np.float32).reshape(1, 1, 3, 8)
    target, draft = Engine(tokens(4, 5)), Engine(tokens(4, 5) | {"generation_logits": given})
    both = pair(target, draft, use_logits=True, logits=kind)
    both.verify(AT, both.propose(AT, 3))
    logits = target.asked[0]["draft_logits"]
    assert (logits.dtype, logits.shape) == (kind, (1, 2, 8))
    assert np.array_equal(logits[0], given[0, 0, :2])
    assert "draft_acceptance_threshold" not in target.asked[0]


def test_too_few_logits_are_a_failure_of_the_draft() -> None:
    draft = Engine(
        tokens(4, 5) | {"generation_logits": np.zeros((1, 1, 1, 8), np.float32)}
    )  # fast logits, for one
    with pytest.raises(ValueError, match="2 tokens came with logits for 1"):
        pair(Engine(), draft, use_logits=True).propose(AT, 2)


def test_an_engine_that_ends_after_each_step_is_asked_on(capsys: pytest.CaptureFixture[str]) -> None:
    behaviour = TargetBehaviour()
    target = Engine(tokens(4), tokens(5), [tokens(6)], tokens())
    both = pair(target, Engine(), inputs=INPUTS, behaviour=behaviour)
    assert [made.tokens for made in both.go_on(replace(AT, min_tokens=2), 9)] == [(4,), (5,), (6,), ()]
    assert [asked["input_ids"].size for asked in target.asked] == [3, 4, 5, 6]
    assert [asked["request_output_len"].item() for asked in target.asked] == [9, 8, 7, 6]
    assert [asked["min_tokens"].item() for asked in target.asked if "min_tokens" in asked] == [2, 1]
    assert not behaviour.goes_on
    capsys.readouterr()


def test_an_engine_that_goes_on_is_taken_at_its_word() -> None:
    behaviour = TargetBehaviour()
    target = Engine([tokens(4), tokens(5), tokens()], tokens(6))
    first, second = (pair(target, Engine(), behaviour=behaviour) for _ in range(2))
    assert [made.tokens for made in first.go_on(AT, 9)] == [(4,), (5,), ()]
    assert behaviour.goes_on
    assert [made.tokens for made in second.go_on(AT, 9)] == [(6,)]  # one token, and the end


def test_log_probs_add_up_over_calls() -> None:
    def step(token: int, total: float) -> dict[str, Any]:
        return tokens(token, cum_log_probs=total) | {"output_log_probs": np.array([[[total]]], np.float32)}

    target = Engine(step(4, -1.0), step(5, -2.0), tokens())
    made = list(pair(target, Engine(), log_probs=True).go_on(AT, 9))
    assert [output.cum_log_prob for output in made] == [-1.0, -3.0, -3.0]
    assert [output.log_probs for output in made] == [(-1.0,), (-2.0,), ()]


def test_stop_reaches_the_model_whose_call_is_under_way() -> None:
    target, draft = Engine(tokens(4)), Engine(tokens())
    both = pair(target, draft)
    draft.during = both.stop
    assert both.propose(AT, 2) == Proposal()
    assert draft.stopped
    assert not target.stopped
    assert both.verify(AT, Proposal()) == TargetOutput(())  # no further call
    assert not target.asked


def test_a_stop_that_came_too_early_is_said_again() -> None:
    """The call was not yet known to its model; with its first token it is."""
    target = Engine([tokens(4), tokens(5)])
    both = pair(target, Engine())
    answer = both.go_on(AT, 9)
    next(answer)
    both._running.clear()  # as before the call began
    both.stop()
    assert not target.stopped
    list(answer)
    assert target.stopped == ["an id"]


def test_a_draft_that_cannot_be_stopped_is_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(Engine):
        def stop(self, request_id: str) -> None:
            raise ConnectionError(f"no {request_id}")

    draft = Gone(tokens())
    both = pair(Engine(), draft)
    draft.during = both.stop
    both.propose(AT, 2)
    assert "goes on alone: no an id" in capsys.readouterr().out


def test_reasons_are_said_once_and_a_lost_draft_is_left_alone_for_a_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("speculation.time.monotonic", lambda: now)
    health = DraftHealth(print)
    for length in (5, 6):
        health.failed(RequestRefused(f"{length} tokens\nare too many"))
    assert (
        capsys.readouterr().out == "the draft model failed, the target goes on alone: 5 tokens are too many\n"
    )
    assert health.is_up()
    health.failed(ConnectionError())
    assert "ConnectionError" in capsys.readouterr().out
    assert not health.is_up()
    now += 6
    assert health.is_up()


def test_metrics_of_many_calls() -> None:
    def outputs(**values: int) -> dict[str, Any]:
        return {name: np.array([[value]], np.int64) for name, value in values.items()}

    metrics = AnswerMetrics()
    metrics.add_draft(
        outputs(arrival_time_ns=1, first_scheduled_time_ns=2, first_token_time_ns=3, last_token_time_ns=4)
    )
    for call in (10, 20):
        metrics.add_target(
            outputs(
                arrival_time_ns=call, first_scheduled_time_ns=call + 1, first_token_time_ns=call + 2,
                last_token_time_ns=call + 3, kv_cache_alloc_new_blocks=call, kv_cache_reused_blocks=call + 4,
                kv_cache_alloc_total_blocks=call + 5, total_draft_tokens=1, acceptance_rate=1,
            )
        )  # fmt: skip
    whole = metrics.outputs(proposed=8, accepted=6, inputs=3, made=9)
    assert {name: value.item() for name, value in whole.items()} == {
        "arrival_time_ns": 1, "first_scheduled_time_ns": 2, "first_token_time_ns": 12, "last_token_time_ns": 23,
        "kv_cache_alloc_new_blocks": 30, "kv_cache_reused_blocks": 14, "kv_cache_alloc_total_blocks": 25,
        "total_draft_tokens": 8, "total_accepted_draft_tokens": 6, "acceptance_rate": 0.75,
        "num_input_tokens": 3, "num_output_tokens": 9,
    }  # fmt: skip


def test_an_answer_from_both() -> None:
    target = Engine(tokens(4), tokens(5, 6, total_draft_tokens=1), tokens(7, total_draft_tokens=2))
    both = pair(target, Engine(tokens(4, 5), tokens(7, 8)))
    loop = DraftTarget(both, [1, 2], max_tokens=9, draft_tokens=2)
    assert [step.tokens for step in loop.steps()] == [(4,), (5, 6), (7,)]
    assert [asked["input_ids"].tolist()[0] for asked in target.asked] == [[1, 2], [1, 2, 4], [1, 2, 4, 5, 6]]
    assert [asked["draft_input_ids"].tolist() for asked in target.asked[1:]] == [[[5]], [[7, 8]]]
    assert (loop.proposed, loop.accepted) == (3, 2)


FULL = RequestRefused("[request id: x] Exceeds maximum queue size")


def test_a_round_waits_while_the_queue_is_full() -> None:
    target = Engine(FULL, FULL, tokens(4))
    assert pair(target, Engine()).verify(AT, Proposal()) == TargetOutput((4,))
    assert len(target.asked) == 3


def test_what_is_refused_for_another_reason_is_refused() -> None:
    with pytest.raises(RequestRefused, match="too long"):
        pair(Engine(RequestRefused("too long")), Engine()).verify(AT, Proposal())


def test_it_waits_no_longer_than_its_answer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Engine(FULL, FULL, FULL)
    both = pair(target, Engine())
    target.during = lambda: both.stop() if len(target.asked) == 2 else None
    assert both.verify(AT, Proposal()) == TargetOutput(())
    assert len(target.asked) == 2
    monkeypatch.setattr("draft_calls.DEADLINE_S", -1.0)
    with pytest.raises(RequestRefused, match="maximum queue size"):
        pair(Engine(FULL), Engine()).verify(AT, Proposal())
