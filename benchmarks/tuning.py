#!/usr/bin/env python3
"""How near a search of `pipeline tune` comes to the best settings in the time of 12 trials, beside Optuna's samplers.

    python benchmarks/tuning.py [--seeds 5] [--only whole raced]

Ten made-up spaces of eight keys, with as many values as the keys of the `cpu` runtime have. A figure is the throughput
of the best whole trial, as a share of the most that the space has within its SLO; the mean over the seeds, each of
which puts the recipe and the optimum somewhere else. Whole loads are off by 2 %, first seconds by the square root of
their length more, and 15 % below, for want of a warm-up. Ours stops trials in their first seconds: `raced` where a
server starts in a tenth of a load, `slow start` where it takes as long as a load; `whole` stops none. The columns
`+ plan` give the proposals a plan whose forecast of every setting is off by 15 %. Optuna's samplers need no first
seconds, and have 13 whole trials, or more where its pruner stops the worse half in their first seconds (`TPE halved`,
with the fast start).
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import optuna

from pipeline.bench.tune.race import Race
from pipeline.bench.tune.search import LEAST_LEFT
from pipeline.bench.tune.search_space import Dimension, SearchSpace, Settings, Value
from pipeline.bench.tune.surrogate import Observation, propose

TRIALS, NOISE, FORECAST_ERROR = 12, 0.02, 0.15
LOAD_S, FIRST_S, COLD = 33.0, 4.0, 0.85  # a load with its warm-up; what first seconds bring of a warm server
FAST_START_S, SLOW_START_S = LOAD_S / 10, LOAD_S
VALUES: Mapping[str, Sequence[Value]] = {
    "concurrency": (4, 8, 16, 32, 64), "batch": (128, 256, 512, 1024, 2048, 4096, 8192, 16384),
    "reuse": (False, True), "delay": (0, 100, 500, 2000), "draft": (0, 1, 2, 3, 4, 5, 6, 8),
    "speculation": ("engine", "bls"), "threads": (1, 2, 4), "cache": (256, 1024, 4096),
}  # fmt: skip
KINDS = (
    "smooth",
    "rough",
    "one key",
    "all keys",
    "own is best",
    "interacting",
    "slo",
    "cliff",
    "plateaus",
    "noisy",
)


@dataclass
class Trial:
    """Tokens a second: measured in the first seconds, over the load, and true; and by which share the SLO is missed."""

    first: float
    measured: float
    tokens: float
    missed: float
    stopped: bool = False

    @property
    def whole(self) -> bool:
        """Whether it was measured to its end, within the SLO."""
        return not self.stopped and self.missed <= 0


@dataclass
class Space:
    """One made-up space."""

    kind: str
    seed: int

    def __post_init__(self) -> None:
        chance = random.Random(f"{self.kind}/{self.seed}")
        self.own = tuple(chance.randrange(len(values)) for values in VALUES.values())
        peak = tuple(chance.randrange(len(values)) for values in VALUES.values())
        self.peak = self.own if self.kind == "own is best" else peak
        self.weights = [chance.choice((0.02, 0.05, 0.1, 0.2)) for _ in VALUES]
        if self.kind == "one key":
            self.weights = [0.005] * len(VALUES)
            self.weights[chance.randrange(len(VALUES))] = 0.35
        if self.kind == "all keys":
            self.weights = [0.06] * len(VALUES)
        self.steps = [[chance.gauss(0, 0.5) for _ in values] for values in VALUES.values()]
        self.pairs = {pair: chance.gauss(0, 0.08) for pair in itertools.combinations(range(len(VALUES)), 2)}

    @cached_property
    def search(self) -> SearchSpace:
        return SearchSpace(
            tuple(
                Dimension(key, "", tuple(values), values[own], compiled=False)
                for (key, values), own in zip(VALUES.items(), self.own, strict=True)
            ),
            {},
        )

    def does(self, at: Sequence[int]) -> tuple[float, float]:
        """Tokens a second, and by which share the SLO is missed: 0 or less is within."""
        gain = 0.0
        for number, values in enumerate(VALUES.values()):
            off = (at[number] - self.peak[number]) / (len(values) - 1)
            shape = self.steps[number][at[number]] if self.kind == "rough" else -(2 * off * off + abs(off))
            gain += self.weights[number] * shape
        if self.kind == "interacting":
            places = [
                2 * place / (len(values) - 1) - 1 for place, values in zip(at, VALUES.values(), strict=True)
            ]
            gain += sum(weight * places[key] * places[other] for (key, other), weight in self.pairs.items())
        if self.kind == "plateaus":
            gain = round(10 * gain) / 10
        tokens = 100 * math.exp(gain)
        if self.kind == "cliff" and at[4] > self.peak[4] + 1:
            tokens *= 0.6
        if self.kind == "slo":
            return tokens * (1 + 0.15 * at[0]), (1 + at[0]) * (1 + 0.25 * at[1]) / 5 - 1
        return tokens, -1.0

    @cached_property
    def best(self) -> float:
        places = itertools.product(*(range(len(values)) for values in VALUES.values()))
        return max(tokens for at in places for tokens, missed in (self.does(at),) if missed <= 0)

    def settings(self, at: Sequence[int]) -> Settings:
        return {key: values[place] for (key, values), place in zip(VALUES.items(), at, strict=True)}

    def places(self, settings: Settings) -> tuple[int, ...]:
        return tuple(list(values).index(settings[key]) for key, values in VALUES.items())

    def trial(self, at: Sequence[int]) -> Trial:
        chance = random.Random(f"{self.kind}/{self.seed}/{at}")
        tokens, missed = self.does(at)
        noise = 0.05 if self.kind == "noisy" else NOISE
        measured = tokens * math.exp(chance.gauss(0, noise))
        first = COLD * tokens * math.exp(chance.gauss(0, noise * math.sqrt(LOAD_S / FIRST_S)))
        return Trial(first, measured, tokens, missed)

    def forecast(self, at: Sequence[int]) -> float:
        chance = random.Random(f"plan/{self.kind}/{self.seed}/{at}")
        return self.does(at)[0] * math.exp(chance.gauss(0, FORECAST_ERROR))


def ours(space: Space, *, start_s: float = FAST_START_S, planned: bool = False, raced: bool = True) -> float:
    """True tokens a second of the trial that measured most."""
    forecasts = []
    if planned:
        chance = random.Random(space.seed)
        drawn = [space.own, *(tuple(map(chance.randrange, map(len, VALUES.values()))) for _ in range(50))]
        forecasts = [(space.settings(at), space.forecast(at)) for at in drawn]
    tried: dict[tuple[int, ...], Trial] = {}
    at, left, stopped_costs = space.own, float(TRIALS), 1 - LOAD_S / (start_s + FIRST_S + LOAD_S)
    while True:
        trial = space.trial(at)
        race = _race(tried.values())
        trial.stopped = raced and race is not None and race.is_lost(trial.first)
        tried[at] = trial
        left -= stopped_costs if trial.stopped else 1.0
        if left < LEAST_LEFT:
            return _best(list(tried.values()))
        race = _race(tried.values())
        observations = [_observation(space.settings(at), trial, race) for at, trial in tried.items()]
        known = {tuple(space.settings(at).values()) for at in tried}
        chosen = propose(
            space.search,
            observations,
            forecasts,
            lambda settings, known=known: tuple(settings[key] for key in VALUES) not in known,  # type: ignore[misc]
            f"{space.seed}/{len(tried)}",
        )
        assert chosen is not None, "the space has far more settings than trials"
        at = space.places(chosen)


def _race(trials: Iterable[Trial]) -> Race | None:
    return Race.of((trial.first, math.log(trial.measured)) for trial in trials if trial.whole)


def _observation(settings: Settings, trial: Trial, race: Race | None) -> Observation:
    if trial.missed > 0:
        return Observation(settings, None, trial.missed)
    if trial.stopped and race is not None:
        return Observation(settings, race.expected(trial.first), noise=race.spread)
    return Observation(settings, math.log(trial.measured))


def optunas(space: Space, sampler: optuna.samplers.BaseSampler, *, halved: bool = False) -> float:
    """The same with a sampler of Optuna's, which is not charged for settings that it proposes again."""
    pruner = optuna.pruners.SuccessiveHalvingPruner(reduction_factor=2) if halved else None
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)
    study.enqueue_trial(dict(zip(VALUES, space.own, strict=True)))
    tried: dict[tuple[int, ...], Trial] = {}
    left_s = TRIALS * (FAST_START_S + FIRST_S + LOAD_S)
    for _ in range(20 * TRIALS):
        asked = study.ask()
        at = tuple(
            asked.suggest_int(key, 0, len(values) - 1)
            if isinstance(values[0], int) and not isinstance(values[0], bool)
            else asked.suggest_categorical(key, range(len(values)))
            for key, values in VALUES.items()
        )
        trial = space.trial(at)
        if halved:
            asked.report(trial.first, 1)
            trial.stopped = asked.should_prune()
        if at not in tried:
            left_s -= FAST_START_S + FIRST_S * halved + LOAD_S * (not trial.stopped)
            tried[at] = trial
        if trial.stopped:
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)
        else:
            study.tell(asked, trial.measured if trial.missed <= 0 else 0.0)
        if left_s < LEAST_LEFT * (FAST_START_S + LOAD_S):
            break
    return _best(list(tried.values()))


