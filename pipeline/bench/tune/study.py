"""All trials of one search, kept in a folder of the store, so that a search that was killed goes on.

    <store>/tuning/<recipe>-<digest>/
        trials.json           settings, outcomes and scores of all trials
        search.json           the question of the search, for people
        trial-003.json        the figures of trial 3, as `pipeline bench` writes them
        round-1-own.json      ... and of the rounds at the end

A trial that is `planned` has no figures yet: after kill -9, or while another machine works on it. It is resumed with
the values that it has. Everything random comes from the seed and the trial's number, so that a search that was
interrupted proposes what it would have proposed.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult
from pipeline.bench.tune.objective import COUNTED, Outcome, Score, TrialRecord, maximized
from pipeline.bench.tune.race import Race
from pipeline.bench.tune.search_space import SearchSpace, Settings
from pipeline.bench.tune.settings import Objective
from pipeline.bench.tune.surrogate import Observation, propose
from pipeline.errors import StoreError, UserError
from pipeline.store import Store, lock
from pipeline.store.key import digest_of

_FORM = 3  # of the folder; another one is another search
_LEAST_PEERS = 4  # whole trials before a load counts as one that most hold
_DRAWN = 10_000  # settings at random, before all count as tried
_SUM = 0.05  # weight of the sum of several objectives beside the worst of them, as ParEGO has it
_TINY = 1e-9  # in place of 0, which has no logarithm
_RECORDS = TypeAdapter(list[TrialRecord])


class TuneStudy:
    """A search on disk, open in one process at a time. Use `open_study`."""

    def __init__(self, folder: Path, space: SearchSpace, objectives: Sequence[Objective], seed: int) -> None:
        self.folder, self.space, self.objectives, self.seed = folder, space, tuple(objectives), seed
        self._file = folder / "trials.json"
        self._trials = _RECORDS.validate_json(self._file.read_bytes()) if self._file.is_file() else []
        self._proposed: list[tuple[Settings, str]] = []

    def records(self) -> list[TrialRecord]:
        """List all trials, in their order."""
        return list(self._trials)

    def planned(self) -> list[TrialRecord]:
        """List trials without figures: of a search that was killed, or handed over to another machine."""
        return [trial for trial in self._trials if trial.outcome == "planned"]

    def measurement(self, name: str) -> BenchResult | None:
        """Read the figures that are kept under a name, such as `trial-003`; None if there are none.

        Raises:
            InvalidInput: The file was not written by `keep`.
        """
        file = self.folder / f"{name}.json"
        return BenchResult.read(file) if file.is_file() else None

    def keep(self, name: str, result: BenchResult) -> None:
        """Keep figures under a name, atomically."""
        part = self.folder / f".{name}.part"
        result.write(part)
        os.replace(part, self.folder / f"{name}.json")

    def propose(self, settings: Settings, origin: str) -> None:
        """Have settings tried before the model's own; does nothing where they have been."""
        tried = [trial.settings for trial in self._trials] + [proposed for proposed, _ in self._proposed]
        if self.settings_digest(settings) not in map(self.settings_digest, tried):
            self._proposed.append((settings, origin))

    def next(
        self, forecasts: Sequence[tuple[Settings, float]] = (), *, uncompiled: bool = False
    ) -> TrialRecord | None:
        """Begin a trial, with settings that no trial before it has.

        Args:
            forecasts: The plan's forecast of the objective for some settings.
            uncompiled: Vary only keys that need no other engine.

        Returns:
            The trial; None when all combinations were tried.
        """
        if self._proposed:
            settings, origin = self._proposed.pop(0)
        elif (chosen := self._chosen(forecasts, uncompiled)) is not None:
            settings, origin = chosen, "sampler"
        else:
            return None
        trial = TrialRecord(number=len(self._trials), settings=dict(settings), origin=origin)
        self._trials.append(trial)
        self._write()
        return trial

    def _chosen(self, forecasts: Sequence[tuple[Settings, float]], uncompiled: bool) -> Settings | None:
        """Choose settings by what trials so far are worth; at random while none is known to be worth anything."""
        tried, seed = (
            {self.settings_digest(trial.settings) for trial in self._trials},
            f"{self.seed}/{len(self._trials)}",
        )
        counted = [trial for trial in self._trials if trial.outcome in COUNTED]
        rng = random.Random(seed)

        def allowed(settings: Settings) -> bool:
            if uncompiled and self.space.compiles(settings):
                return False
            return self.settings_digest(settings) not in tried

        if any(trial.feasible for trial in counted):
            several = len(self.objectives) > 1
            weights = [rng.random() if several else 1.0 for _ in self.objectives]
            # The plan forecasts one objective alone.
            chosen = propose(
                self.space, self._observations(counted, weights), () if several else forecasts, allowed, seed
            )
            if chosen is not None:
                return chosen
        drawn = (
            {
                dimension.key: dimension.own
                if uncompiled and dimension.compiled
                else rng.choice(dimension.values)
                for dimension in self.space.dimensions
            }
            for _ in range(_DRAWN)
        )
        if len(tried) < self.space.size and (chosen := next(filter(allowed, drawn), None)) is not None:
            return chosen
        return self._chosen(forecasts, False) if uncompiled else None

    def _observations(self, trials: Sequence[TrialRecord], weights: Sequence[float]) -> list[Observation]:
        """Express what each trial is worth as one number.

        Of several objectives that is a weighted Chebyshev distance; random weights spread trials over the front
        (Knowles, "ParEGO: A Hybrid Algorithm With On-Line Landscape Approximation", 2006).
        """
        signs = [1 if maximized(objective) else -1 for objective in self.objectives]
        logs = {
            trial.number: [
                weight * sign * math.log(max(trial.values[name], _TINY))
                for name, sign, weight in zip(self.objectives, signs, weights, strict=True)
            ]
            for trial in trials
            if trial.feasible
        }
        best = [max(values) for values in zip(*logs.values(), strict=True)]
        race = self.race()
        observations = []
        for trial in trials:
            missed = sum(value for value in trial.violations.values() if value > 0)
            values = logs.get(trial.number)
            if values is not None and len(values) == 1:
                observations.append(Observation(trial.settings, values[0]))
            elif values is not None:
                worth = min(a - b for a, b in zip(values, best, strict=True)) + _SUM * sum(values)
                observations.append(Observation(trial.settings, worth))
            elif race is not None and trial.outcome == "stopped" and trial.first_tokens_per_s and not missed:
                worth = race.expected(trial.first_tokens_per_s)
                observations.append(Observation(trial.settings, worth, noise=race.spread))
            else:
                observations.append(Observation(trial.settings, None, missed))
        return observations

    def race(self) -> Race | None:
        """Learn from whole trials how reliable first seconds are; None where nothing is to be learned from them.

        Latencies of first seconds are of the few requests that ended by then.
        """
        if len(self.objectives) > 1 or self.objectives[0] == "latency":
            return None
        return Race.of(
            (trial.first_tokens_per_s, math.log(max(trial.values[self.objectives[0]], _TINY)))
            for trial in self._trials
            if trial.feasible and trial.first_tokens_per_s is not None
        )

    def is_lost(self, number: int, tokens_per_s: float) -> bool:
        """Record the first seconds of a running trial, and tell whether it is behind the best."""
        self._change(number, first_tokens_per_s=tokens_per_s)
        race = self.race()
        return race is not None and race.is_lost(tokens_per_s)

    def most_hold(self, loads: Sequence[Load]) -> bool:
        """Tell whether half of the whole trials, or more, were within the SLO at one of the largest loads."""
        names = {str(load) for load in loads}
        whole = [trial for trial in self._trials if trial.outcome == "measured"]
        held = sum(trial.feasible and trial.load in names for trial in whole)
        return len(self.objectives) == 1 and len(whole) >= _LEAST_PEERS and 2 * held >= len(whole)

    def finish(
        self,
        number: int,
        outcome: Outcome,
        *,
        score: Score | None = None,
        reason: str = "",
        seconds: Mapping[str, float] | None = None,
        compiled: bool = False,
    ) -> TrialRecord:
        """Record the outcome of a trial: `measured` with a score, or any other but `planned`. See `TrialRecord`."""
        made = {} if score is None else dict(score)
        if outcome != "measured":
            made["values"] = {}
        return self._change(
            number, outcome=outcome, reason=reason, seconds=dict(seconds or {}), compiled=compiled, **made
        )

    def _change(self, number: int, **changes: Any) -> TrialRecord:
        self._trials[number] = self._trials[number].model_copy(update=changes)
        self._write()
        return self._trials[number]

    def _write(self) -> None:
        part = self.folder / ".trials.part"
        part.write_bytes(_RECORDS.dump_json(self._trials, indent=1) + b"\n")
        os.replace(part, self._file)

    def settings_digest(self, settings: Settings) -> str:
        """Digest of the changes that settings make."""
        # Settings that change the recipe alike are one, such as all ways to look up n-grams where there are none.
        return digest_of(sorted(self.space.overrides(settings)))


