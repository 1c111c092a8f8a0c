"""Golden questions: prompts with checks of their answers, by which a package is judged before it takes traffic.

A file of JSON lines beside the recipe, one question a line (`pipeline.golden_questions`). A package carries its
questions and budgets as `golden.json`, so that it can be judged where the recipe is not.

Beside a package that is trusted, a new one can also be held to its answers: how many are equal, and how many similar.
Similar are answers whose words match to four fifths by `difflib`: what that says does not depend on a model of
sentences that may be installed or not.

Nothing here asks a server: whoever judges hands over how a question is answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.errors import InvalidInput
from pipeline.golden_questions import AnswerJudge, GoldenQuestion, read_questions
from pipeline.reading import UnreadableFile, read_json

__all__ = [
    "AnswerPair",
    "BudgetCheck",
    "GoldenAnswer",
    "GoldenBudgets",
    "GoldenComparison",
    "GoldenReport",
    "GoldenSet",
    "write_document",
]

_FILE = "golden.json"  # of a package, beside its deployment.json
_SIMILAR = 0.8  # of the words of two answers


class GoldenBudgets(BaseModel):
    """Budgets that a package must keep with its golden questions before it takes traffic."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    min_passed: float = Field(
        default=1.0, gt=0, le=1, description="Share of the questions that must be answered right."
    )
    min_equal: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of the questions that must be answered as by the package that is served, word for word.",
    )
    min_similar: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Share of the questions whose answer must be similar to that of the package that is served.",
    )
    max_perplexity_increase: float | None = Field(
        default=None,
        ge=0,
        description="How much more perplexed a package may be by the answers of another, relative to that one; "
        "`pipeline compare` measures it.",
    )

    @property
    def compares(self) -> bool:
        """Whether answers are held to those of another package."""
        return self.min_equal is not None or self.min_similar is not None


_USUAL = GoldenBudgets()


@dataclass(frozen=True, slots=True)
class BudgetCheck:
    """A figure and the budget that it is held against.

    Attributes:
        budget: Its name, such as min_equal.
        figure: Measured value; None where it could not be measured, which does not pass.
        limit: The most, or the least, that is allowed.
        text: Both in words.
    """

    budget: str
    figure: float | None
    limit: float
    text: str

    @property
    def passed(self) -> bool:
        """Whether the figure is within its budget."""
        if self.figure is None:
            return False
        return self.figure >= self.limit if self.budget.startswith("min_") else self.figure <= self.limit

    def __str__(self) -> str:
        return f"{'within' if self.passed else 'OVER  '}  {self.budget}: {self.text}"


@dataclass(frozen=True, slots=True)
class GoldenAnswer:
    """The answer to one question."""

    question: GoldenQuestion
    answer: str
    fault: str | None  # why it is wrong; None if it is right


