"""Golden questions: what a file of them may hold, how answers are judged, and what depends on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidInput
from pipeline.golden import GoldenQuestion, GoldenSet, write_document
from pipeline.prepare import prepare
from pipeline.reading import UnreadableFile
from pipeline.recipe import Recipe, load_recipe
from pipeline.recipe.catalog import copy_recipe
from pipeline.store import Store

Load = Callable[..., Recipe]
HEAD = '{"prompt": "Hi"'


def test_every_fault_is_told_with_those_of_the_recipe(load: Load, small: str, tmp_path: Path) -> None:
    lines = [
        HEAD + "}",
        HEAD + ', "contain": "x", "max_tokens": 0}',
        "",
        '{"messages": []}',
        '{"messages": [{"role": "user"}], "regex": "("}',
        "{",
        "[]",
        HEAD + ', "json_schema": {"type": "objekt"}}',
        '{"contains": "x"}',
        HEAD + ', "max_tokens": 65}',
    ]
    (tmp_path / "g.jsonl").write_text("\n".join(lines), "utf-8")
    with pytest.raises(InvalidInput) as caught:
        load(small.replace("max_concurrency: 4", "max_concurrency: 0") + "golden: {file: g.jsonl}\n")
    told = [(Path(fault.where).name, fault.line, fault.key) for fault in caught.value.faults]
    ours = [(line, key) for name, line, key in told if name == "g.jsonl"]
    assert ours == [
        (2, "max_tokens"), (2, "contain"), (4, ""), (5, "messages.0.content"), (5, "regex"), (6, ""), (7, ""),
        (8, "json_schema"), (9, ""),
    ]  # fmt: skip
    assert ("r.yaml", 9, "limits.max_concurrency") in told
    assert ("r.yaml", 10, "golden.file") in told, "more tokens than an answer may have"
    assert "did you mean contains?" in str(caught.value)


@pytest.mark.parametrize(("content", "problem"), [(None, "No such file"), ("\n", "holds no question")])
def test_a_file_without_questions(
    load: Load, small: str, tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "g.jsonl").write_text(content)
    with pytest.raises(InvalidInput, match=problem):
        load(small + "golden: {file: g.jsonl}\n")


SCHEMA = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("checks", "right", "wrong"),
    [
        ({}, "x", "  \n"),
        ({"equals": "two years"}, " two years\n", "two years."),
        ({"equals": ""}, " ", "x"),
        ({"contains": "two"}, "about two years", "a year"),
        ({"regex": r"\d+ days"}, "within 3 days", "soon"),
        ({"json_schema": SCHEMA}, '{"id": 3}', '{"id": "3"}'),
        ({"json_schema": SCHEMA}, '{"id": 3}', "it is 3"),
        ({"json_schema": {"$ref": "https://nowhere.invalid/x"}, "contains": "1"}, None, "1"),
        ({"contains": "two", "regex": "^It"}, "It is two", "two of It"),
    ],
)
def test_an_answer_is_judged(checks: dict[str, object], right: str | None, wrong: str) -> None:
    question = GoldenQuestion(prompt="Hi", **checks)
    assert question.fault(wrong)
    assert right is None or question.fault(right) is None


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.floats(0.01, 1))
def test_a_package_passes_by_its_share_of_right_answers(right: list[bool], share: float) -> None:
    questions = tuple(GoldenQuestion(prompt=str(at), equals="yes") for at in range(len(right)))
    report = GoldenSet(questions, share).ask(lambda one: "yes" if right[int(one.text)] else "no")
    assert report.right == sum(right)
    assert report.passed is (sum(right) / len(right) >= share)
    assert str(report).count("\n") == len(right) - sum(right)


def test_a_package_carries_its_questions(tmp_path: Path) -> None:
    assert GoldenSet.load(tmp_path) is None
    found = load_recipe("tiny-cpu").golden
    assert found is not None
    questions = found.read()
    write_document(questions.document, tmp_path)
    assert GoldenSet.load(tmp_path) == questions
    (tmp_path / "golden.json").write_text('{"min_passed": 1}')
    with pytest.raises(UnreadableFile, match="holds no golden questions"):
        GoldenSet.load(tmp_path)


def test_other_questions_make_another_package_and_nothing_else(tmp_path: Path) -> None:
    file = copy_recipe(load_recipe("tiny-cpu").provenance.file or Path(), str(tmp_path / "mine.yaml"))
    store = Store.at(tmp_path / "store")

    def keys(text: str) -> dict[str, str]:
        (tmp_path / "g.jsonl").write_text(text, "utf-8")
        recipe = load_recipe(file, [f"golden.file={tmp_path}/g.jsonl"])
        return {step.name: step.key.digest for step in prepare(recipe, store, offline=True).plan}

    plain, spaced = keys(HEAD + ', "contains": "a"}'), keys('{"contains":"a","prompt":"Hi"}\n\n')
    assert plain == spaced
    changed = keys(HEAD + ', "contains": "b"}')
    assert {name for name in plain if plain[name] != changed[name]} == {"package"}
