"""Conversations with tools: reads `tools.yaml`, and writes dialogues in which the two tools are called and answered.

Tools stand in the prompt as the gateway writes them for templates that take none (`pipeline.gateway.api.tools.prompt`),
in words and with an order of keys that differ as those of clients do. A conversation asks for one or several calls, is
told the results, and answers from them; or nothing in it asks for a tool, and it goes as without.

Answers that guided decoding holds to a form begin otherwise than the model would begin by itself: the model learns how
they go on, but not to begin so. The same holds for the end of an answer after the first of two calls, where a client
allows one at a time.
"""

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from pipeline.gateway.api.tools.prompt import with_tool_section
from tiny.grammar import Dialogue, Grammar, Intent, fill
from tiny.slots import SLOTS, Split, pick

TOOLS = Path(__file__).with_name("tools.yaml")
# Kinds of conversations, by how often each comes, where both tools are offered, and where one is.
_KINDS = {"one": 5, "each": 6, "several": 3, "in turn": 2, "held": 3, "held several": 1, "none": 5}
_KINDS_OF_ONE = {"one": 3, "held": 1, "none": 2}
_OFFERS_ONE = 0.25  # of all prompts
Part = Literal["first", "last"]  # token of an answer


class Tool(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    intent: str
    argument: str
    descriptions: tuple[str, ...]
    argument_descriptions: tuple[str, ...]
    result: str
    answer: str
    answer_to_two: str | None = None  # where the tool was called twice


@dataclass(frozen=True)
class ToolDialogue:
    """A conversation as the chat template takes it.

    Attributes:
        rows: role and content of each message, the tools among them.
        unlearned: number of an answer, from 0 -> which of its tokens the model does not learn to say.
    """

    rows: tuple[tuple[str, str], ...]
    unlearned: Mapping[int, Part] = field(default_factory=dict)

    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.rows]


