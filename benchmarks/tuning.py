#!/usr/bin/env python3
"""How near a search of `pipeline tune` comes to the best settings in 12 trials, beside Optuna's own samplers.

    python benchmarks/tuning.py [--seeds 5]

Ten made-up spaces of eight keys, with as many values as the keys of the `cpu` runtime have, and trials that are off by
2 %. A figure is the throughput of the best trial, as a share of the most that the space has within its SLO; the mean
over the seeds, each of which puts the recipe and the optimum somewhere else. The column `forecast` gives the proposals
a plan whose forecast of every setting is off by 15 %.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import optuna

from pipeline.bench.tune.search_space import Dimension, SearchSpace, Settings, Value
from pipeline.bench.tune.surrogate import Observation, propose

TRIALS, NOISE, FORECAST_ERROR = 12, 0.02, 0.15
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

    def trial(self, at: Sequence[int]) -> tuple[float, float, float]:
        """Measured and true tokens a second, and by which share the SLO is missed."""
        chance = random.Random(f"{self.kind}/{self.seed}/{at}")
        tokens, missed = self.does(at)
        noise = 0.05 if self.kind == "noisy" else NOISE
        return tokens * math.exp(chance.gauss(0, noise)), tokens, missed

    def forecast(self, at: Sequence[int]) -> float:
        chance = random.Random(f"plan/{self.kind}/{self.seed}/{at}")
        return self.does(at)[0] * math.exp(chance.gauss(0, FORECAST_ERROR))


def ours(space: Space, *, planned: bool = False) -> float:
    """True tokens a second of the trial that measured most."""
    tried = {space.own: space.trial(space.own)}
    forecasts = []
    if planned:
        chance = random.Random(space.seed)
        drawn = [space.own, *(tuple(map(chance.randrange, map(len, VALUES.values()))) for _ in range(50))]
        forecasts = [(space.settings(at), space.forecast(at)) for at in drawn]
    while len(tried) < TRIALS:
        trials = [
            Observation(space.settings(at), math.log(measured) if missed <= 0 else None, max(0.0, missed))
            for at, (measured, _, missed) in tried.items()
        ]
        chosen = propose(
            space.search,
            trials,
            forecasts,
            lambda settings: space.places(settings) not in tried,
            f"{space.seed}/{len(tried)}",
        )
        assert chosen is not None, "the space has far more settings than trials"
        at = space.places(chosen)
        tried[at] = space.trial(at)
    return _best(list(tried.values()))


def optunas(space: Space, sampler: optuna.samplers.BaseSampler) -> float:
    """The same with a sampler of Optuna's, which is not charged for settings that it proposes again."""
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial(dict(zip(VALUES, space.own, strict=True)))
    tried: dict[tuple[int, ...], tuple[float, float, float]] = {}
    for _ in range(10 * TRIALS):
        trial = study.ask()
        at = tuple(
            trial.suggest_int(key, 0, len(values) - 1)
            if isinstance(values[0], int) and not isinstance(values[0], bool)
            else trial.suggest_categorical(key, range(len(values)))
            for key, values in VALUES.items()
        )
        tried[at] = measured, _, missed = space.trial(at)
        study.tell(trial, measured if missed <= 0 else 0.0)
        if len(tried) == TRIALS:
            break
    return _best(list(tried.values()))


def _best(trials: Sequence[tuple[float, float, float]]) -> float:
    within = [(measured, tokens) for measured, tokens, missed in trials if missed <= 0]
    return max(within)[1] if within else 0.0


WAYS: Mapping[str, Callable[[Space], float]] = {
    "random": lambda space: optunas(space, optuna.samplers.RandomSampler(seed=space.seed)),
    "TPE": lambda space: optunas(space, optuna.samplers.TPESampler(n_startup_trials=4, seed=space.seed)),
    "GP": lambda space: optunas(space, optuna.samplers.GPSampler(n_startup_trials=4, seed=space.seed)),
    "ours": ours,
    "forecast": lambda space: ours(space, planned=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="places of the optimum of each space (5)")
    seeds = range(parser.parse_args().seeds)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    print(f"{'space':<14}" + "".join(f"{way:>10}" for way in WAYS), flush=True)
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    for kind in KINDS:
        spaces = [Space(kind, seed) for seed in seeds]
        row = ""
        for way, run in WAYS.items():
            found = [run(space) / space.best for space in spaces]
            whole[way] += found
            row += f"{statistics.mean(found):10.1%}"
        print(f"{kind:<14}{row}", flush=True)
    print(f"{'all':<14}" + "".join(f"{statistics.mean(found):10.1%}" for found in whole.values()))


if __name__ == "__main__":
    main()
