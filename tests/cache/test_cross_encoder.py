"""A cross-encoder as the judge of near questions: its probability, what it is not asked, and the way from the Hub."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.entry import StoredChunk
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.semantic.cross_encoder import CrossEncoder, CrossEncoderVerifier
from pipeline.cache.semantic.decision import Decision
from pipeline.cache.semantic.onnx_export import write_onnx
from pipeline.errors import UserError
from pipeline.recipe import Recipe, load_recipe
from pipeline.stages.response_cache import obtain_verifier, open_response_cache
from pipeline.store import Store
from tests.support.cache_asking import question
from tests.support.encoder import write_cross_encoder, write_encoder
from tests.support.hub import LoopbackHub, asked_hub

pytest.importorskip("onnx")
ASKED, KEPT = "where is the parcel ?", "where is my parcel ?"
REPO = "org/judge"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("judge") / "checkpoint")


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its graph in 32 bits only."""
    made = tmp_path_factory.mktemp("graph")
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(checkpoint / name, made / name)
    write_onnx(checkpoint, made / "model.onnx")
    return made


# As `BertForSequenceClassification` of transformers 5.14 (torch 2.13) judges them, by the number of its outputs.
BY_TRANSFORMERS = {
    1: {(ASKED, KEPT): 0.51676, ("where", "is the shop open ?"): 0.45267, ("", "?"): 0.92772},
    2: {(ASKED, KEPT): 0.05353, ("where", "is the shop open ?"): 0.02306, ("", "?"): 0.01045},
}


@pytest.mark.parametrize("labels", BY_TRANSFORMERS)
def test_the_probability_is_that_of_transformers(labels: int, tmp_path: Path) -> None:
    checkpoint = write_cross_encoder(tmp_path / "checkpoint", labels)
    write_onnx(checkpoint, checkpoint / "model.onnx")
    judge = CrossEncoder(checkpoint)
    for (first, second), probability in BY_TRANSFORMERS[labels].items():
        assert judge(first, second) == pytest.approx(probability, abs=2e-5)


def test_it_is_loaded_once_and_only_when_it_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    made, real = [], onnxruntime.InferenceSession

    def session(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    judge = CrossEncoder(folder)
    assert made == []
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(lambda _: judge(ASKED, KEPT), range(16)))
    assert (len(made), len(found)) == (1, 1)


def test_what_is_too_long_for_the_model_is_not_judged(folder: Path) -> None:
    judge = CrossEncoder(folder)
    assert judge("parcel " * 40, "parcel " * 85) is not None
    assert judge("parcel " * 40, "parcel " * 86) is None
    assert CrossEncoderVerifier(Guarded(), judge).decide("parcel " * 40, "parcel " * 86, 0.9) == Decision(0.0)


class Guarded:
    """A verifier whose guard forbids what says "no"."""

    default_min_score = 0.5

    def prepare(self, text: str) -> None:
        pass

    def decide(self, question: str, candidate: str, cosine: float) -> Decision:  # noqa: ARG002
        return Decision(0.3, "negation" if "no" in candidate else None)


def test_what_a_guard_forbids_is_not_asked(folder: Path) -> None:
    class Refuses(CrossEncoder):
        def __call__(self, first: str, second: str) -> float | None:  # noqa: ARG002
            raise AssertionError("asked")

    judge = CrossEncoderVerifier(Guarded(), Refuses(folder))
    assert judge.decide("where is it ?", "no where", 0.9).forbidden == "negation"
    with pytest.raises(AssertionError, match="asked"):
        judge.decide("where is it ?", "where", 0.9)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_encoder(tmp_path_factory.mktemp("judged") / "encoder")
    write_onnx(folder, folder / "model.onnx")
    return folder


def recipe(encoder: Path, verifier: str, **more: object) -> Recipe:
    dials = "".join(f", {name}: {value}" for name, value in more.items())
    models = f"embedder: 'local:{encoder}', verifier: '{verifier}'"
    semantic = f"{{{models}, min_similarity: 0.3, mode: serve, guards: []{dials}}}"
    return load_recipe("tiny-cpu", ["cache.enabled=true", f"cache.semantic={semantic}"])


