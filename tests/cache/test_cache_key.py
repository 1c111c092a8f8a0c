"""The key: permuting what does not matter keeps it, changing anything that does changes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.key import Origin, make_question
from pipeline.client.sampling import PARAMETERS

ORIGIN = Origin("deployment", "model", "tenant")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    {"role": "user", "content": "Where is my parcel?"},
]  # fmt: skip
SAMPLING: dict[str, Any] = {
    "max_tokens": 64, "temperature": 0.7, "seed": 7, "top_p": 0.9, "stop": ["\n\n", "END"], "repetition_penalty": 1.1,
}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def key(**changes: Any) -> bytes:
    origin = changes.get("origin", ORIGIN)
    messages = changes.get("messages", MESSAGES)
    return make_question(
        origin, messages, changes.get("sampling", SAMPLING), tools=changes.get("tools", TOOLS)
    ).key


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same value with the keys of every mapping in another order."""
    if isinstance(value, Mapping):
        items = [(name, shuffled(item, rng)) for name, item in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_and_stop_words_does_not_matter(rng: random.Random) -> None:
    stop = [*SAMPLING["stop"], SAMPLING["stop"][0]]
    rng.shuffle(stop)
    sampling = shuffled({**SAMPLING, "stop": stop, "top_k": None, "log_probs": False}, rng)
    assert key(messages=shuffled(MESSAGES, rng), sampling=sampling, tools=shuffled(TOOLS, rng)) == key()


def with_message(at: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**message, **fields} if index == at else message for index, message in enumerate(MESSAGES)]


CHANGES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "deployment": lambda: {"origin": replace(ORIGIN, deployment="rebuilt")},
    "model": lambda: {"origin": replace(ORIGIN, model="other")},
    "tenant": lambda: {"origin": replace(ORIGIN, tenant="other")},
    "system prompt": lambda: {"messages": with_message(0, content="Be long.")},
    "history": lambda: {"messages": with_message(1, content="Hi!")},
    "tool call": lambda: {"messages": with_message(2, tool_calls=[])},
    "role": lambda: {"messages": with_message(1, role="assistant")},
    "name of the speaker": lambda: {"messages": with_message(3, name="Ada")},
    "question": lambda: {"messages": with_message(3, content="Where is my parcel")},
    "question, composed letter": lambda: {"messages": with_message(3, content="Where is my pärcel?")},
    "one message less": lambda: {"messages": MESSAGES[1:]},
    "order of messages": lambda: {"messages": [MESSAGES[1], MESSAGES[0], *MESSAGES[2:]]},
    "tools": lambda: {"tools": []},
    "plain prompt": lambda: {"messages": "Where is my parcel?"},
    "greedy": lambda: {"sampling": {**SAMPLING, "temperature": 0}},
    "stop word": lambda: {"sampling": {**SAMPLING, "stop": ["\n\n"]}},
    "stop words joined": lambda: {"sampling": {**SAMPLING, "stop": "\n\nEND"}},
    "unknown parameter": lambda: {"sampling": {**SAMPLING, "later": 1}},
    "token ids": lambda: {"messages": [5, 6, 7]},
    "token ids as text": lambda: {"messages": "5, 6, 7"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_matters_changes_it(change: Callable[[], dict[str, Any]]) -> None:
    assert key(**change()) != key()


def test_all_changes_differ_from_each_other() -> None:
    assert len({key(**change()) for change in CHANGES.values()}) == len(CHANGES)


# A value with an effect for each parameter; those of one entry say the same in other words.
EFFECTS: Mapping[str, Sequence[Any]] = {
    "max_tokens": (7,), "min_tokens": (7,), "temperature": (0.5,), "top_k": (7,), "top_p": (0.5,), "seed": (7,),
    "stop": ("a", ["a"]), "bad_words": ("a", ["a"]), "repetition_penalty": (0.5,), "presence_penalty": (0.5,),
    "frequency_penalty": (0.5,), "length_penalty": (0.5,), "end_id": (7,), "num_draft_tokens": (7,),
    "log_probs": (True,), "top_log_probs": (7,), "prompt_log_probs": (0,), "guide_type": ("json",), "guide": ("a",),
    "min_p": (0.5,), "ignore_eos": (True,), "stop_token_ids": ([7, 8], [8, 7, 7]),
    "include_stop_str_in_output": (True,), "skip_special_tokens": (False,),
    "logit_bias": ({7: 1.0, 8: 2.0}, {8: 2, 7: 1}), "token_ids": (True,), "adapter": ("a",),
}  # fmt: skip


def test_every_parameter_is_part_of_it() -> None:
    assert {*EFFECTS, "priority"} == set(PARAMETERS)
    assert key(sampling={**SAMPLING, "priority": 0.9}) == key(), "it is answered earlier, but alike"
    seeded = {"seed": 1, "temperature": 0.7}
    keys = {
        name: {key(sampling={**seeded, name: value}) for value in values} for name, values in EFFECTS.items()
    }
    assert {name: len(ones) for name, ones in keys.items()} == dict.fromkeys(EFFECTS, 1)
    assert len(set().union(*keys.values(), {key(sampling=seeded)})) == len(EFFECTS) + 1
    for name, parameter in PARAMETERS.items():
        if parameter.neutral is not None:
            assert key(sampling={**seeded, name: parameter.neutral}) == key(sampling=seeded), name


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0}, {"top_k": 1}),
        ({"temperature": 0, "seed": 1}, {"temperature": 0, "seed": 2}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0}),
        ({"seed": 1, "repetition_penalty": 1.0, "presence_penalty": 0}, {"seed": 1}),
        ({"seed": 1, "temperature": 1}, {"seed": 1, "temperature": 1.0}),
        ({"seed": 1, "stop": "a"}, {"seed": 1, "stop": ["a"]}),
        ({"seed": 1, "stop": []}, {"seed": 1}),
    ],
)
def test_the_same_said_differently(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert make_question(ORIGIN, "Hi", one).key == make_question(ORIGIN, "Hi", other).key


@pytest.mark.parametrize(
    ("sampling", "repeatable"),
    [
        ({}, False),
        ({"temperature": 1}, False),
        ({"temperature": 0}, True),
        ({"top_k": 1}, True),
        ({"seed": 0}, True),
    ],
)
def test_what_can_be_repeated(sampling: dict[str, Any], repeatable: bool) -> None:
    assert make_question(ORIGIN, "Hi", sampling).repeatable is repeatable


def test_scope_is_all_but_the_last_user_turn() -> None:
    asked = make_question(ORIGIN, MESSAGES, SAMPLING)
    again = make_question(ORIGIN, with_message(3, content="Something else"), SAMPLING)
    assert asked.scope == again.scope
    assert (asked.turn, again.turn) == ("Where is my parcel?", "Something else")
    assert asked.comparable


def test_a_request_that_ends_with_a_tools_answer_is_not_compared_by_meaning() -> None:
    asked = make_question(ORIGIN, [*MESSAGES, {"role": "tool", "content": "42"}], SAMPLING)
    assert not asked.comparable
    assert asked.key != make_question(ORIGIN, [*MESSAGES, {"role": "tool", "content": "43"}], SAMPLING).key


@given(st.text(), st.text())
def test_different_prompts_have_different_keys(one: str, other: str) -> None:
    same = make_question(ORIGIN, one, {}).key == make_question(ORIGIN, other, {}).key
    assert same == (one == other)
