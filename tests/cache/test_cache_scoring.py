"""The learned scorer: what it computes, whom it knows, and how it judges questions that it never saw."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.onnx_export import write_onnx
from pipeline.cache.semantic.scoring import Learned, Scorer, load_scorer, verifier_for
from pipeline.cache.semantic.scoring.facts import NAMES, facts
from pipeline.cache.semantic.scoring.judge import FORBIDDING
from pipeline.cache.semantic.scoring.scorer import PROBE, AnotherEncoder
from pipeline.cache.semantic.verification import CHECKS, Checked
from pipeline.cache.tuning.choosing import choose
from pipeline.cache.tuning.measuring import measure
from pipeline.cache.tuning.pairs import Pair
from pipeline.cli.render.cache_tune import choice_json, choice_page
from tests.support.encoder import write_encoder
from tests.support.minilm import minilm

ROOT = Path(__file__).resolve().parent.parent.parent
ASIDE = ROOT / "scripts/questions/aside"
SIZE = 6
Array = NDArray[np.float32]


@pytest.fixture(scope="module")
def training() -> ModuleType:
    pytest.importorskip("torch")
    loader = SourceFileLoader("train_scorer", str(ROOT / "scripts/train_scorer"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # where dataclasses look for it
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def learned() -> Learned:
    found = verifier_for(minilm())
    assert isinstance(found, Learned)
    return found


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    pytest.importorskip("onnx")
    folder = write_encoder(tmp_path_factory.mktemp("scoring") / "encoder")
    write_onnx(folder, folder / "model.onnx")
    return Embedder(folder)


def states_of(text: str) -> Array | None:
    """Random ones, a word each."""
    words = text.split()
    rng = np.random.default_rng(sum(map(ord, text)))
    return rng.standard_normal((len(words), SIZE)).astype(np.float32) if words else None


def words() -> st.SearchStrategy[str]:
    return st.lists(
        st.sampled_from(["where", "is", "my", "parcel", "now", "the", "card"]), min_size=1, max_size=6
    ).map(" ".join)


@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(words(), words()), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_what_is_served_is_what_was_trained(
    training: ModuleType, pairs: list[tuple[str, str]], seed: int
) -> None:
    import torch

    rng = np.random.default_rng(seed)
    known = rng.standard_normal((len(pairs), len(NAMES))).astype(np.float32)
    torch.manual_seed(seed)
    net = training.Net(SIZE, 8, known).eval()
    weights = {name: value.numpy() for name, value in net.state_dict().items()}
    probe = states_of(PROBE)
    assert probe is not None
    scorer = Scorer({**weights, "facts": np.array(NAMES), **training.LEAST, "probe": probe}, states_of)
    examples = [
        training.Example(
            states_of(one), states_of(other), row, same=True, similarity=1.0, forbidden=False, opposed=False
        )
        for (one, other), row in zip(pairs, known, strict=True)
    ]
    expected = training.logits(net, examples)
    for (one, other), row, logit in zip(pairs, known, expected, strict=True):
        assert scorer(one, other, row) == pytest.approx(float(logit), abs=1e-4)
        assert scorer(other, one, row) == pytest.approx(float(logit), abs=1e-4)
    assert scorer("", "parcel", known[0]) is None


def test_a_question_that_was_looked_up_is_not_given_to_the_encoder_again() -> None:
    ran: list[str] = []

    def states(text: str) -> Array | None:
        ran.append(text)
        return minilm().states(text)

    learned = Learned(load_scorer(states), tuple(CHECKS))
    asked = [f"Where can I see my {what}?" for what in ("parcel", "order", "bill", "offer")]
    for text in asked:
        learned.prepare(text)
    before = len(ran)
    for one, other in pairwise(asked):
        assert learned.objection(one, other, 0.9) is not None
    assert len(ran) == before


def test_weights_for_other_facts_are_refused() -> None:
    with pytest.raises(ValueError, match="run scripts/train_scorer"):
        Scorer({"facts": np.array(["similarity"])}, states_of)


def test_an_encoder_that_it_does_not_know_is_left_to_the_checks(unknown: Embedder) -> None:
    assert unknown.has_states
    assert isinstance(verifier_for(unknown), Checked)
    assert verifier_for(unknown, ["numbers"], scorer=False).checks == ("numbers",)
    with pytest.raises(AnotherEncoder, match="only all-MiniLM-L6-v2"):
        verifier_for(unknown, scorer=True)
    with pytest.raises(ValueError, match="number: not known"):
        verifier_for(unknown, ["number"])


def test_states_are_those_of_every_token(unknown: Embedder) -> None:
    found = unknown.states("where is my parcel")
    assert found is not None
    assert found.shape == (4, 32)
    assert unknown.states("") is None
    assert unknown.states("parcel " * 600) is None


@pytest.mark.parametrize(
    ("one", "other", "forbidding"),
    [
        ("How do I cancel order 4711?", "How do I cancel order 4712?", "numbers"),
        ("Why did Europe go to war in 1914?", "Why did Europe go to war?", None),
        ("What does `git reset` do?", "What does `git revert` do?", "quotes"),
        ("Can I pay by card and cash?", "Can I pay by card or cash?", "joining"),
        ("How do I open a .docx file?", "How do I open a .xlsx file?", None),
    ],
)
def test_what_both_say_differently_is_forbidden(one: str, other: str, forbidding: str | None) -> None:
    known = facts(one, other, 0.9)
    assert (known.forbidden(tuple(CHECKS)) is not None) == (forbidding is not None)
    if forbidding is not None:
        assert known.forbidden([forbidding]) is not None
        assert known.forbidden([name for name in CHECKS if name != forbidding]) is None
    assert known.values.shape == (len(NAMES),)


def test_the_scorer_overrules_checks_that_object_to_wording(learned: Learned) -> None:
    asked, kept = (
        "How can I become fluent in Spanish quickly?",
        "What's the fastest way to become fluent in Spanish?",
    )
    alone = verifier_for(minilm(), scorer=False)
    assert alone.objection(asked, kept, similarity(asked, kept)) is not None
    assert learned.objection(asked, kept, similarity(asked, kept)) is None
    assert learned.objection(asked, asked, 1.0) is None


def test_checks_and_score_by_themselves_say_what_the_whole_says(learned: Learned) -> None:
    assert learned.checks_alone == tuple(name for name in CHECKS if name in FORBIDDING)
    for stricter in (learned, replace(learned, min_score=1.5)):
        for row in rows()[::40]:
            near = similarity(row["a"], row["b"])
            pair = str(row["a"]), str(row["b"]), near
            serves = not any(stricter.objecting(*pair)) and stricter.value(*pair) >= stricter.min_score
            assert (stricter.objection(*pair) is None) == serves
    assert not any(learned.objecting("Where is it?", "Where is it?", 1.0))
    assert learned.value("Where is it?", "Where is it?", 1.0) == math.inf


def test_the_score_that_tuning_chooses_is_what_a_cache_then_asks_for(learned: Learned) -> None:
    pairs = [Pair(str(row["a"]), str(row["b"]), row["same"] == 1) for row in rows()[::4]]
    measured = measure(pairs, minilm(), learned, min_similarity=0.6)
    assert (measured.dial, measured.min_similarity) == ("min_score", 0.6)
    choice = choose(measured, budget=0.03)
    chosen = replace(learned, min_score=choice.outcome.threshold)
    served = [
        pair
        for pair in pairs
        if (near := similarity(pair.a, pair.b)) >= 0.6 and chosen.objection(pair.a, pair.b, near) is None
    ]
    assert sum(pair.same for pair in served) == choice.outcome.recall.count > 0
    assert sum(not pair.same for pair in served) == choice.outcome.false.count
    assert choice.outcome.false.value <= 0.03
    assert f"min_score: {choice.outcome.threshold:+.1f}" in choice_page(measured, choice)
    assert json.loads(choice_json(measured, choice))["chosen"]["scorer"] is True


@pytest.mark.slow
@pytest.mark.parametrize(("files", "traps", "true"), [("log_*", 0.01, 0.5), ("[!l]*", 0.03, 0.4)])
def test_questions_written_aside_are_judged_as_the_documentation_says(
    learned: Learned, files: str, traps: float, true: float
) -> None:
    """Half of them here; benchmarks/near_questions.py judges all."""
    served: dict[int, list[bool]] = {0: [], 1: []}
    for row in rows(files)[::2]:
        near = similarity(row["a"], row["b"])
        passes = near >= 0.45 and learned.objection(row["a"], row["b"], near) is None
        served[row["same"]].append(passes)
    assert np.mean(served[0]) <= traps
    assert np.mean(served[1]) >= true


def rows(files: str = "[!l]*") -> list[dict[str, Any]]:
    """Those whose authors saw neither checks nor scorer; `files`: a pattern of their names."""
    found = sorted(ASIDE.glob(f"{files}.jsonl"))
    assert found
    return [json.loads(line) for file in found for line in file.read_text(encoding="utf-8").splitlines()]


def similarity(one: str, other: str) -> float:
    a, b = minilm()(one), minilm()(other)
    assert a is not None
    assert b is not None
    return float(a @ b)
