"""Golden questions to two deployments: how alike their answers are, which are right, and each one's perplexity.

    study = AnswerStudy(golden)
    study.visit("a", first); study.visit("b", second); study.visit("a", first)      while each of them runs
    study.result(judge)

Triton itself is asked, past the response cache, greedily and one question at a time, so that no other request is in the
same batch. Perplexity comes from the engine's own model, in token ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.bench.compare.figures import Side
from pipeline.bench.compare.judge import Judge, Judgement
from pipeline.bench.compare.sources import ComparedDeployment
from pipeline.bench.engine_model import EngineModel
from pipeline.bench.result import Section
from pipeline.bench.subject import Subject
from pipeline.bench.targets import BenchRequest
from pipeline.client import ChatTemplate
from pipeline.errors import ServerError
from pipeline.golden import AnswerPair, BudgetCheck, GoldenBudgets, GoldenComparison, GoldenSet
from pipeline.golden_questions import GoldenQuestion
from pipeline.reading import read_tokenizer
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from pipeline.stages.evaluate.results import perplexity
from pipeline.triton.deployment import TARGET_MODEL

_OTHER: dict[Side, Side] = {"a": "b", "b": "a"}


class QuestionResult(Section):
    """One question, and both answers."""

    question: str
    a: str = Field(description="Answer of A.")
    b: str
    equal: bool = Field(description="Whether both answers are the same, word for word.")
    similar: bool
    similarity: float = Field(description="Share of the words that match, in their order: 0 to 1.")
    first_difference: int | None = Field(
        description="Index of the first token that differs, from 0, by the tokenizer of A; null where none does."
    )
    fault_a: str | None = Field(description="Why the answer of A is wrong by the question's checks.")
    fault_b: str | None
    preferred: Literal["a", "b", "tie"] | None = Field(default=None, description="Verdict of the judge.")
    no_verdict: str = Field(default="", description="Why the judge gave no verdict.")


class PerplexityComparison(Section):
    """How well each engine predicts the answers, token by token."""

    a_of_a: float = Field(description="Perplexity of the answers of A by A itself.")
    b_of_a: float = Field(description="Perplexity of the answers of A by B.")
    b_of_b: float
    a_of_b: float
    tokens: tuple[int, int] = Field(description="Tokens of the answers of A, and of B.")

    @property
    def increase(self) -> float:
        """Perplexity of the answers of A by B, relative to that by A itself: 0.1 is 10 % more."""
        return self.b_of_a / self.a_of_a - 1


class AnswerComparison(Section):
    """All golden questions."""

    questions: tuple[QuestionResult, ...]
    perplexity: PerplexityComparison | None
    no_perplexity: str = Field(default="", description="Why there is no perplexity.")
    judge: str = Field(default="", description="Name of the model that judged.")

    @property
    def equal(self) -> int:
        """Number of equal answers."""
        return sum(question.equal for question in self.questions)

    @property
    def similar(self) -> int:
        """Number of similar answers, the equal ones included."""
        return sum(question.similar for question in self.questions)

    @property
    def right(self) -> tuple[int, int]:
        """Number of answers of A and of B that are right."""
        return sum(not question.fault_a for question in self.questions), sum(
            not question.fault_b for question in self.questions
        )

    @property
    def judged(self) -> dict[str, int]:
        """Verdict of the judge -> number of questions: a, b, tie, none."""
        names = ("a", "b", "tie", None)
        return {
            str(name or "none"): sum(question.preferred == name for question in self.questions)
            for name in names
        }


class AnswerStudy:
    """The golden questions while they are asked; `timeout_s` is for each answer."""

    def __init__(self, golden: GoldenSet, *, timeout_s: float = 600.0) -> None:
        self._golden, self._timeout_s = golden, timeout_s
        self._texts: dict[Side, list[str]] = {}
        self._engine_answers: dict[Side, list[EngineAnswer]] = {}
        # Side whose answers are scored -> side that scores -> logarithms of the probability of each token.
        self._scores: dict[Side, dict[Side, list[tuple[float, ...]]]] = {"a": {}, "b": {}}
        self._tokenizers: dict[Side, Path] = {}
        self._no_perplexity = ""
        self._chat = any(question.messages is not None for question in golden.questions)

    @property
    def complete(self) -> bool:
        """Whether no question and no score is missing."""
        scored = all(len(by) == 2 for by in self._scores.values())
        return len(self._texts) == 2 and (scored or bool(self._no_perplexity))

    async def visit(self, side: Side, deployment: ComparedDeployment) -> None:
        """Ask one of the two: its own answers first, then its scores of the other's.

        Raises:
            ServerError: A question was not answered.
        """
        if side not in self._texts:
            self._texts[side] = await self._ask(deployment)
            tokenizer = deployment.subject.tokenizer
            if tokenizer is not None:
                self._tokenizers[side] = tokenizer / "tokenizer.json"
        if not self._no_perplexity:
            try:
                self._score(side, deployment)
            except ServerError as error:
                self._no_perplexity = str(error)

    async def _ask(self, deployment: ComparedDeployment) -> list[str]:
        subject, texts = deployment.asked_directly, list[str]()
        async with subject.target(self._timeout_s, chat=self._chat) as target:
            for question in self._golden.questions:
                reply = await target.ask(
                    BenchRequest(question.input, {"temperature": 0.0, "max_tokens": _most(question, subject)})
                )
                if reply.outcome != "complete":
                    raise ServerError(f"golden question {question.text!r} to {subject.name}: {reply.error}")
                texts.append(reply.text)
        return texts

    def _score(self, side: Side, deployment: ComparedDeployment) -> None:
        other, package = _OTHER[side], deployment.served
        if package.runtime == "pytorch" or TARGET_MODEL not in package.models:
            raise ServerError(
                f"the {package.runtime} runtime of {package.name} returns no log probabilities of token ids"
            )
        if len(self._tokenizers) == 2 and len({path.read_bytes() for path in self._tokenizers.values()}) == 2:
            raise ServerError(
                "their tokenizers differ, so that neither has a probability for the other's tokens"
            )
        engine = EngineModel(deployment.grpc_url, package.end_id, package.pad_id)
        if side not in self._engine_answers:
            direct = deployment.asked_directly
            lengths = (_most(question, direct) for question in self._golden.questions)
            answers = engine.answers(list(zip(self._prompts(direct), lengths, strict=True)))
            self._engine_answers[side] = [_until(answer, package.stop_token_ids) for answer in answers]
            answers = self._engine_answers[side]
            complete = all(len(answer.tokens) == len(answer.log_probs or ()) for answer in answers)
            self._scores[side][side] = (
                [answer.log_probs or () for answer in answers] if complete else engine.scores(answers)
            )
        if other in self._engine_answers and side not in self._scores[other]:
            self._scores[other][side] = engine.scores(self._engine_answers[other])

    def _prompts(self, subject: Subject) -> list[list[int]]:
        assert subject.tokenizer is not None, "it is served from a package"
        template = ChatTemplate.from_directory(subject.tokenizer) if self._chat else None
        tokenizer: Any = read_tokenizer(subject.tokenizer / "tokenizer.json")
        texts = (
            question.input
            if template is None or isinstance(question.input, str)
            else template.render(question.input)
            for question in self._golden.questions
        )
        return [tokenizer.encode(text).ids for text in texts]

    @property
    def comparison(self) -> GoldenComparison:
        """Both answers to all questions, held against the budgets of texts."""
        answers = {side: iter(texts) for side, texts in self._texts.items()}
        return self._golden.compare(lambda _: next(answers["a"]), lambda _: next(answers["b"]))

    async def result(self, judge: Judge | None = None) -> AnswerComparison:
        """Put the answers and scores together, and ask the judge.

        Raises:
            ServerError: The judge answers nothing.
        """
        pairs = self.comparison.pairs
        judged = [Judgement(None)] * len(pairs) if judge is None else await judge.judge(pairs)
        tokenizer: Any = read_tokenizer(self._tokenizers["a"]) if "a" in self._tokenizers else None
        return AnswerComparison(
            questions=tuple(
                _result(pair, judgement, tokenizer) for pair, judgement in zip(pairs, judged, strict=True)
            ),
            perplexity=None if self._no_perplexity else self._perplexity(),
            no_perplexity=self._no_perplexity,
            judge="" if judge is None else judge.model,
        )

    def _perplexity(self) -> PerplexityComparison | None:
        def of(writer: Side, judge: Side) -> float:
            values = [value for answer in self._scores[writer][judge] for value in answer]
            return perplexity(-sum(values), len(values)) if values else math.nan

        counts = [
            sum(len(engine_answer.tokens) for engine_answer in self._engine_answers[side])
            for side in ("a", "b")
        ]
        if not all(counts):
            self._no_perplexity = "one of them answered without a token"
            return None
        return PerplexityComparison(
            a_of_a=of("a", "a"),
            b_of_a=of("a", "b"),
            b_of_b=of("b", "b"),
            a_of_b=of("b", "a"),
            tokens=(counts[0], counts[1]),
        )


def answer_checks(
    comparison: GoldenComparison, answers: AnswerComparison, budgets: GoldenBudgets, max_lost: float | None
) -> list[BudgetCheck]:
    """Hold answers against all budgets; `max_lost` is the share of questions where the judge may prefer A."""
    checks = list(comparison.checks)
    if (limit := budgets.max_perplexity_increase) is not None:
        perplexity = answers.perplexity
        text = f"not known: {answers.no_perplexity}"
        if perplexity is not None:
            text = f"{perplexity.a_of_a:.4g} -> {perplexity.b_of_a:.4g} on the answers of A, "
            text += f"{perplexity.increase:+.2%}, {limit:.2%} allowed"
        figure = None if perplexity is None else perplexity.increase
        checks.append(BudgetCheck("max_perplexity_increase", figure, limit, text))
    if max_lost is not None:
        lost, count = answers.judged["a"], len(answers.questions)
        text = f"the judge prefers A in {lost} of {count} questions, {max_lost:.0%} allowed"
        checks.append(BudgetCheck("max_lost", lost / count, max_lost, text))
    return checks


def _result(pair: AnswerPair, judgement: Judgement, tokenizer: Any) -> QuestionResult:
    place = None
    if not pair.equal and tokenizer is not None:
        ids = [
            tokenizer.encode(reply.answer, add_special_tokens=False).ids
            for reply in (pair.before, pair.after)
        ]
        place = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*ids, strict=False)))
    return QuestionResult(
        question=pair.before.question.text,
        a=pair.before.answer,
        b=pair.after.answer,
        equal=pair.equal,
        similar=pair.similar,
        similarity=round(pair.similarity, 4),
        first_difference=place,
        fault_a=pair.before.fault,
        fault_b=pair.after.fault,
        preferred=judgement.preferred,
        no_verdict=judgement.reason,
    )


def _until(answer: EngineAnswer, stops: Sequence[int]) -> EngineAnswer:
    """Cut an answer at a token that ends it: the engine itself stops at only one of them."""
    ends = next((index for index, token in enumerate(answer.tokens) if token in stops), len(answer.tokens))
    log_probs = None if answer.log_probs is None else answer.log_probs[:ends]
    return EngineAnswer(answer.prompt, answer.tokens[:ends], log_probs)


def _most(question: GoldenQuestion, subject: Subject) -> int:
    return min(question.max_tokens or subject.max_answer, subject.max_answer)
