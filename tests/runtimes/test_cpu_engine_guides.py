"""Answers that must have a form have it, whatever else is asked; and nobody else notices."""

from __future__ import annotations

import json
import re
from typing import Any

import hypothesis.strategies as st
import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from tokenizers import Tokenizer

from pipeline.runtimes.cpu.engine import EngineRequest, FinishReason, Guide, InvalidRequest, SamplingParams
from pipeline.runtimes.cpu.engine.core import EngineCore
from tests.runtimes.conftest import Pair
from tests.support.engine import (
    VOCABULARY,
    Answer,
    add,
    answer,
    finish_all,
    load,
    matcher_of,
    prompts,
    questions,
    request,
)

TOKENIZER = Tokenizer.from_file(str(VOCABULARY.tokenizer))
PROMPTS = questions()
TURN_END = TOKENIZER.token_to_id("<|eot_id|>")
WHOLE = {FinishReason.GUIDE, FinishReason.END_ID}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def core(cpu_pair: Pair) -> EngineCore:
    return load(cpu_pair.target, max_concurrency=16, threads=1)


@pytest.fixture(scope="module")
def drafted(cpu_pair: Pair) -> EngineCore:
    return load(cpu_pair.target, cpu_pair.draft, max_concurrency=16, threads=1, adapt_speculation=False)


def schema_guide(schema: Any) -> Guide:
    return Guide("json_schema", json.dumps(schema))


def guided(
    name: object, guide: Guide, tokens: int = 400, *, prompt: int = 0, seed: int | None = None, **more: Any
) -> EngineRequest:
    """Sampled from all tokens at temperature 1, if there is a seed."""
    sampling = SamplingParams() if seed is None else SamplingParams(top_p=1.0, seed=seed)
    more = {"end_id": TURN_END, "sampling": sampling} | more
    return request(name, PROMPTS[prompt], tokens, guide=guide, **more)


STRING = re.compile(r'"(\\.|[^"\\])*"')


def text_of(answered: Answer) -> str:
    return str(TOKENIZER.decode(answered.tokens, skip_special_tokens=False))


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    words = st.text('abc é"\\', max_size=4)
    bounds = st.tuples(st.integers(-9, 9), st.integers(0, 900))
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 6)),
        st.builds(lambda at: {"type": "integer", "minimum": at[0], "maximum": at[0] + at[1]}, bounds),
        st.builds(lambda values: {"enum": values}, st.lists(words, min_size=1, max_size=3, unique=True)),
        st.builds(lambda value: {"const": value}, words | st.integers(-5, 5)),
        st.just({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}),
        st.just({"type": "string", "format": "date"}),
    )


def objects(of: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, dict[str, Any]], optional: bool) -> dict[str, Any]:
        required = [] if optional else list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(
        made, st.dictionaries(st.text("abé_ ", min_size=1, max_size=3), of, max_size=3), st.booleans()
    )


