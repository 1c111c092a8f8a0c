"""One generation through the entry model, whichever layout it has."""

from __future__ import annotations

import pytest
from tritonclient.grpc import model_config_pb2 as pb

from pipeline.client.testing import FakeServer, Reply, bls, llmapi
from pipeline.errors import ServerError
from pipeline.serving.probe import HealthProbe, generate
from pipeline.serving.server import TritonServer
from tests.support.waiting import wait_for


@pytest.mark.parametrize(
    "model",
    [bls(), bls(cumulative=True), bls(decoupled=False), llmapi(), llmapi(decoupled=False)],
    ids=["bls", "bls-cumulative", "bls-at-once", "llmapi", "llmapi-at-once"],
)
def test_every_entry_model_answers(model: pb.ModelConfig) -> None:
    with FakeServer(reply=Reply(("Hel", "lo", " you")), model=model) as server:
        answer = generate(server.url, model.name, "Hi", max_tokens=3, timeout_s=10)
    assert answer.text == "Hello you"
    assert 0 < (answer.stats.ttft_ms or 0) <= (answer.stats.total_ms or 0)


def test_a_model_that_is_not_there() -> None:
    with (
        FakeServer(model=llmapi()) as server,
        pytest.raises(ServerError, match="nobody does not answer"),
    ):
        generate(server.url, "nobody", "Hi", max_tokens=1, timeout_s=5)


def test_no_server() -> None:
    with pytest.raises(ServerError, match="x does not answer"):
        generate("127.0.0.1:1", "x", "Hi", max_tokens=1, timeout_s=2)


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble", "tensorrt_llm"])
def test_models_of_text_and_of_tokens_are_asked_again_and_again(server: TritonServer, model: str) -> None:
    """`tensorrt_llm_draft`, where there is one, takes what `tensorrt_llm` takes."""
    probe = HealthProbe(server.grpc_url, model)
    try:
        for _ in range(3):
            probe.ask(timeout_s=60)
            wait_for(lambda: probe.outstanding_since is None, "an answer", 60)
            assert (probe.answered, probe.failures, probe.error) == (True, 0, "")
        probe.ask()
        probe.ask_again()
        wait_for(lambda: probe.outstanding_since is None, "an answer", 60)
        assert probe.answered
    finally:
        probe.close()


def test_failures_are_counted_until_an_answer_comes() -> None:
    probe = HealthProbe("127.0.0.1:1", "x")
    for count in (1, 2):
        probe.ask()
        assert (probe.answered, probe.failures, probe.outstanding_since) == (False, count, None)
        assert "x does not answer" in probe.error
    probe.close()
