"""How the `llmapi` model starts, and what it says when it cannot: instances, drafts, limits, faults."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tritonclient.utils import InferenceServerException

from pipeline.client import Client
from pipeline.errors import ServerError
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings
from pipeline.serving.server import TritonServer
from tests.support.llmapi import package, served, statuses, tensors
from tests.support.streams import infer, stream
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

MODEL = "tensorrt_llm"


def test_each_instance_has_gpus_of_its_own(tmp_path: Path) -> None:
    """And variables of mpirun, under which the server may be, do not reach the workers that it spawns."""
    made = package(tmp_path, LlmapiSettings("1.3.0rc29", ranks=2, instances=2), tensor_parallel_size=2)
    environment = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_MCA_x": "kept"}
    with (
        served(made, tmp_path / "status", tmp_path / "log", "1.3.0rc29", **environment) as server,
        Client(server.grpc_url, model=MODEL) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda _: client.generate("a mail", max_tokens=30).text, range(16)))
        found = statuses(tmp_path / "status")
        assert sorted(status["gpus"] for status in found) == ["0,1", "2,3"]
        assert all(status["tokens"] > 30 for status in found)
        assert len(set(answers)) == 1
        assert [status["of_mpi"] for status in found] == [["PMIX_MCA_x"]] * 2
    assert [status["shut_down"] for status in statuses(tmp_path / "status")] == [1, 1]


@pytest.mark.parametrize(("version", "spelled"), [("1.2.1", "DraftTarget"), ("1.3.0rc29", "Draft_Target")])
def test_a_draft_is_found_beside_the_arguments(tmp_path: Path, version: str, spelled: str) -> None:
    speculation = {"decoding_type": spelled, "max_draft_len": 3, "speculative_model": "draft"}
    made = package(
        tmp_path,
        LlmapiSettings(version),
        draft=True,
        disable_overlap_scheduler=True,
        speculative_config=speculation,
    )
    with served(made, tmp_path / "status", tmp_path / "log", version) as server:
        assert server.check_health().text


def test_a_full_queue_is_said_in_tritons_words(tmp_path: Path) -> None:
    made = package(tmp_path, LlmapiSettings("1.2.1", max_open_requests=2))
    with served(made, tmp_path / "status", tmp_path / "log", STANDIN_TOKEN_S="0.01") as server:
        asked = tensors(text_input="endless", streaming=True, sampling_param_max_tokens=600)
        running = [stream(server.grpc_url, MODEL, **asked) for _ in range(2)]
        for process in running:
            next(process)
        with pytest.raises(
            InferenceServerException, match="Exceeds maximum queue size: 2 requests run or wait"
        ):
            list(stream(server.grpc_url, MODEL, **asked))
        for process in running:
            assert next(process).text
            process.close()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"sampler": 1}, "sampler = 1: is not an argument in TensorRT-LLM 1.2.1"),
        ({"model": "nowhere"}, "nowhere has no config.json"),
        ({"triton_config": {"max_batch_size": 4}}, "triton_config.max_batch_size must be 0"),
        (None, "names no model"),
    ],
    ids=["argument", "model", "batches", "empty"],
)
def test_a_start_that_fails_says_why(tmp_path: Path, content: dict[str, object] | None, message: str) -> None:
    made = package(tmp_path)
    path = made / "model_repository" / MODEL / "1" / "model.yaml"
    changed = None if content is None else yaml.safe_load(path.read_text()) | content
    path.write_text(yaml.safe_dump(changed))
    with pytest.raises(ServerError, match=message), served(made, tmp_path / "status", tmp_path / "log"):
        pass


def test_a_model_that_is_not_decoupled_gives_whole_answers(tmp_path: Path) -> None:
    settings = LlmapiSettings("1.2.1", cancellation_check_period_ms=20, decoupled=False)
    made = package(tmp_path, settings)

    def call(server: TritonServer, request_id: str = "", **inputs: Any) -> str:
        made = infer(server.grpc_url, MODEL, request_id, **tensors(**inputs))
        return str(made["text_output"][0].decode())

    def figure(name: str) -> int:
        return sum(status[name] for status in statuses(tmp_path / "status"))

    log = tmp_path / "triton.log"
    with served(made, tmp_path / "status", log, STANDIN_TOKEN_S="0.003") as server:
        question = {"text_input": "where is my mail", "sampling_param_max_tokens": 20}
        answer = call(server, **question)
        assert answer
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: call(server, **question), range(32))) == [answer] * 32
        headers = {"Content-Type": "application/json"}
        url = f"{server.http_url}/v2/models/{MODEL}/generate"
        asking = urllib.request.Request(url, json.dumps(question).encode(), headers)
        with urllib.request.urlopen(asking, timeout=60) as answered:
            assert json.load(answered)["text_output"] == answer
        with Client(server.grpc_url, model="tensorrt_llm") as client:
            assert client.generate("where is my mail", max_tokens=20).text == answer.removeprefix(
                question["text_input"]
            )
        with pytest.raises(InferenceServerException, match="streaming = true: the model is not decoupled"):
            call(server, streaming=True, **question)
        with ThreadPoolExecutor(1) as pool:
            endless = {"text_input": "endless", "sampling_param_max_tokens": 900}
            running = pool.submit(call, server, "one", **endless)
            wait_for(lambda: figure("active") > 0, "the request")
            with pytest.raises(InferenceServerException, match="cancelled by client"):
                call(server, "one", text_input="", stop=True)
            with pytest.raises(InferenceServerException, match="cancelled by client"):
                running.result(30)
        wait_for(lambda: figure("active") == 0, "the end of the request")
        assert figure("aborted") == 1
