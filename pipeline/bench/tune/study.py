"""All trials of one search, kept by Optuna in a folder of the store, so that a search that was killed goes on.

    <store>/tuning/<recipe>-<digest>/
        study.db              Optuna's own SQLite storage: parameters, values, constraints, states
        search.json           the question of the search, for people
        trial-003.json        the figures of trial 3, as `pipeline bench` writes them
        round-1-own.json      ... and of the rounds at the end

A trial that Optuna calls running is planned and has no figures yet: after kill -9, or while another machine works on
it. It is resumed with the values that it has. Everything random comes from the seed and the trial's number, so
that a search that was interrupted proposes what it would have proposed.
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
from typing import TYPE_CHECKING, Any

from pipeline.bench.result import BenchResult
from pipeline.bench.tune.objective import Score, maximized
from pipeline.bench.tune.search_space import Dimension, SearchSpace, Settings, Value
from pipeline.bench.tune.settings import Objective
from pipeline.bench.tune.surrogate import Tried, propose
from pipeline.bench.tune.trial import COUNTED, Outcome, TrialRecord
from pipeline.errors import StoreError, UserError
from pipeline.extras import missing
from pipeline.store import Store, lock
from pipeline.store.key import digest_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

_RANDOM_TRIALS = 4  # before Optuna's TPE begins to learn
_MOST_REPEATED = 30  # in a row; then a combination that is new is drawn


class TuneStudy:
    """A search on disk, open in one process at a time. Use `open_study`."""

    def __init__(
        self,
        folder: Path,
        study: optuna.Study,
        space: SearchSpace,
        objectives: Sequence[Objective],
        seed: int,
    ) -> None:
        self.folder, self.space, self.objectives, self.seed = folder, space, tuple(objectives), seed
        self._study = study
        self._begun: dict[int, optuna.trial.Trial] = {}
        self._distributions = {one.key: _distribution(one) for one in space.dimensions}

    # reading

    def records(self) -> list[TrialRecord]:
        """List all trials but the repeated ones, in their order."""
        trials = self._study.get_trials(deepcopy=False)
        found = [self._record(one) for one in trials if one.state.name != "WAITING" and self._is_whole(one)]
        return [one for one in found if one.outcome != "repeated"]

    def measurement(self, name: str) -> BenchResult | None:
        """Read the figures that are kept under a name, such as `trial-003`; None if there are none.

        Raises:
            InvalidInput: The file was not written by `keep`.
        """
        file = self.folder / f"{name}.json"
        return BenchResult.read(file) if file.is_file() else None

    # writing

    def keep(self, name: str, result: BenchResult) -> None:
        """Keep figures under a name, atomically."""
        part = self.folder / f".{name}.part"
        result.write(part)
        os.replace(part, self.folder / f"{name}.json")

    def propose(self, settings: Settings, origin: str) -> None:
        """Have settings tried before the sampler's own; does nothing where they have been."""
        params = self._params(settings)
        trials = [one for one in self._study.get_trials(deepcopy=False) if self._is_whole(one)]
        if params not in [one.system_attrs.get("fixed_params", one.params) for one in trials]:
            self._study.enqueue_trial(params, user_attrs={"origin": origin})

    def planned(self) -> list[TrialRecord]:
        """List trials without figures: of a search that was killed, or handed over to another machine."""
        return [one for one in self.records() if one.outcome == "planned"]

    def next(
        self,
        forecasts: Sequence[tuple[Settings, float]] = (),
        *,
        uncompiled: bool = False,
        ahead: bool = False,
    ) -> TrialRecord | None:
        """Begin a trial, with settings that no trial before it has.

        Args:
            forecasts: The plan's forecast of the objective for some settings.
            uncompiled: Vary only keys that need no other engine.
            ahead: Several are planned before the first is measured; those are not proposed again.

        Returns:
            The trial; None when all combinations were tried.
        """
        seen = {self.settings_digest(one.settings) for one in self.records()}
        for attempt in range(self.space.size + _MOST_REPEATED):
            waiting = self._waiting()
            if not waiting and len(seen) >= self.space.size:
                return None
            number = len(self._study.get_trials(deepcopy=False))
            if not waiting:
                if attempt >= _MOST_REPEATED:
                    new = self._unseen(seen, number)
                    if new is None:
                        return None
                    self._study.enqueue_trial(self._params(new))
                elif not ahead and (chosen := self._chosen(seen, number, forecasts, uncompiled)) is not None:
                    self._study.enqueue_trial(self._params(chosen))
                elif uncompiled:
                    # Optuna samples what a trial in the queue leaves open.
                    own = self._params(self.space.own)
                    self._study.enqueue_trial(
                        {one.key: own[one.key] for one in self.space.dimensions if one.compiled}
                    )
            self._study.sampler = _sampler(self.seed, number, ahead)
            trial = self._study.ask(self._distributions)
            self._begun[trial.number] = trial
            record = self._record(self._trial(trial.number))
            if self.settings_digest(record.settings) not in seen:
                return record
            self.finish(record.number, "repeated")
        return None

    def _chosen(
        self, seen: set[str], number: int, forecasts: Sequence[tuple[Settings, float]], uncompiled: bool
    ) -> Settings | None:
        """Choose settings by what trials so far are worth; None leaves it to Optuna: for several objectives."""
        counted = [one for one in self.records() if one.outcome in COUNTED]
        if len(self.objectives) > 1 or not any(one.feasible for one in counted):
            return None
        sign = 1 if maximized(self.objectives[0]) else -1
        tried = [
            Tried(
                one.settings,
                sign * math.log(one.values[0]) if one.feasible and one.values[0] > 0 else None,
                sum(value for value in one.violations.values() if value > 0),
            )
            for one in counted
        ]

        def allowed(settings: Settings) -> bool:
            if uncompiled and self.space.compiles(settings):
                return False
            return self.settings_digest(settings) not in seen

        return propose(self.space, tried, forecasts, allowed, f"{self.seed}/{number}")

    def is_behind(self, number: int, step: int, value: float, *, stoppable: bool) -> bool:
        """Report the value of a load of a running trial, and ask Optuna's pruner whether it is behind the others.

        Args:
            value: Value of the first objective.
            stoppable: Whether the trial can still be stopped; otherwise later trials are all that learn from it.
        """
        if len(self.objectives) > 1:
            # Optuna prunes by one objective only.
            return False
        trial = self._running(number)
        trial.report(value, step)
        return stoppable and trial.should_prune()

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
        trial = self._running(number)
        made = {
            "outcome": outcome,
            "reason": reason,
            "seconds": dict(seconds or {}),
            "compiled": compiled,
            "load": "" if score is None else score.load,
            "violations": {} if score is None else dict(score.violations),
        }
        # In one write, so that it is there whole or not at all.
        trial.set_user_attr("made", made)
        # Trials that failed or broke off count as far from allowed, so that Optuna stays away from them.
        missed = {"served": 1.0} if score is None else score.violations
        if outcome != "repeated":
            for target, violation in missed.items():
                trial.set_constraint(target, violation)
        if outcome == "measured" and score is not None:
            self._study.tell(trial, list(score.values))
        else:
            self._study.tell(trial, state=_states().FAIL if outcome == "repeated" else _states().PRUNED)
        return self._record(self._trial(number))

    def give_up_half_drawn(self) -> None:
        """End the trial whose settings a killed process had drawn only in part, and queue its proposal anew."""
        for one in self._study.get_trials(deepcopy=False):
            if one.state.name == "RUNNING" and not self._is_whole(one):
                self._study.tell(one.number, state=_states().FAIL)
                if "fixed_params" in one.system_attrs:
                    self._study.enqueue_trial(one.system_attrs["fixed_params"], user_attrs=one.user_attrs)

    # between Optuna's trials and settings

    def _is_whole(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether a trial has all of its settings, or waits for them: Optuna writes them down one by one."""
        return trial.state.name == "WAITING" or trial.params.keys() >= self._distributions.keys()

    def _params(self, settings: Settings) -> dict[str, Any]:
        return {
            one.key: _index(one, settings[one.key]) if one.ordered else settings[one.key]
            for one in self.space.dimensions
        }

    def _settings(self, params: Mapping[str, Any]) -> dict[str, Value]:
        return {
            one.key: one.values[params[one.key]] if one.ordered else params[one.key]
            for one in self.space.dimensions
        }

    def _record(self, trial: optuna.trial.FrozenTrial) -> TrialRecord:
        made = trial.user_attrs.get("made", {}) if trial.state.is_finished() else {}
        return TrialRecord(
            number=trial.number,
            settings=self._settings(trial.params),
            outcome=made.get("outcome", "planned"),
            reason=made.get("reason", ""),
            origin=trial.user_attrs.get("origin", "sampler"),
            values=tuple(trial.values or ()) if made.get("outcome") == "measured" else (),
            violations=made.get("violations", {}),
            load=made.get("load", ""),
            seconds=made.get("seconds", {}),
            compiled=made.get("compiled", False),
        )

    def _trial(self, number: int) -> optuna.trial.FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _running(self, number: int) -> optuna.trial.Trial:
        """Return a trial to be written to: of this process, or resumed after another."""
        import optuna

        if number not in self._begun:
            self._begun[number] = optuna.trial.Trial(self._study, self._trial(number)._trial_id)
        return self._begun[number]

    def _waiting(self) -> bool:
        return any(one.state.name == "WAITING" for one in self._study.get_trials(deepcopy=False))

    def _unseen(self, seen: set[str], number: int) -> Settings | None:
        chance = random.Random(f"{self.seed}/{number}")
        for _ in range(10_000):
            drawn = {one.key: chance.choice(one.values) for one in self.space.dimensions}
            if self.settings_digest(drawn) not in seen:
                return drawn
        return None

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
        UserError: Another process has it open; or Optuna is not installed.
        StoreError: The folder cannot be written.
    """
    try:
        import optuna
    except ImportError as error:
        raise missing("tuning", error, "tune") from None
    question = {
        **asked,
        "space": {one.key: list(one.values) for one in space.dimensions},
        "objectives": list(objectives),
        "seed": seed,
    }
    folder = store.tuning / f"{name}-{digest_of(question)[:12]}"
    with ExitStack() as stack:
        try:
            stack.callback(_take(folder).release)
            if restart and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(exist_ok=True)
            text = json.dumps(question, indent=1, ensure_ascii=False)
            (folder / "search.json").write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
        stack.callback(storage.engine.dispose)
        study = optuna.create_study(
            storage=storage,
            study_name=folder.name,
            directions=["maximize" if maximized(one) else "minimize" for one in objectives],
            pruner=optuna.pruners.MedianPruner(n_startup_trials=_RANDOM_TRIALS),
            load_if_exists=True,
        )
        opened = TuneStudy(folder, study, space, objectives, seed)
        opened.give_up_half_drawn()
        yield opened


def _take(folder: Path) -> lock.Lock:
    """Lock a search for this process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    guard = folder.with_name(f"{folder.name}.lock")
    held = lock.exclusive(guard)
    if held is None:
        raise UserError(
            f"{lock.holder(guard) or 'another process'} works on this search ({folder}); wait for it, or ask for "
            "another one, with other keys, seed or loads"
        )
    return held


def _states() -> type[optuna.trial.TrialState]:
    import optuna

    return optuna.trial.TrialState


def _sampler(seed: int, number: int, ahead: bool) -> optuna.samplers.BaseSampler:
    import optuna

    return optuna.samplers.TPESampler(
        n_startup_trials=_RANDOM_TRIALS,
        seed=random.Random(f"{seed}/{number}").getrandbits(32),
        constant_liar=ahead,
    )


def _distribution(one: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if one.ordered:
        return IntDistribution(0, len(one.values) - 1)
    return CategoricalDistribution(one.values)


def _index(one: Dimension, value: Value) -> int:
    return next(
        place for place, known in enumerate(one.values) if type(known) is type(value) and known == value
    )
