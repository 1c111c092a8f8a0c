"""Tokenizers of the kinds that tear characters and lose spaces, small enough to make in a test."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

TEXTS = (
    "",
    "a",
    "  two  spaces  ",
    "plain words, then more words.",
    "안녕하세요 세계",
    "Größe und Straße",
    "a 😀 b 👩‍👩‍👧 c 🇰🇷",
    "line\nbreaks\n\n\ttabs",
    "日本語テキスト",
)
BOS, EOS = "<s>", "</s>"


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen: bytes are letters, a character is up to four tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["plain words, then more words.", "two spaces and tabs"], trainer)
    return _with_bos(tokenizer)


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral: ▁ for a space, <0xE2> for what is not in the vocabulary, one leading space
    cut.
    """
    words = [
        *["▁", "▁plain", "▁words", "words", ",", "▁then", "▁more", ".", "안", "녕", "a", "b", "c", "▁a", "ß"],
        "\n",
    ]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += [word for word in dict.fromkeys(words + letters) if word not in vocabulary]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: id for id, token in enumerate(vocabulary)}, merges=[], byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    return _with_bos(tokenizer)


def metaspace() -> Tokenizer:
    """As T5 and many sentencepiece exports: the decoder itself cuts the first space."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0)], unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=[BOS, EOS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return _with_bos(tokenizer)


def split_digits() -> Tokenizer:
    """Byte-level behind a regular expression, as newer models have it."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|\s+|\p{L}+|[^\s\d\p{L}]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


KINDS = {maker.__name__: maker for maker in (byte_level, byte_fallback, metaspace, split_digits)}


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer
