"""/v1/embeddings as OpenAI's client sees it."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import openai
import pytest

from pipeline.cache.backend import Vector
from tests.gateway.conftest import Start


class Letters:
    """Embeds a text by its length; reads at most five words."""

    identity, max_tokens = "letters/model.onnx", 5

    def tokens(self, text: str) -> int:
        return len(text.split())

    def __call__(self, text: str) -> Vector | None:
        return np.array([len(text), 0.5, -0.1], np.float32) if self.tokens(text) <= 5 else None


@pytest.fixture(scope="module")
def client(shared_start: Start) -> openai.OpenAI:
    return shared_start(embedder=Letters()).client()


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_vectors_of_several_inputs(client: openai.OpenAI, form: Any) -> None:
    fields = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model="tiny", input=["a b", "abcd"], **fields)
    assert [item.index for item in answer.data] == [0, 1]
    if form == "base64":
        vectors = [np.frombuffer(base64.b64decode(str(item.embedding)), "<f4") for item in answer.data]
    else:
        vectors = [np.array(item.embedding, np.float32) for item in answer.data]
    np.testing.assert_array_equal(vectors, np.array([[3, 0.5, -0.1], [4, 0.5, -0.1]], np.float32))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)
    assert answer.model == "letters"


def test_one_input_and_the_encoders_own_name(client: openai.OpenAI) -> None:
    assert len(client.embeddings.create(model="letters", input="x").data) == 1
    assert [model.id for model in client.models.list()] == ["tiny", "letters"]
    assert client.models.retrieve("letters").id == "letters"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input": ["fine", "a b c d e f g"]}, "input.1: has 7 tokens; this model reads at most 5"),
        ({"input": "a b c d e f"}, "input: has 6 tokens"),
        ({"dimensions": 2}, "dimensions: this model's embeddings have one size"),
        ({"input": ""}, "input: must not be empty"),
        ({"input": [[1, 2]]}, "tokens are not taken"),
        ({"extra_body": {"prompt_embeds": "x"}}, "prompt_embeds is not supported"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        client.embeddings.create(**{"model": "tiny", "input": "x", **fields})


def test_without_an_encoder(start: Start) -> None:
    client = start().client()
    with pytest.raises(openai.NotFoundError, match="`tiny` has no embeddings"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.embeddings.create(model="other", input="x")