SCHEMAS = st.recursive(
    leaves(),
    lambda of: st.one_of(
        objects(of),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most}, of, st.integers(0, 2)
        ),
        st.builds(lambda some: {"anyOf": some}, st.lists(of, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schemas=st.lists(SCHEMAS, min_size=4, max_size=4), seed=st.integers(0, 2**32))
def test_sampled_answers_are_of_their_schemas(core: EngineCore, schemas: list[Any], seed: int) -> None:
    asked = [guided(at, schema_guide(schema), seed=seed + at, prompt=at) for at, schema in enumerate(schemas)]
    for schema, got in zip(schemas, answer(core, *asked), strict=True):
        assert got.finish in WHOLE, (got.finish, text_of(got))
        jsonschema.validate(json.loads(text_of(got)), schema)
        assert not re.search(r"\s", STRING.sub("", text_of(got))), "no white space but in strings"


GUIDES = {
    "schema": schema_guide(PERSON),
    "regex": Guide("regex", "[a-c]{3,9}"),
    "grammar": Guide("ebnf_grammar", 'root ::= "yes" | "no" | "never" root'),
}


@pytest.mark.parametrize("name", GUIDES)
def test_a_draft_changes_nothing_but_the_pace(core: EngineCore, drafted: EngineCore, name: str) -> None:
    more = {"log_probs": True, "bad_words": ((TOKENIZER.token_to_id("a"),),)}
    asked = [
        guided(f"{seed}-{prompt}", GUIDES[name], seed=seed, prompt=prompt, **more)
        for seed in (None, 1)
        for prompt in range(3)
    ]
    expected, got = answer(core, *asked), answer(drafted, *asked)
    assert [answered.tokens for answered in got] == [answered.tokens for answered in expected]
    assert [answered.finish for answered in got] == [answered.finish for answered in expected]
    for answered, before in zip(got, expected, strict=True):
        assert answered.log_probs == pytest.approx(before.log_probs, abs=1e-3)
    assert sum(answered.metrics.draft_tokens_accepted for answered in got)


@pytest.mark.parametrize("drafts", [False, True])
def test_logits_are_of_the_tokens_that_the_form_allows(
    core: EngineCore, drafted: EngineCore, drafts: bool
) -> None:
    asked = [guided(name, guide, seed=7, log_probs=True, logits=True) for name, guide in GUIDES.items()]
    for answered in answer(drafted if drafts else core, *asked):
        rows = np.concatenate([out.logits for out in answered.outputs if out.logits is not None]).astype(
            np.float64
        )
        assert len(rows) == len(answered.tokens)
        assert np.isneginf(rows).any(axis=-1).all()
        shares = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
        assert shares[range(len(rows)), answered.tokens] == pytest.approx(answered.log_probs, abs=1e-4)


def test_the_forms_of_each_kind(core: EngineCore) -> None:
    got = answer(core, *(guided(name, guide, seed=7) for name, guide in GUIDES.items()))
    texts = dict(zip(GUIDES, map(text_of, got), strict=True))
    jsonschema.validate(json.loads(texts["schema"]), PERSON)
    assert re.fullmatch("[a-c]{3,9}", texts["regex"])
    assert re.fullmatch("(never)*(yes|no)", texts["grammar"])


def test_an_object_has_the_properties_that_its_schema_names(core: EngineCore) -> None:
    """As pydantic writes it, without additionalProperties; and not where two parts have to hold together."""
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["x"],
    }
    nested = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/P"}},
        "required": ["to"],
        "$defs": {"P": point},
    }
    both = {"allOf": [point, {"properties": {"y": {"enum": ["a"]}}, "required": ["y"]}]}
    asked = [Guide("json_schema", json.dumps(schema)) for schema in (nested, both)]
    first, two = answer(core, *map(guided, "ab", asked))
    assert json.loads(text_of(first)).keys() == {"to"}
    assert json.loads(text_of(first))["to"].keys() == {"x"}
    assert two.finish is not FinishReason.REFUSED


def test_who_runs_beside_a_guided_answer_does_not_notice(core: EngineCore) -> None:
    free = [request(name, prompt, 24) for name, prompt in enumerate(prompts(6))]
    expected = [answer(core, request_)[0].tokens for request_ in free]
    held = [guided(f"held {at}", GUIDES["schema"], seed=at, prompt=at) for at in range(4)]
    alone = [answer(core, request_)[0].tokens for request_ in held]
    together = answer(core, *held[:2], *free, *held[2:])
    assert [answered.tokens for answered in together[2:8]] == expected
    assert [answered.tokens for answered in together[:2] + together[8:]] == alone


def test_a_cancelled_one_frees_its_place(core: EngineCore) -> None:
    sink = Answer()
    add(core, guided("left", GUIDES["schema"]), sink)
    for _ in range(4):
        core.step()
    core.cancel("left")
    finish_all(core)
    assert (sink.finish, core.stats().kv_blocks_used) == (FinishReason.CANCELLED, 0)


