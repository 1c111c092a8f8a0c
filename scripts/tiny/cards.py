"""The model card of each checkpoint: its README.md."""

from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM

from tiny import measure, models

_COMMAND = "scripts/make_tiny_checkpoints"

_PURPOSE: dict[models.Role, str] = {
    "target": "It answers customers of Tidepool, a telecom and online shop that does not exist, and calls two tools,\n"
    "`track_order` and `send_invoice`, as `scripts/tiny/tools.yaml` says.",
    "draft": "It proposes tokens to [support-target](../support-target), which accepts or corrects them.",
}


@dataclass(frozen=True)
class Figures:
    dialogues: int
    answers: int
    exact_match: float
    acceptance: float
    tool_answers: int
    tool_exact_match: float


def write(folder: Path, role: models.Role, model: LlamaForCausalLM, figures: Figures, *, seed: int) -> None:
    (folder / "README.md").write_text(_card(role, model, figures, seed), encoding="utf-8")


def _card(role: models.Role, model: LlamaForCausalLM, figures: Figures, seed: int) -> str:
    config = model.config
    layers = f"{config.num_hidden_layers}, {config.hidden_size}, {config.intermediate_size}"
    heads = f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}"
    command = _COMMAND if seed == 1 else f"{_COMMAND} --seed {seed}"
    return f"""\
# support-{role}

A Llama model small enough to be checked in and to run anywhere.
{_PURPOSE[role]}
It knows nothing else: it was trained from nothing on dialogues that a grammar wrote, in English with some German,
Spanish and Korean. Use it to try and to test a deployment, not to serve customers.

| | |
| --- | --- |
| parameters | {models.parameter_count(model):,}, in bfloat16 |
| layers, hidden size, intermediate size | {layers} |
| attention heads, key-value heads, head size | {heads} |
| vocabulary | {config.vocab_size} tokens of byte-level BPE, shared by target and draft; embeddings tied |
| positions | {config.max_position_embeddings}; trained on dialogues of up to about 150 tokens, with tools 900 |
| licence | Apache-2.0 |

Made by `{command}`. The same seed gives the same bytes on the same type of CPU with the same version
of torch; elsewhere the last bits of the weights differ.

Measured by the same command, greedily, on the {figures.answers} answers of the {figures.dialogues} dialogues in
`calibration/support/heldout.jsonl`, whose phrasings and order numbers training never saw:

| | |
| --- | --- |
| answers of the target that are exactly right | {figures.exact_match:.1%} |
| the same with tools, on {figures.tool_answers} answers and calls | {figures.tool_exact_match:.1%} |
| draft tokens that the target accepts, {measure.DRAFT_TOKENS} proposed at a time | {figures.acceptance:.1%} |
"""
