"""Serve packages until told to stop: checked against this machine, started, announced, supervised, ended.

By processes of this machine, or by a container (`launch_*` has the commands, `server.TritonServer` the process), with a
gateway in front of them if the caller gives its command line. While they run they are announced in `<store>/running/`,
so that clients find them by the names of their recipes, and checked by real inference: Triton reports itself ready even
when the process of a model is dead.

A Ctrl-C ends everything in this order: `stop` is set, `Supervisor.run` stops its keepers, they end the gateway and
`machine/process_guard.py`, and the guard ends the processes of the server. After a `kill -9` of this process, the
kernel kills the gateway, and the guard sees the end of its standard input. `Rollouts` takes other packages meanwhile.
"""

from __future__ import annotations

import json
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from pipeline.errors import UserError
from pipeline.keeper import Keeper
from pipeline.progress import Progress, Silent
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer, Say
from pipeline.serving.gateway_process import GatewayLaunch, GatewayProcess
from pipeline.serving.launch import ServeOptions
from pipeline.serving.rollout import MakeTriton, Rollout, RolloutRequest
from pipeline.serving.supervisor import Supervisor
from pipeline.serving.triton_component import TritonComponent, log_file, make_triton
from pipeline.triton.running import RunningServer

_ANNOUNCED_S = 1.0


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
        # The record says so a moment before the keeper does.
        if not keeper.ready.wait(_ANNOUNCED_S):
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


def serve(
    packages: Sequence[tuple[Path, ServeOptions]],
    progress: Progress,
    stop: threading.Event,
    *,
    gateway: GatewayLaunch | None = None,
    ready_file: Path | None = None,
    stopped_by: str = "Ctrl-C",
) -> None:
    """Serve packages until `stop` is set.

    A package is ready when it answers, and all its files are those that were built; weights that have to be read for
    that are read while they are loaded.

    Args:
        packages: Folders with deployment.json and model_repository/, each with its options. The store is that of
            the first.
        stop: Ends everything when it is set, also while it starts.
        gateway: Gateway in front of them; None for none.
        ready_file: File that is there while everything is ready; see `pipeline.serving.health`.
        stopped_by: Command that ends it, for a reader.

    Raises:
        InvalidInput: The machine does not fit; all reasons at once.
        UserError: The package cannot be served this way, or a server for this recipe runs already.
        DamagedArtifact: Files of the package are not those that were built.
        ServerError: Something did not start, or failed too often where the policy gives up (`RestartsExhausted`).
    """
    first = packages[0][1]
    tritons = [make_triton(package, options, progress) for package, options in packages]
    components = ("triton",) if gateway is None else ("triton", "gateway")
    gateway_log = log_file(first, tritons[0].name, "gateway.log") if gateway is not None else None
    control_path = None if first.running is None else first.running / f"{tritons[0].name}.sock"
    began = time.monotonic()
    with ExitStack() as stack:
        announcements = {}
        for triton in tritons:
            record = RunningServer.of(
                triton.addresses,
                triton.package,
                state="starting",
                gateway_url="" if gateway is None else gateway.url,
                log=triton.server.log_file.absolute(),
                gateway_log=gateway_log,
                control=control_path,
                recipe=triton.options.recipe,
                settings=triton.options.settings,
            )
            announcement = Announcement(
                first.running, triton.name, record, components,
                ready_file=ready_file, entry_model=triton.server.entry_model,
            )  # fmt: skip
            # Undone when another one of them is served already.
            stack.callback(announcement.withdraw)
            announcement.claim(progress, needed=gateway is not None)
            announcements[triton.name] = announcement
        process = None
        if gateway is not None:
            assert gateway_log is not None, "it was made for it"
            process = GatewayProcess(gateway, gateway_log)
            stack.callback(process.close)
        supervisor = Supervisor(
            {triton.name: (triton, announcements[triton.name]) for triton in tritons},
            process,
            {triton.name: triton.options.restart for triton in tritons},
            progress,
            stop,
        )
        Rollouts(supervisor, make_triton, progress)
        control = _open_control(control_path, supervisor, progress, stack)
        supervisor.run(
            lambda: progress.say(
                _ready_text(tritons, gateway, gateway_log, stopped_by, time.monotonic() - began)
            ),
            control,
        )
    progress.say("stopped " + ", ".join(f"Triton for {triton.name}" for triton in tritons))


def stop_on_signals() -> threading.Event:
    """Make an event that SIGINT and SIGTERM set from now on; to be called when there is a server to stop.

    Before, while a package is built, both signals end the command at once as they end `pipeline build`. So does a
    second SIGINT; what the command has started ends with it.
    """
    stop = threading.Event()

    def end(number: int, _frame: FrameType | None) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return stop


def _open_control(
    path: Path | None, supervisor: Supervisor, progress: Progress, stack: ExitStack
) -> ControlServer | None:
    if path is None or not path.parent.is_dir():
        return None
    try:
        return stack.enter_context(ControlServer(path, supervisor.handlers))
    except OSError as error:
        progress.say(f"{path} cannot be made ({error.strerror}): this server takes signals only")
        return None


def _ready_text(
    tritons: Sequence[TritonComponent],
    gateway: GatewayLaunch | None,
    gateway_log: Path | None,
    stopped_by: str,
    took_s: float,
) -> str:
    """Write the addresses, and a line to paste for each kind of client."""
    lines = [f"ready after {took_s:.1f} s"]
    for triton in tritons:
        lines += triton.lines(stopped_by)
    if gateway is not None:
        lines.append(f"OpenAI API: {gateway.url}/v1   page: {gateway.url}/   log: {gateway_log}")
        lines += openai_lines(gateway.url, tritons[0].name, needs_key=gateway.needs_key)
    return "\n  ".join(lines)


def openai_lines(url: str, model: str, *, needs_key: bool) -> tuple[str, str]:
    """Make lines for a shell that ask a gateway: by curl, and by OpenAI's own Python package.

    An API key that is needed is taken from $OPENAI_API_KEY.
    """
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "stream": True})
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if needs_key else ""
    api_key = "" if needs_key else ", api_key='none'"
    code = (
        f"from openai import OpenAI; print(OpenAI(base_url='{url}/v1'{api_key}).chat.completions.create("
        f"model='{model}', messages=[{{'role': 'user', 'content': 'Hello'}}]).choices[0].message.content)"
    )
    return (
        f"curl: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}",
        f'openai: python -c "{code}"',
    )
