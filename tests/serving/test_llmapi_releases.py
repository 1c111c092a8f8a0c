"""The `llmapi` model with the LLM API of each release, by its signatures: all that its config declares works."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from pipeline.client import Client
from pipeline.contracts import llmapi
from pipeline.runtimes.pytorch.model_repository import LlmapiSettings, llmapi_model
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import Deployment
from tests.support.llmapi import package, served, statuses, tensors
from tests.support.streams import Response, stream
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

MODEL = "tensorrt_llm"
# A value for each input beside the prompt; some go without others.
VALUES: dict[str, Any] = {
    "streaming": True,
    "sampling_param_best_of": 1, "sampling_param_temperature": 0.5, "sampling_param_top_k": 5,
    "sampling_param_top_p": 0.5, "sampling_param_frequency_penalty": 0.0, "sampling_param_presence_penalty": 0.0,
    "sampling_param_max_tokens": 12, "sampling_param_stop": ["never said"], "sampling_param_seed": 7,
    "sampling_param_exclude_input_from_output": True, "sampling_param_return_perf_metrics": True,
    "return_finish_reason": True, "return_stop_reason": True, "return_cumulative_logprob": True, "stop": False,
    "lora_id": np.array([7], np.uint64), "lora_name": "support", "lora_path": "", "lora_ckpt_source": "nemo",
    "priority": 0.75, "sampling_param_logprobs": 2, "sampling_param_ignore_eos": True,
    "sampling_param_stop_token_ids": [3], "sampling_param_include_stop_str_in_output": True,
    "sampling_param_skip_special_tokens": False, "sampling_param_logit_bias_token_ids": [5],
    "sampling_param_logit_bias_values": np.array([-1.5], np.float32), "sampling_param_min_tokens": 2,
    "sampling_param_bad": ["bad"], "sampling_param_repetition_penalty": 1.5, "sampling_param_min_p": 0.1,
    "return_output_ids": True, "guided_decoding_guide_type": "regex", "guided_decoding_guide": "[0-9]+",
}  # fmt: skip
# Cannot be beside the others, or are refused; asked for below, and in test_llmapi_serving.py.
ALONE = {"prompt_token_ids", "prior_output_ids", "sampling_param_prompt_logprobs", "image_url"}


def ask(server: TritonServer, text: str, **inputs: Any) -> list[Response]:
    arrays = {name: value for name, value in inputs.items() if isinstance(value, np.ndarray)}
    others = {name: value for name, value in inputs.items() if name not in arrays}
    return list(stream(server.grpc_url, MODEL, **arrays, **tensors(text_input=text, **others)))


def error_of(server: TritonServer, **inputs: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        ask(server, "a", **inputs)
    return str(caught.value.message())


@pytest.mark.parametrize("version", llmapi.versions())
def test_a_release_takes_all_that_the_model_asks_of_it(tmp_path: Path, version: str) -> None:
    settings = LlmapiSettings(
        version,
        cancellation_check_period_ms=20,
        guided_decoding=True,
        prompt_log_probs=llmapi.returns_context_logits(version),
    )
    declared = {tensor.name for tensor in llmapi_model(settings).input} - {"text_input"}
    assert declared <= VALUES.keys() | ALONE
    adapter = {"lora_path": str(tmp_path)}
    values = {name: value for name, value in {**VALUES, **adapter}.items() if name in declared}
    made = package(tmp_path / "made", settings, guided_decoding_backend="xgrammar", enable_lora=True)
    assert Deployment.load(made).structural_tags is (version != "1.0.0")
    with served(made, tmp_path / "status", tmp_path / "log", version, STANDIN_TOKEN_S="0.0005") as server:
        told = ask(server, "all of it", **values)
        texts = [response.text for response in told]
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        assert texts[-1] == "GuidedDecodi", "the stand-in repeats the form"
        tag = {"guided_decoding_guide_type": "structural_tag", "guided_decoding_guide": "{}"}
        (held,) = ask(server, "", **tag, sampling_param_max_tokens=99)
        assert held.text.startswith("GuidedDecodingParams(structural_tag='{}')")
        last = told[-1].outputs
        assert last["finish_reason"].tolist() == [b"length"]
        assert last["total_draft_tokens"].dtype == np.int32
        assert len(told[-1].tokens) == 12
        # It repeats the arguments of the call, too.
        values = {name: value for name, value in values.items() if not name.startswith("guided")}
        (call,) = ask(server, "the call", **values | {"streaming": False, "sampling_param_max_tokens": 400})
        lora = f"lora_name='support', lora_int_id=7, lora_path='{tmp_path}', lora_ckpt_source='nemo'"
        priority = ", 'priority': 0.75" if "priority" in declared else ""
        assert call.text == f"{{'lora_request': LoRARequest({lora}){priority}}}"
        for inputs, message in (
            ({"lora_name": "a"}, "lora_id, lora_path: missing beside lora_name"),
            ({**lora_inputs(tmp_path / "none")}, "none: is not on the server"),
            (
                {**lora_inputs(tmp_path), "lora_ckpt_source": "zip"},
                "lora_ckpt_source = zip: must be hf or nemo",
            ),
            ({"image_url": "http://x/a.png"}, "image_url"),
            *([({"priority": 1.5}, "priority = 1.5: must be 0 to 1")] if "priority" in declared else ()),
        ):
            assert message in error_of(server, **inputs)
        if "sampling_param_logprobs" in declared:
            log_probs_of_tokens(server)
        stop_words_end_the_work(server, tmp_path / "status")


def stop_words_end_the_work(server: TritonServer, status: Path) -> None:
    """Where the LLM finds one in the text alone, its engine would go on in some releases."""

    def figure(name: str) -> int:
        return sum(status[name] for status in statuses(status))

    before = figure("tokens")
    text = ask(server, "a word", sampling_param_max_tokens=30)[0].text
    for at in range(4, 28, 3):
        stop = [text[at : at + 2]]
        told = ask(server, "a word", sampling_param_max_tokens=900, sampling_param_stop=stop, streaming=True)
        assert told[-1].text == text[: text.index(stop[0])]
    wait_for(lambda: figure("active") == 0, "the end of all answers")
    assert figure("tokens") - before < 900


def lora_inputs(path: Path) -> dict[str, Any]:
    return {"lora_id": np.array([7], np.uint64), "lora_name": "support", "lora_path": str(path)}


def log_probs_of_tokens(server: TritonServer) -> None:
    """As the stand-in tells them: the tokens above the own one are more probable."""
    with Client(server.grpc_url, model=MODEL) as client:
        with client.stream("a word", max_tokens=9, log_probs=True, top_log_probs=2, token_ids=True) as answer:
            chunks = list(answer)
        plain = client.generate("a word", max_tokens=9, log_probs=True)
    whole = answer.answer()
    assert sum(len(chunk.log_probs or ()) for chunk in chunks) == 9
    assert whole.log_probs == plain.log_probs == (-0.25,) * 9
    assert whole.top_log_probs == tuple(
        (((token + 1) % 300, pytest.approx(-0.01)), ((token + 2) % 300, pytest.approx(-0.02)))
        for token in whole.token_ids or ()
    )
    assert plain.top_log_probs is None
