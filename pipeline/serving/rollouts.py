"""Rollouts requested over a supervisor's control socket: which may begin, and their outcomes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.keeper import Keeper
from pipeline.progress import Progress, Silent
from pipeline.serving.control import Say
from pipeline.serving.rollout import MakeTriton, Rollout, RolloutRequest
from pipeline.serving.supervisor import Supervisor
from pipeline.triton.running import RunningServer


class Rollouts:
    """The rollouts of one supervisor, one at a time for each deployment.

    On its control socket it takes a `RolloutRequest`, with the command

        rollout           all of it
        rollback          without the package, recipe and settings
        cancel_rollout    the name: leaves the old package in place, unless the switch has been made
    """

    def __init__(self, supervisor: Supervisor, make: MakeTriton, progress: Progress) -> None:
        """Offer rollouts on the control socket of a supervisor whose Tritons are `TritonComponent`s."""
        self._supervisor, self._make, self._progress = supervisor, make, progress
        self._guard = threading.Lock()
        self._under_way: dict[str, Rollout] = {}
        # Records of packages that were served.
        self._served: dict[Path, RunningServer] = {}
        supervisor.handlers |= {
            "rollout": self._rollout,
            "rollback": self._rollback,
            "cancel_rollout": self._cancel,
        }
        supervisor.on_end.append(self._end)

    def _rollout(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        wanted = RolloutRequest.read(request)
        if not wanted.folder.is_absolute():
            raise UserError(f"package {wanted.folder}: is not an absolute path")
        return self._run(wanted, say)

    def _rollback(self, request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        wanted = RolloutRequest.read(request)
        self._keeper(wanted.name)
        record = self._supervisor.announcements[wanted.name].record
        if record.previous is None:
            raise UserError(
                f"{wanted.name}: no other package was served before, so there is none to go back to"
            )
        before = self._served.get(record.previous, record)
        back = {
            "package": str(record.previous),
            "recipe": list(before.recipe),
            "settings": before.settings,
        }
        # The answers of a package that somebody goes back from are no standard.
        return self._run(wanted.model_copy(update=back), say, compare=False)

    def _cancel(self, request: Mapping[str, Any], _: Say) -> dict[str, Any]:
        name = RolloutRequest.read(request).name
        with self._guard:
            rollout = self._under_way.get(name)
        if rollout is None:
            raise UserError(f"{name}: no rollout is under way")
        rollout.cancelled.set()
        rollout.ended.wait()
        return {"name": name, "package": str(self._supervisor.announcements[name].record.deployment.parent)}

    def _keeper(self, name: str) -> Keeper:
        if name not in self._supervisor.tritons:
            known = ", ".join(self._supervisor.tritons)
            raise UserError(f"{name}: is not served by this supervisor, which serves {known}")
        return self._supervisor.tritons[name]

    def _run(self, request: RolloutRequest, say: Say, *, compare: bool = True) -> dict[str, Any]:
        keeper, record = self._keeper(request.name), self._supervisor.announcements[request.name].record
        if not keeper.ready.is_set():
            raise UserError(f"{request.name} is not ready yet; a rollout can begin when it is")
        if request.folder == record.deployment.parent:
            raise UserError(f"{request.name} is served from {request.folder} already")
        options = keeper.component.options  # type: ignore[attr-defined]
        if not options.use(request.folder):
            raise UserError(f"{request.folder} is not there any more")
        progress = _ProgressToBoth(self._progress, say)
        rollout = Rollout(request, self._supervisor, self._make, progress, compare=compare)
        with self._guard:
            if request.name in self._under_way:
                other = self._under_way[request.name].request.folder
                raise UserError(f"{request.name}: a rollout to {other} is under way")
            self._under_way[request.name] = rollout
        self._served[record.deployment.parent] = record
        try:
            return rollout.run()
        finally:
            with self._guard:
                del self._under_way[request.name]
            rollout.ended.set()

    def _end(self) -> None:
        """Have rollouts end what they started; called when the gateway has ended."""
        with self._guard:
            rollouts = list(self._under_way.values())
        for rollout in rollouts:
            rollout.ending.set()
            rollout.cancelled.set()
        for rollout in rollouts:
            rollout.ended.wait()


class _ProgressToBoth(Silent):
    """Progress that goes to whoever asked, besides to the supervisor's own."""

    def __init__(self, progress: Progress, say: Say) -> None:
        self._progress, self._say = progress, say

    def say(self, text: str) -> None:
        self._progress.say(text)
        self._say(text)
