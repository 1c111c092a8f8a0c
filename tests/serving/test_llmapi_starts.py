"""How the `llmapi` model starts, and what it says when it cannot: instances, drafts, limits, faults."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from tritonclient.utils import InferenceServerException

from pipeline.client import Client
from pipeline.errors import ServerError
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings
from tests.support.llmapi import package, served, statuses, tensors
from tests.support.streams import stream

pytestmark = pytest.mark.servers

MODEL = "tensorrt_llm"


def test_each_instance_has_gpus_of_its_own(tmp_path: Path) -> None:
    """And variables of mpirun, under which the server may be, do not reach the workers that it spawns."""
    made = package(tmp_path, LlmapiSettings("1.3.0", ranks=2, instances=2), tensor_parallel_size=2)
    environment = {"STANDIN_VERSION": "1.3.0", "OMPI_COMM_WORLD_RANK": "0", "PMIX_MCA_x": "kept"}
    with (
        served(made, tmp_path / "status", tmp_path / "log", **environment) as server,
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


@pytest.mark.parametrize(("version", "spelled"), [("1.2.1", "DraftTarget"), ("1.3.0", "Draft_Target")])
def test_a_draft_is_found_beside_the_arguments(tmp_path: Path, version: str, spelled: str) -> None:
    speculation = {"decoding_type": spelled, "max_draft_len": 3, "speculative_model": "draft"}
    made = package(
        tmp_path,
        LlmapiSettings(version),
        draft=True,
        disable_overlap_scheduler=True,
        speculative_config=speculation,
    )
    with served(made, tmp_path / "status", tmp_path / "log", STANDIN_VERSION=version) as server:
        assert server.check_health().text


def test_a_full_queue_is_said_in_tritons_words(tmp_path: Path) -> None:
    made = package(tmp_path, LlmapiSettings("1.2.1", max_open_requests=2))
    with served(made, tmp_path / "status", tmp_path / "log", STANDIN_TOKEN_S="0.01") as server:
        asked = tensors(text_input="endless", streaming=True, sampling_param_max_tokens=600)
        running = [stream(server.grpc_url, MODEL, **asked) for _ in range(2)]
        for one in running:
            next(one)
        with pytest.raises(
            InferenceServerException, match="Exceeds maximum queue size: 2 requests run or wait"
        ):
            list(stream(server.grpc_url, MODEL, **asked))
        for one in running:
            assert next(one).text
            one.close()


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
