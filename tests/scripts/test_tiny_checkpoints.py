"""The pair of small checkpoints and the dialogues that are checked in, and the modules that made them.

Those that import torch and transformers are imported by the tests that need them: every process collects this file.
What the models say is judged before a release: the default tests of served models would notice a damaged checkpoint.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open
from tiny import data, tools
from tiny.grammar import Grammar, expand
from tiny.slots import SLOTS, is_reserved

if TYPE_CHECKING:
    from tiny import measure
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
TARGET, DRAFT = (ROOT / f"recipes/checkpoints/support-{role}" for role in ("target", "draft"))
GRAMMAR, DIALOGUES = Grammar.load(), ROOT / "calibration/support"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
END_OF_TURN, END_OF_TEXT = 5, 2

SAMPLED_DIALOGUES = 48
SAMPLED_TOOL_DIALOGUES = 12
LEAST_EXACT_MATCH = 0.95
LEAST_ACCEPTANCE = 0.9
LEAST_TOOL_MATCH = 0.9


@pytest.fixture(scope="module")
def shared_tokenizer() -> PreTrainedTokenizerFast:
    from tiny import tokenizer

    return tokenizer.load(TARGET)


@pytest.fixture(scope="module")
def draft() -> LlamaForCausalLM:
    from tiny import models

    return models.load(DRAFT)


@pytest.fixture(scope="module")
def replies(shared_tokenizer: PreTrainedTokenizerFast) -> list[measure.Reply]:
    """What the target answers to some of the held-out dialogues."""
    from tiny import measure, models

    held_out = data.dialogues(GRAMMAR, "heldout", seed=data.SEED)
    sample = random.Random(0).sample(held_out, SAMPLED_DIALOGUES)
    return list(measure.replies(models.load(TARGET), shared_tokenizer, sample))


@pytest.fixture
def _torch_settings() -> Iterator[None]:
    """Training fixes torch's threads and algorithms for its process; other tests want theirs back."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


class TestGrammar:
    def test_a_pattern_stands_for_all_its_choices(self) -> None:
        assert expand("[a|b] c[| d]") == ["a c", "a c d", "b c", "b c d"]

    def test_the_same_seed_writes_the_same_dialogues(self) -> None:
        def first(seed: int) -> list[object]:
            return list(itertools.islice(Grammar.load().dialogues("train", seed=seed), 50))

        assert first(7) == first(7) != first(8)

    def test_splits_share_no_phrasing(self) -> None:
        for intent in GRAMMAR.intents.values():
            assert intent.phrasings["heldout"]
            assert not set(intent.phrasings["heldout"]) & set(intent.phrasings["train"])

    @pytest.mark.parametrize("name", [name for name, slot in SLOTS.items() if not slot.is_closed])
    def test_splits_share_no_number(self, name: str) -> None:
        rng = random.Random(0)
        assert all(is_reserved(SLOTS[name].draw(rng, "heldout")) for _ in range(50))
        assert not any(is_reserved(SLOTS[name].draw(rng, "train")) for _ in range(50))

    def test_a_phrasing_asks_for_one_intent_only(self) -> None:
        """The question alone decides the answer."""
        phrasings = [
            phrasing
            for intent in GRAMMAR.intents.values()
            for split in data.COUNTS
            for phrasing in intent.phrasings[split]
        ]
        assert len(phrasings) == len(set(phrasings))


class TestDialogues:
    @pytest.mark.parametrize("split", list(data.COUNTS))
    def test_the_seed_gives_the_checked_in_bytes(self, split: data.Split) -> None:
        checked_in = (DIALOGUES / f"{split}.jsonl").read_text(encoding="utf-8")
        assert data.as_jsonl(GRAMMAR, split, seed=data.SEED) == checked_in

    def test_no_held_out_question_is_asked_in_training(self) -> None:
        assert not _questions("heldout") & _questions("train")

    def test_languages_and_emoji_stand_on_both_sides(self) -> None:
        for side in (0, 1):
            text = "".join(row["messages"][side]["content"] for row in _rows("heldout"))
            assert all(character in text for character in "äñ¿주🙏" if side == 0)
            assert all(character in text for character in "üñ¡주📦" if side == 1)


