"""Guided answers through a real server, by the tensors that TensorRT-LLM's models have for them."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest

from pipeline.serving.server import TritonServer
from tests.support.streams import joined, stream

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 1, "maximum": 31},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ASKED = {"text_input": "Where is my parcel?", "max_tokens": 120, "top_p": 1.0, "seed": 11}
GUIDED = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": json.dumps(SCHEMA)}


@pytest.mark.parametrize("model", ["tensorrt_llm_bls", "ensemble"])
def test_what_is_streamed_is_of_the_schema(server: TritonServer, model: str) -> None:
    text = joined(server.grpc_url, model, **ASKED, **GUIDED, stream=True)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_whole_answers_are_the_same(server: TritonServer) -> None:
    streamed = joined(server.grpc_url, "tensorrt_llm_bls", **ASKED, **GUIDED, stream=True)
    whole = joined(server.grpc_url, "tensorrt_llm_bls", **ASKED, **GUIDED, exclude_input_in_output=True)
    assert whole == streamed


@pytest.mark.parametrize(
    ("kind", "guide", "right"),
    [
        ("regex", "(yes|no), [0-9]{2}", "(yes|no), [0-9]{2}"),
        ("ebnf_grammar", 'root ::= "a" | "b" root', "b*a"),
    ],
)
def test_expressions_and_grammars(server: TritonServer, kind: str, guide: str, right: str) -> None:
    tensors = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
    assert re.fullmatch(right, joined(server.grpc_url, "tensorrt_llm_bls", **ASKED, **tensors, stream=True))


def test_who_leaves_harms_nobody(server: TritonServer) -> None:
    list(stream(server.grpc_url, "tensorrt_llm_bls", **ASKED, **GUIDED, stream=True, leave_after=2))
    text = joined(server.grpc_url, "tensorrt_llm_bls", **ASKED, **GUIDED, stream=True)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_each_row_of_a_batch_has_its_own_form(server: TritonServer) -> None:
    forms = {b"[0-9]{6}": "[0-9]{6}", b"(ab){3}": "ababab"}
    rows = {
        "text_input": np.array([[b"One"], [b"Two"]], np.object_),
        "max_tokens": np.array([[24], [24]], np.int32),
        "guided_decoding_guide_type": np.array([[b"regex"], [b"regex"]], np.object_),
        "guided_decoding_guide": np.array([[form] for form in forms], np.object_),
    }
    texts = ["", ""]
    for response in stream(server.grpc_url, "tensorrt_llm_bls", **rows, stream=np.array([[True], [True]])):
        if response.text:
            texts[response.outputs["batch_index"].item()] += response.text
    for text, right in zip(texts, forms.values(), strict=True):
        assert re.fullmatch(right, text)
