"""The tokenizer that target and draft share: byte-level BPE in the style of Llama 3, with 2048 tokens.

Every byte is a token, so any text comes back exactly: decode(encode(text)) == text. Digits are cut into pairs
(Llama 3: triples), which keeps every number within the small vocabulary.
"""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
MAX_POSITIONS = 1024

PAD, BOS, EOS = "<|pad|>", "<|begin_of_text|>", "<|end_of_text|>"
START_HEADER, END_HEADER, END_OF_TURN = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, START_HEADER, END_HEADER, END_OF_TURN]  # ids 0 to 5

ASSISTANT_HEADER = f"{START_HEADER}assistant{END_HEADER}\n\n"

# Llama 3's own pattern, but for {1,2} in place of {1,3}.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Each becomes one token: every pair of digits, and what the chat template writes around a message.
_ALWAYS_ONE_TOKEN = [*(f"{pair:02}" for pair in range(100)), "user", "assistant", "system", "\n\n"]
_OFTEN = 1000  # times that training sees them, more than it sees most words

CHAT_TEMPLATE = (
    "{{- bos_token }}\n"
    "{%- for message in messages %}\n"
    f"    {{{{- '{START_HEADER}' + message['role'] + '{END_HEADER}\\n\\n' }}}}\n"
    f"    {{{{- message['content'] | trim + '{END_OF_TURN}' }}}}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    f"    {{{{- {ASSISTANT_HEADER!r} }}}}\n"
    "{%- endif %}\n"
)

_NAMED_TOKENS = {"bos_token": BOS, "eos_token": END_OF_TURN, "pad_token": PAD}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **_NAMED_TOKENS,
    "model_max_length": MAX_POSITIONS,
    "padding_side": "left",
    "clean_up_tokenization_spaces": False,
    "model_input_names": ["input_ids", "attention_mask"],
}


def train(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, _ALWAYS_ONE_TOKEN * _OFTEN), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write what both transformers 4 and 5 read; save_pretrained of either writes files the other does not know."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _TOKENIZER_CONFIG)
    _write_json(folder / "special_tokens_map.json", _NAMED_TOKENS)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def load(folder: Path) -> PreTrainedTokenizerFast:
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return loaded


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]], *, opens_answer: bool = False
) -> list[int]:
    """The tokens of a dialogue as the chat template writes it; with `opens_answer`, the header of an answer follows."""
    tokens: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=opens_answer, return_dict=False
    )
    return list(tokens)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