def test_an_answer_ends_where_its_form_allows_and_the_model_wants(core: EngineCore) -> None:
    """Digits without end: with a token that ends a turn the model may stop, without one it goes on to the limit."""
    guide = Guide("regex", "[0-9]+")
    toward = np.zeros(2048, np.float32)
    toward[TURN_END] = 1000
    end, special, none = answer(
        core,
        guided("end", guide, embedding_bias=toward),
        guided("stop word", guide, end_id=None, stop_words=((TURN_END,),), embedding_bias=toward),
        guided("none", guide, 12, end_id=None, embedding_bias=toward),
    )
    assert (end.finish, len(end.tokens)) == (FinishReason.END_ID, 1)
    assert (special.finish, special.tokens) == (FinishReason.STOP_WORDS, [*end.tokens, TURN_END])
    assert (none.finish, len(none.tokens)) == (FinishReason.LENGTH, 12)
    assert re.fullmatch("[0-9]+", text_of(none))


def test_the_form_goes_before_bad_words_and_least_lengths(core: EngineCore) -> None:
    brace = tuple((id,) for id in range(2048) if "{" in TOKENIZER.decode([id]))
    got = answer(core, guided("held", schema_guide({"const": {}}), bad_words=brace, min_new_tokens=50))[0]
    assert (got.finish, json.loads(text_of(got))) == (FinishReason.GUIDE, {})


@pytest.mark.parametrize("with_logits", [False, True])
def test_draft_tokens_of_the_caller_are_held_to_the_form_too(core: EngineCore, with_logits: bool) -> None:
    guide, sampling = Guide("regex", "(ab)+c"), SamplingParams(top_p=1.0, seed=3)
    drafts = tuple(TOKENIZER.encode("ab!", add_special_tokens=False).ids)
    logits = np.zeros((len(drafts), 2048), np.float32)
    logits[range(len(drafts)), drafts] = 50
    more: dict[str, Any] = {"draft_tokens": drafts, "draft_logits": logits if with_logits else None}
    alone, got = answer(
        core, guided("0", guide, sampling=sampling), guided("1", guide, sampling=sampling, **more)
    )
    assert re.fullmatch("(ab)+c", text_of(got))
    assert with_logits or got.tokens == alone.tokens


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        (Guide("json_schema", "{"), "as json_schema: "),
        (Guide("json_schema", "[]"), "a schema is a JSON object"),
        (Guide("json_schema", '{"type": "strnig"}'), "Invalid type: strnig"),
        (Guide("regex", "(a"), "unclosed group"),
        (Guide("ebnf_grammar", 'root ::= "'), "Unexpected end of input"),
        (Guide("ebnf_grammar", "root ::= root"), "may refer to itself without an end"),
        (Guide("json_schema", '{"allOf": [{"$ref": "#"}]}'), "may refer to itself without an end"),
        (Guide("regex", r"[^\s\S]"), "no text has this form"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
def test_what_is_no_form_is_refused_at_once(core: EngineCore, guide: Guide, why: str) -> None:
    with pytest.raises(
        InvalidRequest, match=f"^guided_decoding_guide: cannot be held to.*{re.escape(why)}"
    ) as caught:
        matcher_of(core, guided("x", guide))
    assert "\n" not in str(caught.value)


def test_an_engine_without_a_vocabulary_says_so(cpu_pair: Pair) -> None:
    plain = load(cpu_pair.target, guides=False)
    with pytest.raises(InvalidRequest, match=r"^guided_decoding_guide_type: "):
        plain.check(guided("x", Guide("json")))


def test_a_form_that_becomes_too_much_ends_its_own_answer_only(core: EngineCore) -> None:
    """Any number of readings of one text, and more with each letter."""
    ambiguous = Guide("ebnf_grammar", 'root ::= "a" | x x x x x x\nx ::= "" | root | root x | x root')
    expected = answer(core, request("free", PROMPTS[1], 24))[0].tokens
    held, free = answer(core, guided("held", ambiguous, 600, end_id=None), request("free", PROMPTS[1], 24))
    assert held.finish is FinishReason.REFUSED
    assert "items" in (held.outputs[-1].error or "")
    assert free.tokens == expected


CALL = {
    "type": "object",
    "properties": {"order": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
    "required": ["n"],
}
# A call that may come in any text: its mark, and what must follow it. The last tag's mark ends in a special token.
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>", "e<|start_header_id|>"],
        "tags": [
            {"begin": "<call>f(", "content": {"type": "json_schema", "json_schema": CALL}, "end": ")</call>"},
            {
                "begin": "<call>g[",
                "content": {
                    "type": "tags_with_separator",
                    "tags": [{"begin": "<", "content": {"type": "any_text"}, "end": ">"}],
                    "separator": ", ",
                    "at_least_one": True,
                },
                "end": "]</call>",
            },
            {
                "begin": "e<|start_header_id|>tool",
                "content": {"type": "or", "elements": [{"type": "regex", "pattern": r"/[0-9]+\/"}]},
                "end": "<|end_header_id|>",
            },
        ],
    },
}


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("Any text; <cal and <|end_header_id|> too.", True),
        ('See <call>f({"order":"a","n":1})</call> and <call>f({"n":-7})</call>.', True),
        ("<call>g[<x y>, <z>]</call>", True),
        ("the<|start_header_id|>tool/7/<|end_header_id|>", True),
        ('<call>f({"order":"c","n":1})</call>', False),
        ('<call>f({"n":1,"more":1})</call>', False),
        ("a <call> of another kind", False),
        ('<call>f({"n":1})', False),
        ("<call>g[]</call>", False),
        ("the<|start_header_id|>user", False),
    ],
)
def test_what_follows_a_trigger_fits_its_tag(core: EngineCore, text: str, fits: bool) -> None:
    assert core.grammars is not None
    matcher = core.grammars.matcher(Guide("structural_tag", json.dumps(TAG)), [TURN_END])
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        matcher.append(token)
    if matcher.fault is None:
        matcher.append(TURN_END)
    assert (matcher.fault is None) == fits, matcher.fault