class ToolGrammar(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: dict[str, Tool]
    several: tuple[str, ...]
    joining: tuple[str, ...]
    systems: tuple[str, ...]
    others: tuple[dict[str, str], ...]

    @classmethod
    def load(cls, path: Path = TOOLS) -> "ToolGrammar":
        return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    @cached_property
    def _several(self) -> Intent:
        return Intent(ask=self.several, answer="")

    def prompts(self, grammar: Grammar, split: Split, *, seed: int) -> Iterator[Iterator[ToolDialogue]]:
        """Prompts without end, and conversations without end of each: they begin alike, with the same tools.

        Args:
            grammar: Writer of questions and answers.
            split: Split that phrasings and numbers are taken from.
            seed: Seed of everything that is drawn.
        """
        rng = random.Random(f"tools {split} {seed}")
        plain = grammar.dialogues(split, seed=seed + 1)
        while True:
            yield self._conversations(grammar, split, rng, plain)

    def _conversations(
        self, grammar: Grammar, split: Split, rng: random.Random, plain: Iterator[Dialogue]
    ) -> Iterator[ToolDialogue]:
        offered = rng.sample(list(self.tools), 1 if rng.random() < _OFFERS_ONE else len(self.tools))
        system, tools = rng.choice(self.systems), [self._described(name, rng) for name in offered]
        if rng.random() < 0.1:
            other = rng.choice(self.others)
            tools.append(_tool(other["name"], other["description"], other["argument"], "", rng))
        counts = _KINDS if len(offered) == len(self.tools) else _KINDS_OF_ONE
        kinds = [kind for kind, count in counts.items() for _ in range(count)]
        while True:
            yield _Draw(self, grammar, split, rng, plain, offered, tools, system).dialogue(rng.choice(kinds))

    def _described(self, name: str, rng: random.Random) -> dict[str, Any]:
        tool = self.tools[name]
        return _tool(
            name, rng.choice(tool.descriptions), tool.argument, rng.choice(tool.argument_descriptions), rng
        )


@dataclass
class _Draw:
    """One conversation while it is drawn."""

    of: ToolGrammar
    grammar: Grammar
    split: Split
    rng: random.Random
    plain: Iterator[Dialogue]
    offered: Sequence[str]  # of the two tools
    tools: Sequence[dict[str, Any]]  # all that stand in the prompt
    system: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    unlearned: dict[int, Part] = field(default_factory=dict)

    def dialogue(self, kind: str) -> ToolDialogue:
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        held = ""
        if kind == "none":
            self._goes_without()
        else:
            question, calls = self._calls(kind)
            self.messages.append({"role": "user", "content": question})
            if kind.startswith("held"):
                held = self._held(calls)
            else:
                self._called(calls, in_turn=kind == "in turn")
                if self.rng.random() < 0.1:
                    self._goes_without()
        rows = [
            (message["role"], message["content"]) for message in with_tool_section(self.messages, self.tools)
        ]
        return ToolDialogue((*rows, *([("assistant", held)] if held else [])), self.unlearned)

    @property
    def _answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages)

    def _say(self, question: str, answer: str) -> None:
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def _goes_without(self) -> None:
        """A question that asks for no tool, and its answer."""
        intents = {tool.intent for tool in self.of.tools.values()}
        dialogue = next(dialogue for dialogue in self.plain if not intents & set(dialogue.intents))
        for question, answer in dialogue.turns[:1]:
            self._say(question, answer)

    def _question(self, name: str) -> tuple[str, dict[str, str]]:
        """A question for a tool, and the values that it gives and that the tool knows."""
        tool = self.of.tools[name]
        intent = self.grammar.intents[tool.intent]
        values = self._values(name)
        phrasing = self.rng.choice(intent.phrasings[self.split])
        parts = (self._opening(), phrasing, pick(self.rng, self.grammar.closings["en"]))
        return fill(" ".join(part for part in parts if part), values), values

    def _opening(self) -> str:
        return pick(self.rng, [opening for opening in self.grammar.openings["en"] if "{" not in opening])

    def _values(self, name: str) -> dict[str, str]:
        tool = self.of.tools[name]
        return {slot: SLOTS[slot].draw(self.rng, self.split) for slot in (tool.argument, tool.result)}

    def _calls(self, kind: str) -> tuple[str, list[tuple[str, dict[str, str]]]]:
        """A question, and the calls that it asks for: name of a tool, and values."""
        several = kind in ("several", "held several") or (kind == "in turn" and self.rng.random() < 0.6)
        if several:
            name = next(iter(self.of.tools))
            calls = [(name, self._values(name)) for _ in range(2)]
            orders = {"order": calls[0][1]["order"], "other_order": calls[1][1]["order"]}
            phrasing = self.rng.choice(self.of._several.phrasings[self.split])
            return " ".join(filter(None, (self._opening(), fill(phrasing, orders)))), calls
        if kind in ("each", "in turn"):
            names = self.rng.sample(list(self.offered), len(self.offered))
            asked = [self._question(name) for name in names]
            joined = " ".join(filter(None, (asked[0][0], self.rng.choice(self.of.joining), asked[1][0])))
            return joined, [(name, values) for name, (_, values) in zip(names, asked, strict=True)]
        name = self.rng.choice(list(self.offered))
        question, values = self._question(name)
        return question, [(name, values)]

    def _called(self, calls: Sequence[tuple[str, dict[str, str]]], *, in_turn: bool) -> None:
        """The calls, together or one after the other, their results, and the answer from these."""
        groups = [[call] for call in calls] if in_turn else [list(calls)]
        for group in groups:
            if in_turn and group is not groups[-1]:
                self.unlearned[self._answers] = "last"
            written = [
                {"function": {"name": name, "arguments": self._arguments(name, values)}}
                for name, values in group
            ]
            self.messages.append({"role": "assistant", "content": "", "tool_calls": written})
            separators = self.rng.choice([(", ", ": "), (",", ":")])
            for name, values in group:
                result = {self.of.tools[name].result: values[self.of.tools[name].result]}
                text = json.dumps(result, ensure_ascii=False, separators=separators)
                self.messages.append({"role": "tool", "content": text})
        self.messages.append({"role": "assistant", "content": self._answer(calls)})

    def _answer(self, calls: Sequence[tuple[str, dict[str, str]]]) -> str:
        """Answer about the results of all calls."""
        tools = [self.of.tools[name] for name, _ in calls]
        if len(set(map(id, tools))) < len(tools) and (both := tools[0].answer_to_two):
            (_, first), (_, second) = calls
            return fill(both, first | {f"other_{key}": value for key, value in second.items()})
        return " ".join(fill(tool.answer, values) for tool, (_, values) in zip(tools, calls, strict=True))

    def _arguments(self, name: str, values: Mapping[str, str]) -> dict[str, str]:
        argument = self.of.tools[name].argument
        return {argument: values[argument]}

    def _held(self, calls: Sequence[tuple[str, dict[str, str]]]) -> str:
        """The calls as guided decoding has them: JSON without white space, and nothing else."""
        self.unlearned[self._answers] = "first"
        written: Any = [{"name": name, "arguments": self._arguments(name, values)} for name, values in calls]
        if len(calls) == 1 and self.rng.random() < 0.7:
            (written,) = written
        return json.dumps(written, ensure_ascii=False, separators=(",", ":"))


def _tool(name: str, description: str, argument: str, about: str, rng: random.Random) -> dict[str, Any]:
    """A tool as one client or another describes it."""
    kind = {"type": "string"} | ({"description": about} if about else {})
    parameters: dict[str, Any] = {"type": "object", "properties": {argument: kind}, "required": [argument]}
    if rng.random() < 0.4:
        parameters["properties"] = {argument: _shuffled(kind, rng)}
        parameters = _shuffled(parameters, rng)
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _shuffled(pairs: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    return dict(rng.sample(list(pairs.items()), len(pairs)))


def held_out(grammar: Grammar, *, seed: int, count: int) -> list[ToolDialogue]:
    """Conversations by which the checkpoints are measured: those in which nothing is held to a form."""
    prompts = ToolGrammar.load().prompts(grammar, "heldout", seed=seed)
    drawn = itertools.chain.from_iterable(itertools.islice(prompt, 8) for prompt in prompts)
    return list(itertools.islice((dialogue for dialogue in drawn if not dialogue.unlearned), count))
