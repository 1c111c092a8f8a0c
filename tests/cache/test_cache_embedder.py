"""Embeddings: a small encoder of our own against transformers, and the limits of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from pipeline.cache.semantic.embedder import Embedder, load_graph
from pipeline.cache.semantic.onnx_export import write_onnx
from tests.support.encoder import write_encoder

pytest.importorskip("onnx")
# As `BertModel` of transformers 5.14 (torch 2.13) embeds "Where is my parcel?" with that encoder: the mean of its last
# hidden states, of length 1.
BY_TRANSFORMERS = (
    0.65068, -0.13171, -0.0492, -0.02266, -0.15172, 0.11457, -0.3731, -0.20943, -0.00135, 0.18492, -0.24662, 0.11839,
    -0.11193, 0.28958, 0.2246, -0.28506,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT whose tokenizer cuts and pads by itself."""
    folder = write_encoder(tmp_path_factory.mktemp("bert") / "encoder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=64)
    tokenizer.enable_truncation(64)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100}))
    write_onnx(folder, folder / "model.onnx")
    return folder


def test_the_embedding_is_that_of_transformers(checkpoint: Path) -> None:
    found = Embedder(checkpoint)("Where is my parcel?")
    assert found is not None
    np.testing.assert_allclose(found, BY_TRANSFORMERS, atol=2e-5)
    assert found.dtype == np.float32


def test_long_text_has_no_embedding_rather_than_a_cut_one(checkpoint: Path) -> None:
    embedder = Embedder(checkpoint)
    assert embedder.max_tokens == 100
    assert embedder("parcel " * 98) is not None
    assert embedder("parcel " * 99) is None


def test_the_tokenizers_own_cut_and_padding_are_off(checkpoint: Path) -> None:
    assert Embedder(checkpoint).tokens("parcel " * 200) == 202
    assert Embedder(checkpoint).tokens("parcel") == 3


def test_a_folder_without_a_graph(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"needs tokenizer\.json and one of"):
        Embedder(tmp_path)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    with pytest.raises(ValueError, match="model_type = roberta, not bert"):
        write_onnx(tmp_path, tmp_path / "model.onnx")


def test_products_of_8_bit_numbers_are_exact_on_every_processor(checkpoint: Path) -> None:
    """ONNX Runtime knows the setting; what it changes shows on processors without VNNI only."""
    options = load_graph(checkpoint / "model.onnx").get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert options.intra_op_num_threads == 1
