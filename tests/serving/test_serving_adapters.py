"""LoRA adapters of a package behind a real Triton: on `cpu`, and on `pytorch` with a stand-in for the LLM."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient.utils import InferenceServerException

from pipeline.client import Client, Refused
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import Deployment
from tests.support.engine import QUESTIONS, TURN, answer, load, request
from tests.support.llmapi import package, served, tensors
from tests.support.served import CHECKPOINTS, package_adapted
from tests.support.streams import joined

pytestmark = pytest.mark.servers

NAMES = ("", "tone", "sql")
PROMPTS = [TURN.format(question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package_adapted(tmp_path_factory.mktemp("adapted"))


@pytest.fixture(scope="module")
def server(adapted: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log = tmp_path_factory.mktemp("log") / "triton.log"
    with TritonServer.of_package(adapted, log_file=log) as server:
        yield server


def asked(name: str, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 32, "temperature": 0, **({"adapter": name} if name else {}), **more}


def test_answers_are_those_of_the_engine_whatever_runs_beside(adapted: Path, server: TritonServer) -> None:
    engine = adapted / "model_repository/tensorrt_llm/1"
    core = load(engine / "target", adapters=engine / "adapters.npz", guides=False)
    tokenizer = Tokenizer.from_file(str(CHECKPOINTS / "support-target/tokenizer.json"))
    wanted = [(name, prompt) for prompt in PROMPTS for name in NAMES]
    alone = [
        request(at, tokenizer.encode(prompt, add_special_tokens=False).ids, adapter=name, end_id=5)
        for at, (name, prompt) in enumerate(wanted)
    ]
    right = [tokenizer.decode(answered.tokens) for answered in answer(core, *alone)]
    with Client(server.grpc_url) as client, ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda pair: client.generate(pair[1], **asked(pair[0])).text, wanted))
    assert found == right
    for at in range(0, len(found), len(NAMES)):
        assert len({*found[at : at + len(NAMES)]}) == len(NAMES)


def test_a_number_does_as_well(server: TritonServer) -> None:
    model = "tensorrt_llm_bls"
    by_name = {name: joined(server.grpc_url, model, text_input=PROMPTS[0], max_tokens=16, lora_name=name)
               for name in ("tone", "sql")}  # fmt: skip
    for number, name in ((1, "tone"), (2, "sql")):
        for model_name in (model, "ensemble"):
            inputs = {
                "text_input": PROMPTS[0],
                "max_tokens": 16,
                "lora_task_id": np.array([[number]], np.uint64),
            }
            assert joined(server.grpc_url, model_name, **inputs) == by_name[name]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"lora_name": "poem"}, "lora_name = poem: is unknown; there are tone (1), sql (2)"),
        (
            {"lora_task_id": np.array([[0]], np.uint64)},
            "lora_task_id = 0: is unknown; there are tone (1), sql (2)",
        ),
        ({"lora_task_id": np.array([[3]], np.uint64)}, "lora_task_id = 3: is unknown"),
        (
            {"lora_task_id": np.array([[2]], np.uint64), "lora_name": "tone"},
            "lora_name = tone: lora_task_id 2 is sql",
        ),
        ({"lora_name": "../tone"}, "lora_name = ../tone: is unknown"),
    ],
)
def test_others_are_refused(server: TritonServer, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        joined(server.grpc_url, "tensorrt_llm_bls", text_input=PROMPTS[0], max_tokens=4, **inputs)
    assert message in caught.value.message()


def test_the_llm_api_gets_the_packages_own_folders(tmp_path: Path) -> None:
    settings = LlmapiSettings("1.2.1", cancellation_check_period_ms=20, adapters=("tone", "sql"))
    made = package(tmp_path, settings, lora_config={"max_lora_rank": 8, "lora_target_modules": ["attn_q"]})
    assert Deployment.load(made).adapters == ("tone", "sql")
    folder = made.resolve() / "model_repository/tensorrt_llm/1/adapters"
    assert {path.name for path in (folder / "tone").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors"
    }  # fmt: skip
    with served(made, tmp_path / "status", tmp_path / "triton.log") as server:
        # The stand-in repeats the arguments of the call.
        with Client(server.grpc_url, model="tensorrt_llm") as client:
            for number, name in enumerate(NAMES):
                text = client.generate("the call", **asked(name, max_tokens=600)).text
                begins = (
                    f"{{'lora_request': LoRARequest(lora_name='{name}', lora_int_id={number}, lora_path='/"
                )
                ends = f"/tensorrt_llm/1/adapters/{name}')}}"
                assert (text.startswith(begins) and text.endswith(ends)) if name else text == "{}"
            with pytest.raises(
                Refused, match=r"lora_name = poem: is unknown; there are tone \(1\), sql \(2\)"
            ):
                client.generate("the call", adapter="poem")
        by_number = tensors(
            text_input="the call", lora_id=np.array([2], np.uint64), sampling_param_max_tokens=600
        )
        assert "lora_name='sql'" in joined(server.grpc_url, "tensorrt_llm", **by_number)
        strange = tensors(text_input="a", lora_name="tone", lora_path="/etc")
        with pytest.raises(
            InferenceServerException, match="lora_path: LoRA adapters are those of the package"
        ):
            joined(server.grpc_url, "tensorrt_llm", **strange)
