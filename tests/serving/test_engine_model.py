"""The engine's own model, asked with token ids as `pipeline compare` and `pipeline accept` ask it."""

from __future__ import annotations

import pytest

from pipeline.bench.engine_model import EngineModel
from pipeline.errors import ServerError
from pipeline.reading import read_tokenizer
from pipeline.serving.server import TritonServer
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from tests.support import CHECKPOINTS


def test_an_engine_scores_its_own_answers_as_it_told_them(server: TritonServer) -> None:
    """Token by token, from the logits of requests for one token each, what the answer's log probabilities were."""
    deployment = server.deployment
    model = EngineModel(server.grpc_url, deployment.end_id, deployment.pad_id)
    tokenizer = read_tokenizer(CHECKPOINTS / "support-target" / "tokenizer.json")
    prompts = [tokenizer.encode(text).ids for text in ("Is there any warranty", "My order")]
    answers = model.answers([(prompt, 6) for prompt in prompts])
    assert len(answers[1].tokens) == 6
    for answer, scores in zip(answers, model.scores(answers), strict=True):
        assert scores == pytest.approx(answer.log_probs, abs=1e-3)
    likely = answers[1]
    unlikely = EngineAnswer(likely.prompt, (*likely.tokens[:3], likely.tokens[0], likely.tokens[0]))
    (scores,) = model.scores([unlikely])
    assert scores[:3] == pytest.approx((likely.log_probs or ())[:3], abs=1e-3)
    assert scores[3] < (likely.log_probs or ())[3]


def test_an_engine_that_cannot_be_asked_is_told() -> None:
    with pytest.raises(ServerError, match="does not answer"):
        EngineModel("127.0.0.1:1", 1, 1).answers([((1, 2), 4)])