class TestTools:
    def test_a_call_is_answered_from_its_result(self) -> None:
        for dialogue in tools.held_out(GRAMMAR, seed=data.SEED, count=50):
            contents = [content for _, content in dialogue.rows]
            for call, results, answer in zip(contents, contents[1:], contents[2:], strict=False):
                if not call.startswith("<tool_call>"):
                    continue
                assert call.count("<tool_call>") == results.count("<tool_response>")
                for result in re.findall(r"<tool_response>\n(.*)\n</tool_response>", results):
                    assert all(str(value) in answer for value in json.loads(result).values())

    def test_what_is_not_learnt_is_one_token_of_an_answer(
        self, shared_tokenizer: PreTrainedTokenizerFast
    ) -> None:
        from tiny import training

        prompt = next(tools.ToolGrammar.load().prompts(GRAMMAR, "train", seed=3))
        dialogue = next(dialogue for dialogue in prompt if dialogue.unlearned)
        messages = dialogue.messages()
        _, weights = training.weigh(shared_tokenizer, messages, unlearned=dialogue.unlearned)
        _, all_weights = training.weigh(shared_tokenizer, messages)
        changed = [pair for pair in zip(all_weights, weights, strict=True) if pair[0] != pair[1]]
        assert changed == [(1.0, 0.0)]


class TestTokenizer:
    @given(text=st.text())
    @example("")
    @example("a")
    @example("  two  spaces \n\n\t and\r\nlines ")
    @example("비밀번호를 잊어버렸어요 🙏🏽👩‍👩‍👧 e\u0301 \u200d\ufeff\x00\x7f")
    @example("don't . , ! 's 12345678901234567890 TP-174685")
    def test_any_text_comes_back(self, shared_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        from tiny import tokenizer

        tokens = shared_tokenizer.encode(text, add_special_tokens=False)
        assert shared_tokenizer.decode(tokens) == text
        assert max(tokens, default=0) < tokenizer.VOCABULARY_SIZE

    @pytest.mark.parametrize("name", TOKENIZER_FILES)
    def test_target_and_draft_have_the_same(self, name: str) -> None:
        assert (TARGET / name).read_bytes() == (DRAFT / name).read_bytes()

    def test_transformers_finds_template_and_special_tokens(self) -> None:
        from tiny import tokenizer
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(TARGET)
        messages = [{"role": "user", "content": " Hi! "}]
        assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )
        assert loaded.convert_tokens_to_ids(tokenizer.SPECIAL_TOKENS) == list(range(6))
        assert (loaded.pad_token, loaded.bos_token, loaded.eos_token) == (
            tokenizer.PAD,
            tokenizer.BOS,
            tokenizer.END_OF_TURN,
        )

    @pytest.mark.slow
    def test_the_seed_gives_the_checked_in_bytes(self, tmp_path: Path) -> None:
        from tiny import make

        make.make_tokenizer(make.Workshop(tmp_path))
        for name in TOKENIZER_FILES:
            assert (make.Workshop(tmp_path).checkpoint("target") / name).read_bytes() == (
                TARGET / name
            ).read_bytes()


