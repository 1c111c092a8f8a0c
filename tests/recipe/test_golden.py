"""Golden questions: what a file of them may hold, how answers are judged, and what depends on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InvalidInput
from pipeline.golden import GoldenBudgets, GoldenSet, write_document
from pipeline.golden_questions import AnswerJudge, GoldenQuestion
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
        (2, "max_tokens"), (2, "contain"), (4, ""), (5, "messages[0].content"), (5, "regex"), (6, ""), (7, ""),
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
    report = GoldenSet(questions, GoldenBudgets(min_passed=share)).ask(
        lambda question: "yes" if right[int(question.text)] else "no"
    )
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


PARTS = st.sampled_from(["yes", "yes and no and so on and on", "yes and no and so on and off", "no"])


@given(st.lists(st.tuples(PARTS, PARTS), min_size=1, max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_answers_are_held_to_those_of_another_package(
    answers: list[tuple[str, str]], equal: float, similar: float
) -> None:
    questions = tuple(GoldenQuestion(prompt=str(at)) for at in range(len(answers)))
    golden = GoldenSet(questions, GoldenBudgets(min_equal=equal, min_similar=similar))
    found = golden.compare(
        *(lambda question, side=side: answers[int(question.text)][side] for side in (0, 1))
    )
    same = sum(first == other for first, other in answers)
    assert found.equal == same <= found.similar <= len(answers)
    assert found.passed is (same / len(answers) >= equal and found.similar / len(answers) >= similar)
    assert [check.budget for check in found.checks] == ["min_passed", "min_equal", "min_similar"]
    assert golden.compare(*[lambda question: answers[int(question.text)][0]] * 2).passed, (
        "twins keep every budget"
    )
    assert found.report.answers == golden.ask(lambda question: answers[int(question.text)][1]).answers


def test_budgets_travel_with_the_recipe_and_the_package(load: Load, small: str, tmp_path: Path) -> None:
    (tmp_path / "g.jsonl").write_text(HEAD + "}", "utf-8")
    section = load(small + "golden: {file: g.jsonl, min_passed: 0.5, min_similar: 0.9}\n").golden
    assert section is not None
    golden = section.read()
    assert golden.budgets == GoldenBudgets(min_passed=0.5, min_similar=0.9)
    write_document(golden.document, tmp_path)
    assert GoldenSet.load(tmp_path) == golden
    with pytest.raises(InvalidInput, match="min_equal"):
        load(small + "golden: {file: g.jsonl, min_equal: 1.5}\n")


def test_an_expression_that_never_ends_is_a_fault_and_the_next_answer_is_judged() -> None:
    endless = GoldenQuestion(prompt="?", regex="(a+)+$")
    of_schema = GoldenQuestion(prompt="?", json_schema={"type": "string", "pattern": "^(a+)+$"})
    answer = "a" * 60 + "!"
    with AnswerJudge(cpu_s=0.5) as judge:
        fault = judge.fault(endless, answer)
        assert fault == "cannot be judged: its expression '(a+)+$' took more than 0.5 s of processor time"
        assert judge.fault(endless, "aaa") is None
        assert "its schema took more" in str(judge.fault(of_schema, json.dumps(answer)))
        assert judge.fault(endless, "b") == endless.fault("b")


@pytest.mark.parametrize(
    "checks",
    [{"regex": "^ ?4"}, {"json_schema": {"type": "object", "required": ["a"]}}, {"equals": "4"}],
    ids=str,
)
def test_another_process_judges_as_this_one_does(checks: dict[str, Any]) -> None:
    question = GoldenQuestion(prompt="1, 2, 3,", **checks)
    with AnswerJudge() as judge:
        for answer in ("", "4", " 5\ud800", "\x00\n\u2028", "{}", '{"a": 1}', "[" * 100_000):
            assert judge.fault(question, answer) == question.fault(answer)
