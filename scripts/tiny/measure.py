"""Quality of a pair: exact answers of the target, and how many of the draft's tokens it accepts.

Both are measured greedily on held-out dialogues, on weights that were rounded to bfloat16. Every answer of a dialogue
is asked for with the true dialogue before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny.grammar import Dialogue
from tiny.tokenizer import encode_chat
from tiny.tools import ToolDialogue

DRAFT_TOKENS = 4  # proposed at a time
_BATCH_SIZE = 32
_MAX_ANSWER_TOKENS = 128


@dataclass(frozen=True)
class Reply:
    prompt: list[int]
    answer: list[int]  # greedy; the last token is the end of turn, unless the answer ran too long
    expected: list[int]


def replies(
    target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[Dialogue | ToolDialogue]
) -> Iterator[Reply]:
    """The target's greedy answers to every question of the dialogues; questions of similar length share a batch."""
    questions = sorted(_questions(tokenizer, dialogues), key=lambda question: len(question[0]))
    for start in range(0, len(questions), _BATCH_SIZE):
        batch = questions[start : start + _BATCH_SIZE]
        unpadded = {"input_ids": [prompt for prompt, _ in batch]}
        prompts = tokenizer.pad(unpadded, return_tensors="pt", padding_side="left")
        generated = target.generate(**prompts, max_new_tokens=_MAX_ANSWER_TOKENS, do_sample=False)  # type: ignore[misc]
        answers = generated[:, prompts["input_ids"].shape[1] :].tolist()
        for (prompt, expected), answer in zip(batch, answers, strict=True):
            yield Reply(prompt, _until_end(answer, tokenizer.eos_token_id), expected)


def exact_match(replies: Sequence[Reply]) -> float:
    """The share of answers in which every token is right."""
    return sum(reply.answer == reply.expected for reply in replies) / len(replies)


def acceptance(draft: LlamaForCausalLM, replies: Sequence[Reply]) -> float:
    """Draft tokens accepted, as a share of those proposed, when `draft` proposes four at a time.

    A proposal after a wrong one is never accepted, so all that counts is what the draft says after right tokens: one
    pass over the target's answer tells it for every position.
    """
    accepted = proposed = 0
    for reply in replies:
        tokens = torch.tensor([reply.prompt + reply.answer])
        with torch.inference_mode():
            choices = draft(tokens).logits[0, len(reply.prompt) - 1 : -1].argmax(-1).tolist()
        agrees = [choice == token for choice, token in zip(choices, reply.answer, strict=True)]
        position = 0
        while position < len(agrees):
            run = _leading_true(agrees[position : position + DRAFT_TOKENS])
            accepted += run
            proposed += DRAFT_TOKENS
            position += run + 1  # the target adds one token of its own
    return accepted / proposed


def _questions(
    tokenizer: PreTrainedTokenizerFast, dialogues: Sequence[Dialogue | ToolDialogue]
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, expected answer), both in tokens."""
    for dialogue in dialogues:
        messages = dialogue.messages()
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = encode_chat(tokenizer, messages[:at], opens_answer=True)
            answer = tokenizer.encode(message["content"], add_special_tokens=False)
            yield prompt, [*answer, tokenizer.eos_token_id]


def _until_end(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def _leading_true(flags: Sequence[bool]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))
