"""The package of a `cpu` recipe: whether its engine holds answers to a form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from pipeline.errors import StageError
from pipeline.progress import Silent
from pipeline.recipe import Recipe, load_recipe
from pipeline.runtimes import Engines
from pipeline.runtimes.cpu.runtime import CpuBackend
from pipeline.triton.config import parameters_of, parse
from pipeline.triton.deployment import Deployment
from tests.runtimes.conftest import CHECKPOINTS, Pair


class Heard(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def say(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer of whole words, which llguidance does not know."""
    folder = tmp_path / "words"
    folder.mkdir()
    vocabulary = {"</s>": 0, "<unk>": 1, "parcel": 2}
    Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def recipe(said: str) -> Recipe:
    return load_recipe(str(CHECKPOINTS.parent / "tiny-cpu.yaml"), ["draft=null", f"guided_decoding={said}"])


def packaged(
    said: str, tokenizer: Path, pair: Pair, into: Path, heard: Heard
) -> tuple[Deployment, dict[str, str]]:
    CpuBackend().package(recipe(said), Engines(pair.target, None, tokenizer), into, heard)
    config = parse((into / "model_repository/tensorrt_llm/config.pbtxt").read_text())
    return Deployment.load(into), parameters_of(config)


@pytest.mark.parametrize(("said", "on"), [("null", True), ("true", True), ("false", False)])
def test_it_is_on_unless_the_recipe_says_no(cpu_pair: Pair, tmp_path: Path, said: str, on: bool) -> None:
    deployment, parameters = packaged(
        said, CHECKPOINTS / "support-target", cpu_pair, tmp_path / "made", Heard()
    )
    assert (deployment.guided_decoding, deployment.structural_tags) == (on, on)
    assert ("guided_decoding_backend" in parameters) is on
    assert (tmp_path / "made/model_repository/tensorrt_llm/1/tokenizer/tokenizer.json").is_file() is on


def test_a_tokenizer_that_cannot_be_used_turns_it_off(cpu_pair: Pair, tmp_path: Path, words: Path) -> None:
    heard = Heard()
    deployment, parameters = packaged("null", words, cpu_pair, tmp_path / "made", heard)
    assert not deployment.guided_decoding
    assert "guided_decoding_backend" not in parameters
    assert any("No guided decoding: llguidance cannot use this tokenizer" in text for text in heard.texts)


def test_a_recipe_that_insists_is_refused(cpu_pair: Pair, tmp_path: Path, words: Path) -> None:
    with pytest.raises(StageError, match="guided_decoding is true, but llguidance cannot use this tokenizer"):
        packaged("true", words, cpu_pair, tmp_path / "made", Heard())
