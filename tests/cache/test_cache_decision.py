"""The decision on near questions: what the score does, whom it knows, and what it makes of questions of known forms."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.cache.semantic.decision import FEATURES, RegressionVerifier, default_verifier, is_known
from pipeline.cache.semantic.embedder import Embedder
from pipeline.cache.semantic.guards import GUARDS
from pipeline.cache.semantic.onnx_export import write_onnx
from pipeline.cache.tuning.pairs import Pair
from pipeline.recipe.response_cache import GuardName, SemanticSettings
from tests.support.encoder import write_encoder
from tests.support.minilm import minilm
from tests.support.phenomena import TRAPS

ROOT = Path(__file__).resolve().parent.parent.parent
FLOOR = SemanticSettings().min_similarity
KNOWN = default_verifier(None)
questions = st.sampled_from(
    ["How do I reset my password?", "What is the way to reset a password?", "Where is the parcel?", "Wo ist das Paket?",
     "How long does shipping to Bern take?", "¿Dónde está el paquete?", "Is it open?", "", "🎉", "5 + 3", "5 - 3"]
)  # fmt: skip
cosines = st.floats(-1, 1)


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    pytest.importorskip("onnx")
    folder = write_encoder(tmp_path_factory.mktemp("decision") / "encoder")
    write_onnx(folder, folder / "model.onnx")
    return Embedder(folder)


@given(questions, questions, cosines, cosines)
def test_nearer_is_never_worse_and_the_order_does_not_matter(
    one: str, other: str, cosine: float, another: float
) -> None:
    found = KNOWN.decide(one, other, cosine)
    assert 0 <= found.score <= 1
    assert found == KNOWN.decide(other, one, cosine)
    nearer, farther = sorted((cosine, another), reverse=True)
    assert KNOWN.decide(one, other, nearer).score >= KNOWN.decide(one, other, farther).score


def test_the_same_words_score_1_and_no_others_do() -> None:
    assert KNOWN.decide("Where is it?", "where is it", 0.5).score == 1
    for one, other in (("5 + 3", "5 - 3"), ("🎉", "🙏"), ("", "🎉"), ("Is it open?", "Was it open?")):
        assert KNOWN.decide(one, other, 1.0).score < 1


def test_a_guard_that_is_left_out_forbids_nothing_and_moves_no_score() -> None:
    one, other = "Can I pay in 3 parts?", "Can I pay in 4 parts?"
    found = KNOWN.decide(one, other, 0.95)
    assert found.forbidden == "numbers: 3 and 4"
    assert not found.serves(0.0)
    without = default_verifier(None, [name for name in GUARDS if name != "numbers"]).decide(one, other, 0.95)
    assert (without.forbidden, without.score) == (None, found.score)
    assert without.serves(without.score)
    with pytest.raises(ValueError, match=r"guards number: not known \(one of numbers, codes, "):
        default_verifier(None, ["number"])
    assert get_args(GuardName) == tuple(GUARDS)


def test_the_encoder_is_known_again() -> None:
    assert is_known(minilm())
    assert default_verifier(minilm()) == KNOWN


def test_of_an_encoder_that_is_not_known_the_cosine_tells_nothing(unknown: Embedder) -> None:
    verifier = default_verifier(unknown)
    assert not is_known(unknown)
    one, other = "How do I reset my password?", "How can I reset my password?"
    assert verifier.decide(one, other, 0.1) == verifier.decide(one, other, 0.9)
    assert verifier.decide(one, other, 0.9).serves(verifier.default_min_score)
    assert not verifier.decide(one, "How do I reset my phone?", 0.9).serves(verifier.default_min_score)
    assert verifier.decide("Wo ist mein Paket?", "Wo ist das Paket?", 0.9).score == 0


def served(verifier: RegressionVerifier, one: str, other: str) -> bool:
    vectors = minilm()(one), minilm()(other)
    assert vectors[0] is not None
    assert vectors[1] is not None
    cosine = float(vectors[0] @ vectors[1])
    return cosine >= FLOOR and verifier.decide(one, other, cosine).serves(verifier.default_min_score)


def test_rewordings_are_served() -> None:
    for one, other in (
        ("How do I reset my password?", "How can I reset my password?"),
        ("What is the capital of France?", "what's the capital of france"),
        ("How do I bake bread at home?", "How can I bake bread at home?"),
    ):
        assert served(KNOWN, one, other), (one, other)


def test_of_traps_of_known_forms_few_are_served() -> None:
    """Each form with ten fillings of its slots."""
    pairs = [(trap.name, *pair) for trap in TRAPS for pair in trap.pairs(10)]
    wrong = [pair for pair in pairs if served(KNOWN, *pair[1:])]
    assert len(wrong) <= 0.05 * len(pairs), wrong


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    loader = SourceFileLoader("fit_decision", str(ROOT / "scripts/fit_decision"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # where dataclasses look for it
    loader.exec_module(module)
    return module


def test_fitting_finds_the_weights_that_drew_the_labels(fitting: ModuleType) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((20_000, len(FEATURES)))
    weights = rng.standard_normal(len(FEATURES))
    same = rng.random(len(values)) < 1 / (1 + np.exp(-(values @ weights + 0.5)))
    none = np.zeros(len(values), bool)
    found = fitting.fit(fitting.Judged([], values, none, same, none), range(len(FEATURES)))
    np.testing.assert_allclose(found.weights, weights, atol=0.1)
    assert found.bias == pytest.approx(0.5, abs=0.1)
    np.testing.assert_allclose(
        found(values[:5]), 1 / (1 + np.exp(-(values[:5] @ found.weights + found.bias)))
    )


def test_pairs_that_share_a_question_are_never_on_both_sides(fitting: ModuleType) -> None:
    texts = [("a", "b"), ("c", "d"), ("e", "f"), ("b", "c"), ("g", "f")]
    groups = fitting.groups_of([Pair(one, other, True) for one, other in texts])
    assert groups[0] == groups[1] == groups[3]
    assert groups[2] == groups[4] != groups[0]
