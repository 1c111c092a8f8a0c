"""Upstream's `llmapi` model and ours are exchanged: its packages and client work with ours, our client with it."""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tritonclient import grpc
from tritonclient.utils import np_to_triton_dtype

from pipeline.client import Client, Refused, ServerFailed
from pipeline.contracts import llmapi
from pipeline.serving.server import TritonServer
from pipeline.triton.config import model_config, render
from tests.support.llmapi import package, served, statuses
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

MODEL, VERSION = "tensorrt_llm", "1.2.1"
UPSTREAM = Path(__file__).parent.parent / "support" / "standin" / "upstream_llmapi.py"


def upstream_package(into: Path, *, decoupled: bool) -> Path:
    """A package with the config and the settings that upstream's folder all_models/llmapi has."""
    made = package(into)
    folder = made / "model_repository" / MODEL
    have = llmapi.tensors(VERSION)
    config = model_config(
        MODEL, backend="python", max_batch_size=0, instances=1, inputs=have.inputs, outputs=have.outputs,
        decoupled=decoupled,
    )  # fmt: skip
    (folder / "config.pbtxt").write_text(render(config))
    settings = {
        "model": str(folder / "1" / "checkpoint"), "backend": "pytorch", "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1, "triton_config": {"max_batch_size": 0, "decoupled": decoupled},
    }  # fmt: skip
    (folder / "1" / "model.yaml").write_text(yaml.safe_dump(settings))
    return made


class UpstreamClient:
    """Calls of triton_backend/tools/llmapi_client.py (@2a9abd9536aa): each answer comes by a future's callback."""

    def __init__(self, url: str) -> None:
        self._client = grpc.InferenceServerClient(url)
        self._completed: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask(self, text: str, output_len: int, request_id: str = "1") -> Any:
        prompt, most = np.array([text], object), np.array([output_len], np.int32)
        return self._send(request_id, text_input=prompt, sampling_param_max_tokens=most)

    def stop(self, request_id: str = "1") -> Any:
        return self._send(request_id, text_input=np.empty([1], np.bytes_), stop=np.array([True], bool))

    def result(self) -> str:
        """The text, or what the client prints for an error."""
        completed = self._completed.get(timeout=30)
        if not isinstance(completed, Exception):
            return str(completed.as_numpy("text_output")[0].decode())
        if completed.status() == "StatusCode.CANCELLED":  # type: ignore[attr-defined]
            return "Request is cancelled"
        raise completed

    def _send(self, request_id: str, **arrays: np.ndarray[Any, Any]) -> Any:
        inputs = []
        for name, array in arrays.items():
            inputs.append(grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        return self._client.async_infer(
            MODEL,
            inputs,
            request_id=request_id,
            callback=lambda result, error: self._completed.put(error or result),
            parameters={"Streaming": False},
        )


def test_its_packages_and_its_client_work_with_our_model(tmp_path: Path) -> None:
    made = upstream_package(tmp_path, decoupled=False)
    with served(made, tmp_path / "status", tmp_path / "log", STANDIN_TOKEN_S="0.003") as server:
        client = UpstreamClient(server.grpc_url)
        client.ask("Born in north-east France, Soyer trained as a", 16)
        answer = client.result()
        assert answer
        for cancel in (lambda _: client.stop(), lambda asked: asked.cancel()):
            asked = client.ask("endless", 5000)
            wait_for(
                lambda: sum(status["active"] for status in statuses(tmp_path / "status")) > 0, "the request"
            )
            cancel(asked)
            assert client.result() == "Request is cancelled"
            wait_for(
                lambda: sum(status["active"] for status in statuses(tmp_path / "status")) == 0, "its end"
            )
        again = UpstreamClient(server.grpc_url)
        again.ask("Born in north-east France, Soyer trained as a", 16)
        assert again.result() == answer


@contextmanager
def upstream_served(folder: Path) -> Iterator[TritonServer]:
    made = upstream_package(folder, decoupled=True)
    shutil.copy(UPSTREAM, made / "model_repository" / MODEL / "1" / "model.py")
    with served(made, folder / "status", folder / "log") as server:
        yield server


def test_our_client_works_with_its_model(tmp_path: Path) -> None:
    """One event a stream, figures as text, and none of our inputs."""
    with upstream_served(tmp_path) as server, Client(server.grpc_url, model=MODEL) as client:
        with client.stream("where is my mail", max_tokens=3) as answer:
            chunks = [chunk.text for chunk in answer]
        assert chunks == ["where is my"]
        whole = client.generate("where is my mail", max_tokens=9, temperature=0.5, stop="x", seed=3)
        assert (whole.text, whole.finish_reason) == ("where is my mail", "stop")
        assert (whole.stats.draft_tokens, whole.stats.accepted_tokens) == (4, 3)
        assert (whole.stats.queue_ms, whole.stats.prefill_ms) == (2.0, 5.0)
        others: Any = {
            "log_probs": True,
            "min_p": 0.5,
            "priority": 1.0,
            "guide_type": "json",
            "token_ids": True,
        }
        for name, value in others.items():
            with pytest.raises(Refused, match=f"does not take {name}"):
                client.generate("where", **{name: value})
        with pytest.raises(ServerFailed, match="Error generating request: out of luck"):
            client.generate("breaks", max_tokens=3)
