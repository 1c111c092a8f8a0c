"""Requests and answers of a worker of NVIDIA Dynamo; tests/clients/test_dynamo.py has the frontend itself."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.client import Chunk, Refused, Stats
from pipeline.client.sampling import read_sampling
from pipeline.contracts import read_facts
from pipeline.gateway.dynamo.card import make_model_card
from pipeline.gateway.dynamo.request import read_request, write_chunk
from pipeline.triton.deployment import LaunchSpec
from tests.support.deployments import gpu_deployment

DEPLOYMENT = gpu_deployment(LaunchSpec()).model_copy(
    update={"end_id": 5, "stop_token_ids": (2,), "guided_decoding": True}
)
FIELDS = {name: tuple(fact["names"]) for name, fact in read_facts("dynamo.yaml")["request"].items()}
PLAIN = {"max_tokens": DEPLOYMENT.limits.max_output_tokens, "temperature": 1.0, "token_ids": True}
# Values that ask for something; a field that is not here must be refused by its name, whatever it holds.
OBEYED: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0.5, {"temperature": 0.5}),
    "top_k": (-1, {"top_k": 0}),
    "top_p": (0.9, {"top_p": 0.9}),
    "min_p": (0.1, {"min_p": 0.1}),
    "seed": (3, {"seed": 3}),
    "repetition_penalty": (1.1, {"repetition_penalty": 1.1}),
    "presence_penalty": (0.1, {"presence_penalty": 0.1}),
    "frequency_penalty": (0.1, {"frequency_penalty": 0.1}),
    "length_penalty": (0.1, {"length_penalty": 0.1}),
    "guided_decoding": ({"regex": "a+", "json": None}, {"guide_type": "regex", "guide": "a+"}),
    "max_tokens": (7, {"max_tokens": 7}),
    "min_tokens": (2, {"min_tokens": 2}),
    "ignore_eos": (True, {"ignore_eos": True}),
    # The package's own end tokens need no mention.
    "stop_token_ids": ([9, 5], {"stop_token_ids": [9]}),
    "stop_token_ids_visible": ([8], {"stop_token_ids": [8]}),
    "stop_token_ids_hidden": ([5, 2], {}),
    "logprobs": (2, {"log_probs": True, "top_log_probs": 2}),
}
THE_FRONTENDS = {
    "stop", "include_stop_str_in_output", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids",
}  # fmt: skip
NEUTRAL = {"n": 1, "best_of": 1, "use_beam_search": False}


@pytest.mark.parametrize(
    ("section", "field"), [(section, field) for section, fields in FIELDS.items() for field in fields]
)
def test_each_field_is_obeyed_left_to_the_frontend_or_refused_by_name(section: str, field: str) -> None:
    if field in OBEYED:
        value, sampling = OBEYED[field]
        read = read_request({section: {field: value}}, DEPLOYMENT)
        assert read == PLAIN | sampling
        read_sampling({name: value for name, value in read.items() if value is not None})
    elif field in THE_FRONTENDS:
        assert read_request({section: {field: "word"}}, DEPLOYMENT) == PLAIN
    else:
        if field in NEUTRAL:
            assert read_request({section: {field: NEUTRAL[field]}}, DEPLOYMENT) == PLAIN
        with pytest.raises(Refused, match=rf"\b{field} = 3\b"):
            read_request({section: {field: 3}}, DEPLOYMENT)


def test_an_empty_nucleus_is_greedy() -> None:
    assert read_request({"sampling_options": {"top_p": 0.0}}, DEPLOYMENT) == PLAIN | {"temperature": 0.0}


def test_a_request_without_wishes_and_one_with_too_many() -> None:
    nothing = {section: dict.fromkeys(fields) for section, fields in FIELDS.items()}
    assert read_request({"token_ids": [1], "eos_token_ids": [5, 2], **nothing}, DEPLOYMENT) == PLAIN
    with pytest.raises(Refused, match=r"multi_modal_data.*n = 2.*a field of tomorrow = 1"):
        read_request(
            {"multi_modal_data": {"image": 1}, "sampling_options": {"n": 2, "a field of tomorrow": 1}},
            DEPLOYMENT,
        )


@pytest.mark.parametrize(
    ("guide", "kind", "form"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"grammar": "root ::= 'a'"}, "ebnf_grammar", "root ::= 'a'"),
    ],
)
def test_forms_of_an_answer(guide: dict[str, Any], kind: str, form: str) -> None:
    read = read_request({"sampling_options": {"guided_decoding": guide}}, DEPLOYMENT)
    assert (read["guide_type"], read["guide"]) == (kind, form)


def test_a_choice_is_one_of_the_texts_whatever_they_hold() -> None:
    choices = ["yes", "a|b", "(x)", "1+1"]
    pattern = read_request({"sampling_options": {"guided_decoding": {"choice": choices}}}, DEPLOYMENT)[
        "guide"
    ]
    assert isinstance(pattern, str)
    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not any(re.fullmatch(pattern, other) for other in ("a", "b", "x", "11"))


@pytest.mark.parametrize(
    "guide", [{"structural_tag": {}}, {"regex": "a", "json": {}}, {"regex": "a", "whitespace_pattern": " "}]
)
def test_forms_that_it_does_not_have_are_refused(guide: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="guided_decoding = "):
        read_request({"sampling_options": {"guided_decoding": guide}}, DEPLOYMENT)
    unguided = DEPLOYMENT.model_copy(update={"guided_decoding": False})
    with pytest.raises(Refused, match="no guided decoding"):
        read_request({"sampling_options": {"guided_decoding": {"regex": "a"}}}, unguided)


def test_chunks() -> None:
    first = Chunk("a", 0, token_ids=(7,), log_probs=(-0.5,), top_log_probs=(((7, -0.5), (8, -2.0)),))
    assert write_chunk(first, Stats(), 3) == {
        "index": 0,
        "token_ids": [7],
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 7, "token": None, "logprob": -0.5},
                {"rank": 2, "token_id": 8, "token": None, "logprob": -2.0},
            ]
        ],
    }
    last = Chunk("", 1, finish_reason="length")
    assert write_chunk(last, Stats(output_tokens=4, cached_tokens=2), 3) == {
        "index": 0,
        "token_ids": [],
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert write_chunk(Chunk("", 1, finish_reason="unknown"), Stats(), 3)["finish_reason"] == "stop"


def test_workers_of_one_package_register_by_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo compares its path, and refuses the second worker if it is another."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cards = []
    for place in ("here", "there"):
        tokenizer = tmp_path / place / DEPLOYMENT.tokenizer_dir
        tokenizer.mkdir(parents=True)
        (tokenizer / "tokenizer.json").write_text("{}", "utf-8")
        cards.append(make_model_card(tmp_path / place, DEPLOYMENT))
    assert cards[0] == cards[1]
    assert {file.name for file in cards[0].iterdir()} == {"tokenizer.json", "config.json"}
    assert cards[0].stat().st_mode & 0o077 == 0
    config = json.loads((cards[0] / "config.json").read_text("utf-8"))
    assert config["eos_token_id"] == [5, 2]
    other = DEPLOYMENT.model_copy(update={"digest": "f" * 64})
    assert make_model_card(tmp_path / "here", other) != cards[0]
    assert os.getuid() == cards[0].stat().st_uid