@dataclass(frozen=True, slots=True)
class GoldenReport:
    """All answers of one package."""

    answers: tuple[GoldenAnswer, ...]
    min_passed: float = 1.0

    @property
    def right(self) -> int:
        """Number of questions that were answered right."""
        return sum(answer.fault is None for answer in self.answers)

    @property
    def passed(self) -> bool:
        """Whether enough of them were."""
        return self.right >= self.min_passed * len(self.answers)

    def __str__(self) -> str:
        share = "all" if self.min_passed == 1 else f"{self.min_passed:.0%}"
        lines = [f"golden questions: {self.right} of {len(self.answers)} right, {share} needed"]
        lines += [
            f"  {json.dumps(answer.question.text, ensure_ascii=False)}: the answer {answer.fault}"
            for answer in self.answers
            if answer.fault
        ]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The answers of two packages to one question.

    Attributes:
        before: Answer of the package that is trusted.
        after: Answer of the one that is judged.
    """

    before: GoldenAnswer
    after: GoldenAnswer

    @property
    def equal(self) -> bool:
        """Whether both are the same, word for word."""
        return self.before.answer == self.after.answer

    @property
    def similarity(self) -> float:
        """Share of the words of both answers that match, in their order: 0 to 1."""
        words = self.before.answer.split(), self.after.answer.split()
        return 1.0 if self.equal else SequenceMatcher(None, *words, autojunk=False).ratio()

    @property
    def similar(self) -> bool:
        """Whether nearly all words match."""
        return self.similarity >= _SIMILAR


@dataclass(frozen=True, slots=True)
class GoldenComparison:
    """All answers of two packages, held against the budgets. `str` gives the figures, and what is wrong."""

    pairs: tuple[AnswerPair, ...]
    budgets: GoldenBudgets

    @property
    def report(self) -> GoldenReport:
        """The answers of the package that is judged."""
        return GoldenReport(tuple(pair.after for pair in self.pairs), self.budgets.min_passed)

    @property
    def equal(self) -> int:
        """Number of questions that both answered in the same words."""
        return sum(pair.equal for pair in self.pairs)

    @property
    def similar(self) -> int:
        """Number of questions that both answered alike, the equal ones included."""
        return sum(pair.similar for pair in self.pairs)

    @property
    def checks(self) -> tuple[BudgetCheck, ...]:
        """The budgets, but for that of perplexity, which no text tells."""
        right, count, checks = self.report.right, len(self.pairs), []
        for budget, figure, outcome in (
            ("min_passed", right, "right"),
            ("min_equal", self.equal, "equal"),
            ("min_similar", self.similar, "similar"),
        ):
            limit: float | None = getattr(self.budgets, budget)
            if limit is not None:
                text = f"{figure} of {count} answers {outcome}, {limit:.0%} needed"
                checks.append(BudgetCheck(budget, figure / count, limit, text))
        return tuple(checks)

    @property
    def passed(self) -> bool:
        """Whether all budgets are kept."""
        return all(check.passed for check in self.checks)

    def __str__(self) -> str:
        count = len(self.pairs)
        figures = (
            f"{self.equal} of {count} answers equal those of the package before, {self.similar} are similar"
        )
        over = [f"  {check}" for check in self.checks if not check.passed]
        return "\n".join([str(self.report), f"  {figures}", *over])


@dataclass(frozen=True, slots=True)
class GoldenSet:
    """The golden questions of a recipe or a package."""

    questions: tuple[GoldenQuestion, ...]
    budgets: GoldenBudgets = _USUAL

    @classmethod
    def read(cls, file: Path, budgets: GoldenBudgets = _USUAL) -> Self:
        """Read the file of a recipe.

        Raises:
            InvalidInput: With every fault of the file.
        """
        questions, faults = read_questions(file, str(file))
        if faults:
            raise InvalidInput(str(file), faults)
        return cls(tuple(questions), budgets)

    @classmethod
    def load(cls, package: Path) -> Self | None:
        """Read the questions that a package carries; None if it carries none.

        Raises:
            UnreadableFile: The file is there, and holds no questions.
        """
        path = package / _FILE
        if not path.exists():
            return None
        try:
            document = read_json(path)
            questions = [
                GoldenQuestion.model_validate_json(json.dumps(question))
                for question in document.pop("questions")
            ]
            return cls(tuple(questions), GoldenBudgets.model_validate_json(json.dumps(document)))
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            raise UnreadableFile(path, f"holds no golden questions: {error}") from error

    @property
    def document(self) -> dict[str, Any]:
        """The content of a package's golden.json; equal for equal questions, however their file is written."""
        questions = [question.model_dump(mode="json", exclude_none=True) for question in self.questions]
        return {**self.budgets.model_dump(exclude_none=True), "questions": questions}

    def ask(self, answer: Callable[[GoldenQuestion], str]) -> GoldenReport:
        """Ask every question, and judge the answers.

        Args:
            answer: Answers one question, greedily; what it raises is raised here.
        """
        return GoldenReport(tuple(self._judged(answer)), self.budgets.min_passed)

    def compare(
        self, before: Callable[[GoldenQuestion], str], after: Callable[[GoldenQuestion], str]
    ) -> GoldenComparison:
        """Ask two packages every question, and hold the answers of the second against the budgets.

        Args:
            before: Answers one question by the package that is trusted, greedily; what it raises is raised here.
            after: The same by the package that is judged.
        """
        pairs = zip(self._judged(before), self._judged(after), strict=True)
        return GoldenComparison(tuple(AnswerPair(*pair) for pair in pairs), self.budgets)

    def _judged(self, answer: Callable[[GoldenQuestion], str]) -> Iterator[GoldenAnswer]:
        with AnswerJudge() as judge:
            for question in self.questions:
                text = answer(question)
                yield GoldenAnswer(question, text, judge.fault(question, text))


def write_document(document: object, package: Path) -> None:
    """Write a `GoldenSet.document` into a package."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    (package / _FILE).write_text(text + "\n", encoding="utf-8")
