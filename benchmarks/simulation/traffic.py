"""Traffic: conversations that begin at random times, and go on after each answer.

A conversation shares the beginning of its prompt (a system prompt) with others of its application; each of its prompts
is everything said before, and a new question. All of it is drawn beforehand from one seed, so that every way to serve
it meets the same people, who read for the same time before they ask again.

Two kinds of traffic are modelled on published figures of the requests of a large provider (Wang et al., "KVCache
Cache in the Wild", 2025, arXiv:2506.02634). Of people who chat, 80 % of all reuse of a prompt's beginning came within
10 minutes, an exponential time within a kind of request, and 62 % of the tokens of all prompts could have been
reused; lengths here are chosen to come near that. Of programs, 80 % came within 10 seconds; those here are agents,
which have many turns, and their lengths are assumptions. So are the shape of the day and its depth. Gaps between new
conversations have a Gamma distribution, as BurstGPT (Wang et al., 2024, arXiv:2401.17644) found those of requests to
have; its shape is an assumption.

Not in it: clients that leave, and ones that ask again after a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DAY_S = 86_400.0
_GRID_S = 5.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of conversations.

    Attributes:
        name: Name for people.
        turns: Mean number of questions; the number is geometric.
        question: Mean tokens of a question; lengths are log-normal.
        answer: Mean tokens of an answer.
        system: Tokens of an application's system prompt.
        applications: Number of applications; the second is asked half as often as the first, and so on (Zipf).
        pause_s: Mean seconds from the end of an answer to the next question; exponential.
        spread: Standard deviation of the logarithm of a length.
    """

    name: str
    turns: float = 2.0
    question: float = 600.0
    answer: float = 300.0
    system: int = 200
    applications: int = 20
    pause_s: float = 373.0
    spread: float = 0.8

    @property
    def mean_prompt(self) -> float:
        """Mean tokens of a prompt, over all requests."""
        # Turns before a request, over all requests, of a geometric number of turns with this mean.
        return self.system + self.question + (self.turns - 1) * (self.question + self.answer)

    @property
    def reusable(self) -> float:
        """Share of the tokens of all prompts that were in a prompt or an answer before."""
        return 1 - self.question / self.mean_prompt


# An exponential time of which 80 % lie within 10 minutes, or 10 seconds, has the mean 373 s, or 6.2 s.
PEOPLE = Kind("people")
PROGRAMS = Kind("programs", turns=6.0, question=500.0, answer=120.0, system=500, pause_s=6.2)


@dataclass(frozen=True, slots=True)
class Burst:
    """Time in which more conversations begin than by the day's shape.

    Attributes:
        start_s: Begin of the burst.
        length_s: Seconds that it lasts.
        factor: Factor of the load.
    """

    start_s: float
    length_s: float
    factor: float = 5.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Times of requests.

    Attributes:
        requests_per_s: Rate at the day's peak, first and later questions together.
        length_s: Seconds in which conversations begin and questions are asked.
        valley: Load at the quietest time, as a share of that at the peak; 1 is the same load all the time.
        bursts: Bursts on top of it.
        burstiness: Squared coefficient of variation of the gaps between new conversations; 1 is Poisson.
    """

    requests_per_s: float
    length_s: float
    valley: float = 1.0
    bursts: tuple[Burst, ...] = ()
    burstiness: float = 2.0

    def share(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Load at times of the day, in seconds since midnight, as a share of the peak; bursts included."""
        # Quietest at four in the morning, busiest at four in the afternoon.
        wave = 0.5 - 0.5 * np.cos(2 * math.pi * (times / DAY_S - 4 / 24))
        load = self.valley + (1 - self.valley) * wave
        for burst in self.bursts:
            inside = (times >= burst.start_s) & (times < burst.start_s + burst.length_s)
            load = np.where(inside, load * burst.factor, load)
        return np.asarray(load, np.float64)

    def starts(self, turns: float, chance: np.random.Generator) -> npt.NDArray[np.float64]:
        """Draw the begin of conversations with so many requests on average, in seconds."""
        grid = np.arange(0.0, self.length_s + _GRID_S, _GRID_S)
        middle = grid[:-1] + _GRID_S / 2
        expected = np.concatenate(([0.0], np.cumsum(self.share(middle)) * _GRID_S))
        expected *= self.requests_per_s / turns
        most = int(expected[-1] * 1.2 + 10 * math.sqrt(expected[-1] * self.burstiness) + 50)
        shape = 1 / self.burstiness
        # Times of a process of mean rate 1, mapped to where the accumulated load is as much.
        even = np.cumsum(chance.gamma(shape, 1 / shape, most))
        times = np.interp(even[even < expected[-1]], expected, grid)
        return times[times < self.length_s]


@dataclass(slots=True)
class Conversation:
    """One person, or program.

    Attributes:
        number: Number from 0, in the order of their begin.
        start_s: Time of the first question.
        application: Application whose system prompt is in front.
        system: Tokens of the system prompt.
        key: Hash of the beginning of its prompts, 64 bits.
        questions: Tokens of each question.
        answers: Tokens of each answer.
        pauses_s: Seconds before each question but the first.
        then: Conversation that the same person begins as soon as this one has ended, or None.
    """

    number: int
    start_s: float
    application: int
    system: int
    key: int
    questions: Sequence[int]
    answers: Sequence[float]
    pauses_s: Sequence[float]
    then: Conversation | None = None

    def prompt(self, turn: int) -> int:
        """Tokens of the prompt of a turn, counted from 0."""
        before = sum(self.questions[: turn + 1]) + sum(self.answers[:turn])
        return int(self.system + before)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations of a kind, with their arrivals."""

    kind: Kind
    arrivals: Arrivals
    seed: int = 0

    def conversations(self) -> Iterator[Conversation]:
        """Draw the conversations in the order of their begin; the same each time."""
        kind, chance = self.kind, np.random.default_rng(self.seed)
        starts = self.arrivals.starts(kind.turns, chance)
        count = len(starts)
        turns = chance.geometric(1 / kind.turns, count)
        ends = np.cumsum(turns)
        total = int(ends[-1]) if count else 0
        questions = _lengths(kind.question, kind.spread, total, chance)
        answers = _lengths(kind.answer, kind.spread, total, chance)
        pauses = chance.exponential(kind.pause_s, total).tolist()
        weights = 1 / np.arange(1, kind.applications + 1)
        applications = chance.choice(kind.applications, count, p=weights / weights.sum())
        keys = chance.integers(0, 2**64, count, dtype=np.uint64)
        begun = 0
        for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            yield Conversation(
                number, start, int(applications[number]), kind.system, int(keys[number]),
                questions[begun:end], answers[begun:end], pauses[begun + 1 : end],
            )  # fmt: skip
            begun = end


def _lengths(mean: float, spread: float, count: int, chance: np.random.Generator) -> list[int]:
    """Draw log-normal lengths in tokens with this mean, 1 or more."""
    drawn = chance.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    return [int(length) for length in np.maximum(1, np.rint(drawn))]