def test_every_call_that_a_model_begins_is_of_its_schema(core: EngineCore) -> None:
    """A model that is driven to begin calls, and is otherwise free to write what it samples."""
    toward = np.zeros(2048, np.float32)
    toward[TOKENIZER.encode("<", add_special_tokens=False).ids] = 9
    tags = [
        {"begin": f"<{name}(", "content": {"type": "json_schema", "json_schema": CALL}, "end": ")>"}
        for name in "fg"
    ]
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    guide = Guide("structural_tag", json.dumps(tag))
    asked = [guided(seed, guide, 60, seed=seed, prompt=seed % 4, embedding_bias=toward) for seed in range(8)]
    texts = list(map(text_of, answer(core, *asked)))
    begun = [call for text in texts for call in re.findall(r"<(..?)", text)]
    whole = [call for text in texts for call in re.findall(r"<[fg]\((\{.*?\})\)>", text)]
    assert whole
    assert {call[:2] for call in begun} <= {"f", "g", "f(", "g("}
    for call in whole:
        jsonschema.validate(json.loads(call), {**CALL, "additionalProperties": False})


def test_a_token_that_ends_answers_comes_where_a_tag_ends_with_it(core: EngineCore) -> None:
    call = {
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": CALL},
        "end": "<|end_header_id|>",
    }
    tag = {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [call]},
    }
    ends = TOKENIZER.token_to_id("<|end_header_id|>"), TURN_END
    assert core.grammars is not None
    matcher = core.grammars.matcher(Guide("structural_tag", json.dumps(tag)), ends)
    for token in TOKENIZER.encode('<call>{"n":1}', add_special_tokens=False).ids:
        matcher.append(token)
    mask = matcher.allowed([])
    assert mask is not None
    assert mask[list(ends)].tolist() == [True, False]
    matcher.append(ends[0])
    assert matcher.fault is None


@pytest.mark.parametrize("tag", ["{", "[]", '{"format": {"type": "magic"}}', '{"format": {"type": "tag"}}'])
def test_what_is_no_structural_tag_is_refused(core: EngineCore, tag: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be held to as structural_tag: "):
        matcher_of(core, guided("x", Guide("structural_tag", tag)))
