"""One generation through the entry model, whichever layout it has."""

from __future__ import annotations

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.client.testing import FakeServer, Reply
from pipeline.client.testing.models import bls, llmapi
from pipeline.errors import ServerError
from pipeline.serving.probe import generate


@pytest.mark.parametrize(
    "model",
    [bls(), bls(cumulative=True), bls(decoupled=False), llmapi(), llmapi(decoupled=False)],
    ids=["bls", "bls-cumulative", "bls-at-once", "llmapi", "llmapi-at-once"],
)
def test_every_entry_model_answers(model: pb.ModelConfig) -> None:
    with FakeServer(reply=Reply(("Hel", "lo", " you")), model=model) as server:
        answer = generate(server.url, model.name, "Hi", max_tokens=3, timeout_s=10)
    assert answer.text == "Hello you"
    assert 0 < answer.first_s <= answer.total_s


def test_a_model_that_is_not_there() -> None:
    with (
        FakeServer(model=llmapi()) as server,
        pytest.raises(ServerError, match="nobody does not answer"),
    ):
        generate(server.url, "nobody", "Hi", max_tokens=1, timeout_s=5)


def test_no_server() -> None:
    with pytest.raises(ServerError, match="x does not answer"):
        generate("127.0.0.1:1", "x", "Hi", max_tokens=1, timeout_s=2)
