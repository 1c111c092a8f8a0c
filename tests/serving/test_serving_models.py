"""The models one by one, as clients do who keep their own loop; and the engine with a draft and a short queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tritonclient import grpc
from tritonclient.utils import InferenceServerException

from pipeline.serving.server import TritonServer
from tests.support.engine import QUESTIONS, TURN
from tests.support.served import CHECKPOINTS, SETTINGS, package_support_pair
from tests.support.streams import joined, stream, tensor

TOKENIZER = Tokenizer.from_file(str(CHECKPOINTS / "support-target" / "tokenizer.json"))
PROMPTS = [TURN.format(question) for question in QUESTIONS[:2]]


def infer(server: TritonServer, model: str, **inputs: object) -> dict[str, np.ndarray]:
    """A call of a model that gives one response."""
    with grpc.InferenceServerClient(server.grpc_url) as client:
        result = client.infer(model, [tensor(name, value) for name, value in inputs.items()])
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def test_the_ensemble_by_hand(server: TritonServer) -> None:
    queries = np.array([[prompt.encode()] for prompt in PROMPTS], np.object_)
    lengths = np.full((2, 1), 20, np.int32)
    made = infer(server, "preprocessing", QUERY=queries, REQUEST_OUTPUT_LEN=lengths)
    assert made["INPUT_ID"].shape == (2, max(made["REQUEST_INPUT_LEN"].reshape(-1)))
    assert made["DECODER_INPUT_ID"].shape == made["REQUEST_DECODER_INPUT_LEN"].shape == (2, 1)
    assert made["OUT_END_ID"].tolist() == [[5], [5]]
    rows: dict[int, list[int]] = {}
    for response in stream(
        server.grpc_url,
        "tensorrt_llm",
        input_ids=made["INPUT_ID"],
        input_lengths=made["REQUEST_INPUT_LEN"],
        request_output_len=made["REQUEST_OUTPUT_LEN"],
        end_id=made["OUT_END_ID"],
        stop_words_list=made["STOP_WORDS_IDS"],
    ):
        assert response.outputs["output_ids"].shape == (1, 1, response.outputs["sequence_length"].item())
        rows[response.outputs["batch_index"].item()] = response.tokens
    for row, prompt in enumerate(PROMPTS):
        text = infer(
            server,
            "postprocessing",
            TOKENS_BATCH=np.array([[rows[row]]], np.int32),
            SEQUENCE_LENGTH=np.array([[len(rows[row])]], np.int32),
        )["OUTPUT"]
        assert text.item().decode() == joined(server.grpc_url, "ensemble", text_input=prompt, max_tokens=20)


def test_postprocessing_cuts_each_beam_to_its_length(server: TritonServer) -> None:
    ids = TOKENIZER.encode("one two three", add_special_tokens=False).ids
    tokens = np.array([[ids, ids]], np.int32)
    lengths = np.array([[1, len(ids)]], np.int32)
    texts = infer(server, "postprocessing", TOKENS_BATCH=tokens, SEQUENCE_LENGTH=lengths)["OUTPUT"]
    assert [text.decode() for text in texts] == [TOKENIZER.decode(ids[:1]), "one two three"]


def test_preprocessing_with_everything(server: TritonServer) -> None:
    made = infer(
        server, "preprocessing", QUERY="Hello", REQUEST_OUTPUT_LEN=4, DECODER_QUERY="there", STOP_WORDS_DICT=["a", "b"],
        BAD_WORDS_DICT=["c"], EMBEDDING_BIAS_WORDS=["d"], EMBEDDING_BIAS_WEIGHTS=np.array([[2.0]], np.float32),
        END_ID=9, PAD_ID=8, PROMPT_TABLE_EXTRA_ID=np.array([[7]], np.uint64),
    )  # fmt: skip
    assert made["STOP_WORDS_IDS"].shape[1] == made["BAD_WORDS_IDS"].shape[1] == 2
    assert made["EMBEDDING_BIAS"].shape == (1, 2048)
    assert (made["OUT_END_ID"].item(), made["OUT_PAD_ID"].item()) == (9, 8)
    assert made["DECODER_INPUT_ID"].shape[1] == made["REQUEST_DECODER_INPUT_LEN"].item() > 0
    assert made["OUT_PROMPT_TABLE_EXTRA_IDS"].dtype == np.uint64


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """One request runs and one waits; the engine has a draft model."""
    folder = tmp_path_factory.mktemp("drafting")
    settings = replace(SETTINGS, max_concurrency=1, max_queue_size=1, max_draft_tokens=4)
    package = package_support_pair(folder, draft=True, settings=settings)
    with TritonServer.of_package(package, log_file=folder / "log") as server:
        yield server


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_draft_changes_no_greedy_text_and_is_accepted(
    server: TritonServer, drafting: TritonServer, prompt: str
) -> None:
    asked = {"text_input": prompt, "max_tokens": 40, "stream": True, "return_perf_metrics": True}
    responses = list(stream(drafting.grpc_url, "tensorrt_llm_bls", **asked))
    assert "".join(response.text for response in responses) == joined(
        server.grpc_url, "tensorrt_llm_bls", **asked
    )
    last = next(response.outputs for response in reversed(responses) if "acceptance_rate" in response.outputs)
    proposed, accepted = (last[f"total_{kind}draft_tokens"].item() for kind in ("", "accepted_"))
    if proposed:  # the engine drafts only while that pays
        assert last["acceptance_rate"].item() == pytest.approx(accepted / proposed)


def test_a_full_queue_refuses(drafting: TritonServer) -> None:
    """Of five requests at once, one runs, one waits, and the others are told so."""
    asked = {"text_input": PROMPTS[0], "max_tokens": 700, "stream": True, "end_id": -1}
    texts: list[str] = []
    refusals: list[str] = []

    def one() -> None:
        try:
            texts.append(joined(drafting.grpc_url, "tensorrt_llm_bls", temperature=3.0, top_k=2000, **asked))
        except InferenceServerException as error:
            refusals.append(error.message())

    threads = [threading.Thread(target=one) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) >= 2
    assert all(texts)
    assert refusals
    assert all(
        "Exceeds maximum queue size" in refusal for refusal in refusals
    )  # Triton's own queue, or the engine's
    assert joined(drafting.grpc_url, "tensorrt_llm_bls", text_input=PROMPTS[0], max_tokens=4, stream=True)