def served(given: Recipe, store: Store) -> str | None:
    """How the second question is answered by a cache that holds the answer to the first."""
    cache = open_response_cache(given, store)
    assert isinstance(cache, ResponseCache)
    cache.backend.purge()
    assert cache.store(question(KEPT), [StoredChunk("there")], finish_reason="stop")
    hit = cache.lookup(question(ASKED))
    assert cache.counters["failed_comparison"] == 0
    cache.close()
    return None if hit is None else hit.cached.kind


def test_its_probability_decides(encoder: Path, folder: Path, tmp_path: Path) -> None:
    chance = CrossEncoder(folder)(ASKED, KEPT)
    assert chance is not None
    store, source = Store(tmp_path), f"local:{folder}"
    assert served(recipe(encoder, source, min_score=chance * 0.99), store) == "semantic"
    assert served(recipe(encoder, source, min_score=chance * 1.01), store) is None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with asked_hub(monkeypatch, tmp_path, retries=1) as running:
        yield running


def test_a_published_graph_is_fetched_once_and_nothing_else(
    hub: LoopbackHub, folder: Path, encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    published = {"onnx/model.onnx": (folder / "model.onnx").read_bytes()}
    others = {
        "pytorch_model.bin": b"pickle",
        "onnx/model_O4.onnx": b"for GPUs",
        "openvino/openvino_model.bin": b"x",
    }
    hub.add(REPO, files | published | others)
    hub.faults.redirect, hub.faults.page_size = True, 2
    store, given = Store(tmp_path / "store"), recipe(encoder, f"hf:{REPO}", min_score=0)
    assert served(given, store) == "semantic"
    assert hub.fetched() == {"config.json", "tokenizer.json", "model.onnx"}
    made = obtain_verifier(given, store)
    assert made is not None
    exact, kept = CrossEncoder(folder)(ASKED, KEPT), CrossEncoder(made)(ASKED, KEPT)
    assert kept == pytest.approx(exact, abs=0.2), "in 8 bits, or as it was published"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = len(hub.requests)
    assert served(given, store) == "semantic"
    assert len(hub.requests) == asked


def test_without_a_published_graph_one_is_made_of_the_weights(
    hub: LoopbackHub, checkpoint: Path, encoder: Path, tmp_path: Path
) -> None:
    hub.add(REPO, {path.name: path.read_bytes() for path in checkpoint.iterdir() if path.is_file()})
    assert served(recipe(encoder, f"hf:{REPO}", min_score=0), Store(tmp_path / "store")) == "semantic"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"onnx/model.onnx": b"no graph"},
            "not a cross-encoder that can be used: model.onnx cannot be loaded",
        ),
        ({"onnx/model.onnx": None}, "not a cross-encoder that can be used: model.onnx gives"),
        ({"onnx/model.onnx_data": b"weights"}, "keeps its weights in another file"),
        ({"tokenizer.json": b""}, "has onnx/model.onnx, but no tokenizer.json"),
    ],
)
def test_what_is_no_cross_encoder_is_refused_at_the_start(
    change: dict[str, bytes | None],
    said: str,
    hub: LoopbackHub,
    folder: Path,
    encoder: Path,
    tmp_path: Path,
) -> None:
    files = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    files["onnx/model.onnx"] = (folder / "model.onnx").read_bytes()
    # None stands for the graph of something else, nothing for a file that is not there.
    instead = (encoder / "model.onnx").read_bytes()
    files |= {name: instead if content is None else content for name, content in change.items()}
    hub.add(REPO, {name: content for name, content in files.items() if content})
    with pytest.raises(UserError) as caught:
        open_response_cache(recipe(encoder, f"hf:{REPO}"), Store(tmp_path / "store"))
    assert said in str(caught.value)
