"""Embeddings: a small encoder of our own against transformers, and the limits of text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.semantic.embedder import Embedder, load_graph
from pipeline.cache.semantic.onnx_export import write_onnx

pytest.importorskip("onnx")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "where", "is", "my", "parcel", "?"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights, 2 layers, saved by transformers."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=300,
    )  # fmt: skip
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**written, "position_embedding_type": "absolute"}))
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=128)
    tokenizer.enable_truncation(128)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_onnx(folder, folder / "model.onnx")
    return folder


def test_the_embedding_is_that_of_transformers(checkpoint: Path) -> None:
    import torch
    from transformers import BertModel

    model = BertModel.from_pretrained(checkpoint, add_pooling_layer=False).eval()
    with torch.no_grad():
        states = model(torch.tensor([[2, 4, 5, 6, 7, 8, 3]])).last_hidden_state[0]
    expected = states.mean(0).numpy()
    found = Embedder(checkpoint)("Where is my parcel?")
    assert found is not None
    np.testing.assert_allclose(found, expected / np.linalg.norm(expected), atol=1e-5)
    assert found.dtype == np.float32


def test_long_text_has_no_embedding_rather_than_a_cut_one(checkpoint: Path) -> None:
    embedder = Embedder(checkpoint)
    assert embedder("parcel " * (embedder.max_tokens - 2)) is not None
    assert embedder("parcel " * (embedder.max_tokens - 1)) is None


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
    options = load_graph(checkpoint / "model.onnx", threads=1).get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"
    assert options.intra_op_num_threads == 1
