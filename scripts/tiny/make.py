"""The steps from nothing to a pair that can be checked in: data, tokenizer, target, draft, cards.

Each step reads what earlier ones left on disk, so that any of them can be run again alone.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tiny import cards, data, measure, models, tokenizer, tools, training
from tiny.grammar import Grammar

_TOKENIZER_DIALOGUES = 8000
_TOOL_DIALOGUES = 128  # measured


@dataclass(frozen=True)
class Workshop:
    out: Path  # laid out as the repository is
    seed: int = data.SEED
    grammar: Grammar = field(default_factory=Grammar.load)

    @property
    def dialogues(self) -> Path:
        return self.out / "calibration" / "support"

    def checkpoint(self, role: models.Role) -> Path:
        return self.out / "recipes" / "checkpoints" / f"support-{role}"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer.load(self._made(self.checkpoint("target"), "tokenizer.json", by="tokenizer"))

    def model(self, role: models.Role) -> LlamaForCausalLM:
        return models.load(self._made(self.checkpoint(role), "model.safetensors", by=role))

    @staticmethod
    def _made(folder: Path, name: str, *, by: str) -> Path:
        if not (folder / name).exists():
            raise SystemExit(f"{folder / name} is not there yet: run the step that makes it, --only {by}")
        return folder


def make_data(workshop: Workshop) -> None:
    data.write(workshop.grammar, workshop.dialogues, seed=workshop.seed)


def make_tokenizer(workshop: Workshop) -> None:
    dialogues = itertools.islice(
        workshop.grammar.dialogues("train", seed=workshop.seed), _TOKENIZER_DIALOGUES
    )
    trained = tokenizer.train(message["content"] for dialogue in dialogues for message in dialogue.messages())
    for role in models.ROLES:
        tokenizer.save(trained, workshop.checkpoint(role))


def make_target(workshop: Workshop) -> None:
    _train("target", workshop)


def make_tools(workshop: Workshop) -> None:
    """Teach the target tools, too; it goes on from what the step `target` saved, so run that one before it."""
    for number, schedule in enumerate(training.TOOL_SCHEDULES):
        target = workshop.model("target")
        seed = workshop.seed + number
        training.train_tools(target, workshop.tokenizer(), workshop.grammar, seed=seed, schedule=schedule)
        models.save(target, workshop.checkpoint("target"))


def make_draft(workshop: Workshop) -> None:
    """Train the draft on dialogues alone: the target mostly corrects its proposals for calls."""
    _train("draft", workshop)


def make_cards(workshop: Workshop) -> None:
    """Measure both models on held-out dialogues, and write their README.md."""
    held_out = data.dialogues(workshop.grammar, "heldout", seed=workshop.seed)
    with_tools = tools.held_out(workshop.grammar, seed=workshop.seed, count=_TOOL_DIALOGUES)
    target, draft = workshop.model("target"), workshop.model("draft")
    replies, tool_replies = (
        list(measure.replies(target, workshop.tokenizer(), dialogues)) for dialogues in (held_out, with_tools)
    )
    figures = cards.Figures(
        dialogues=len(held_out),
        answers=len(replies),
        exact_match=measure.exact_match(replies),
        acceptance=measure.acceptance(draft, replies),
        tool_answers=len(tool_replies),
        tool_exact_match=measure.exact_match(tool_replies),
    )
    cards.write(workshop.checkpoint("target"), "target", target, figures, seed=workshop.seed)
    cards.write(workshop.checkpoint("draft"), "draft", draft, figures, seed=workshop.seed)
    print(
        f"exact match {figures.exact_match:.1%}, with tools {figures.tool_exact_match:.1%}, "
        f"acceptance {figures.acceptance:.1%}"
    )


STEPS: dict[str, Callable[[Workshop], None]] = {
    "data": make_data,
    "tokenizer": make_tokenizer,
    "target": make_target,
    "tools": make_tools,
    "draft": make_draft,
    "cards": make_cards,
}


def _train(role: models.Role, workshop: Workshop) -> None:
    model = training.train(
        role, workshop.tokenizer(), workshop.grammar, seed=workshop.seed, schedule=training.SCHEDULES[role]
    )
    models.save(model, workshop.checkpoint(role))