@contextmanager
def open_study(
    store: Store,
    name: str,
    asked: Mapping[str, Any],
    space: SearchSpace,
    objectives: Sequence[Objective],
    *,
    seed: int,
    restart: bool = False,
) -> Iterator[TuneStudy]:
    """Open the search that answers a question, or begin it.

    Args:
        asked: All that the figures depend on; another question is another search.
        restart: Forget an earlier search.

    Raises:
        UserError: Another process has it open.
        StoreError: The folder cannot be written.
    """
    question = {
        **asked,
        "space": {dimension.key: list(dimension.values) for dimension in space.dimensions},
        "objectives": list(objectives),
        "seed": seed,
        "form": _FORM,
    }
    folder = store.tuning / f"{name}-{digest_of(question)[:12]}"
    with ExitStack() as stack:
        try:
            stack.callback(_lock_study(folder).release)
            if restart and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(exist_ok=True)
            text = json.dumps(question, indent=1, ensure_ascii=False)
            (folder / "search.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error
        yield TuneStudy(folder, space, objectives, seed)


def _lock_study(folder: Path) -> lock.Lock:
    """Lock a search for this process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    guard = folder.with_name(f"{folder.name}.lock")
    acquired = lock.exclusive(guard)
    if acquired is None:
        raise UserError(
            f"{lock.holder(guard) or 'another process'} works on this search ({folder}); wait for it, or ask for "
            "another one, with other keys, seed or loads"
        )
    return acquired