class TestModels:
    def test_weights_are_bfloat16_and_at_most_8_mb_together(self) -> None:
        weights = [TARGET / "model.safetensors", DRAFT / "model.safetensors"]
        assert sum(path.stat().st_size for path in weights) <= 8_000_000
        for path in weights:
            with safe_open(path, framework="pt") as tensors:
                assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118

    @pytest.mark.parametrize("folder", [TARGET, DRAFT], ids=["target", "draft"])
    def test_configuration(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        generation = json.loads((folder / "generation_config.json").read_text())
        for read in (config, generation):
            assert (read["pad_token_id"], read["bos_token_id"]) == (0, 1)
            assert read["eos_token_id"] == [END_OF_TURN, END_OF_TEXT]
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert config["dtype"] == config["torch_dtype"] == "bfloat16"
        assert config["num_attention_heads"] > config["num_key_value_heads"] > 1

    def test_halves_of_the_target_fit_blocks_of_128(self) -> None:
        config = json.loads((TARGET / "config.json").read_text())
        attended = config["num_attention_heads"] * config["head_dim"]
        assert (
            config["hidden_size"] % 128 == attended // 2 % 128 == config["intermediate_size"] // 2 % 128 == 0
        )
        assert config["num_key_value_heads"] % 2 == 0

    @pytest.mark.slow
    def test_the_target_answers(self, replies: list[measure.Reply]) -> None:
        from tiny import measure

        assert measure.exact_match(replies) >= LEAST_EXACT_MATCH

    @pytest.mark.slow
    def test_the_target_calls_tools(self, shared_tokenizer: PreTrainedTokenizerFast) -> None:
        from tiny import measure, models

        sample = tools.held_out(GRAMMAR, seed=data.SEED, count=SAMPLED_TOOL_DIALOGUES)
        calls = list(measure.replies(models.load(TARGET), shared_tokenizer, sample))
        assert measure.exact_match(calls) >= LEAST_TOOL_MATCH

    @pytest.mark.slow
    def test_the_target_accepts_what_the_draft_proposes(
        self, draft: LlamaForCausalLM, replies: list[measure.Reply]
    ) -> None:
        from tiny import measure

        assert measure.acceptance(draft, replies) >= LEAST_ACCEPTANCE

    @pytest.mark.slow
    def test_acceptance_is_that_of_drafting_step_by_step(
        self, draft: LlamaForCausalLM, replies: list[measure.Reply]
    ) -> None:
        from tiny import measure

        few = replies[:: len(replies) // 6]
        assert measure.acceptance(draft, few) == pytest.approx(_acceptance_step_by_step(draft, few))


class TestTraining:
    def test_only_the_assistant_weighs_fully(self, shared_tokenizer: PreTrainedTokenizerFast) -> None:
        from tiny import training

        dialogue = next(d for d in GRAMMAR.dialogues("train", seed=0) if len(d.turns) == 2)
        tokens, weights = training.weigh(shared_tokenizer, dialogue.messages())
        said = [token for token, weight in zip(tokens, weights, strict=True) if weight == 1.0]
        assert shared_tokenizer.decode(said) == "".join(f"{answer}<|eot_id|>" for _, answer in dialogue.turns)

    @pytest.mark.slow
    @pytest.mark.usefixtures("_torch_settings")
    def test_the_same_seed_trains_the_same_weights(
        self, shared_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
    ) -> None:
        from tiny import models, training

        written = []
        for attempt in ("first", "second"):
            schedule = training.Schedule(steps=3, batch_size=4)
            model = training.train("draft", shared_tokenizer, GRAMMAR, seed=3, schedule=schedule)
            models.save(model, tmp_path / attempt)
            written.append((tmp_path / attempt / "model.safetensors").read_bytes())
        assert written[0] == written[1]


def _rows(split: data.Split) -> list[dict[str, list[dict[str, str]]]]:
    lines = (DIALOGUES / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _questions(split: data.Split) -> set[str]:
    return {m["content"] for row in _rows(split) for m in row["messages"] if m["role"] == "user"}


def _acceptance_step_by_step(draft: LlamaForCausalLM, replies: list[measure.Reply]) -> float:
    import torch
    from tiny import measure

    accepted = proposed = 0
    for reply in replies:
        position = 0
        while position < len(reply.answer):
            known = torch.tensor([reply.prompt + reply.answer[:position]])
            count = measure.DRAFT_TOKENS
            drafted = draft.generate(known, attention_mask=torch.ones_like(known), max_new_tokens=count)
            right = reply.answer[position : position + count]
            run = 0
            for token, wanted in zip(drafted[0, known.shape[1] :].tolist(), right, strict=False):
                if token != wanted:
                    break
                run += 1
            accepted, proposed, position = accepted + run, proposed + count, position + run + 1
    return accepted / proposed