def _best(trials: Sequence[Trial]) -> float:
    within = [(trial.measured, trial.tokens) for trial in trials if trial.whole]
    return max(within)[1] if within else 0.0


WAYS: Mapping[str, Callable[[Space], float]] = {
    "random": lambda space: optunas(space, optuna.samplers.RandomSampler(seed=space.seed)),
    "TPE": lambda space: optunas(space, _tpe(space)),
    "TPE halved": lambda space: optunas(space, _tpe(space), halved=True),
    "GP": lambda space: optunas(space, optuna.samplers.GPSampler(n_startup_trials=4, seed=space.seed)),
    "whole": partial(ours, raced=False),
    "raced": ours,
    "slow start": partial(ours, start_s=SLOW_START_S),
    "whole + plan": partial(ours, planned=True, raced=False),
    "raced + plan": partial(ours, planned=True),
    "slow + plan": partial(ours, planned=True, start_s=SLOW_START_S),
}


def _tpe(space: Space) -> optuna.samplers.TPESampler:
    return optuna.samplers.TPESampler(n_startup_trials=4, seed=space.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="places of the optimum of each space (5)")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), help="columns")
    options = parser.parse_args()
    seeds, ways = range(options.seeds), {way: WAYS[way] for way in options.only}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    print(f"{'space':<12}" + "".join(f"{way:>13}" for way in ways), flush=True)
    whole: dict[str, list[float]] = {way: [] for way in ways}
    for kind in KINDS:
        spaces = [Space(kind, seed) for seed in seeds]
        row = ""
        for way, run in ways.items():
            found = [run(space) / space.best for space in spaces]
            whole[way] += found
            row += f"{statistics.mean(found):13.1%}"
        print(f"{kind:<12}{row}", flush=True)
    print(f"{'all':<12}" + "".join(f"{statistics.mean(found):13.1%}" for found in whole.values()))
    print(f"{'± error':<12}" + "".join(f"{_error(found):13.1%}" for found in whole.values()))
    if "whole" in whole:
        print(f"{'- whole':<12}" + "".join(_beside(found, whole["whole"]) for found in whole.values()))


def _error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _beside(found: Sequence[float], others: Sequence[float]) -> str:
    """Difference over the same spaces, with its standard error."""
    differences = [value - other for value, other in zip(found, others, strict=True)]
    return f"{f'{statistics.mean(differences):+.1%} ±{_error(differences):.1%}':>13}"


if __name__ == "__main__":
    main()
