"""Keeps deployments running: one Triton a recipe, and one gateway in front of all, each started, watched, restarted.

Each component has a `Keeper`, a thread that starts it, watches it several times a second, and ends and starts it again
when it is ill, after growing pauses (`restart.RestartPolicy`). One that fails too often is said to be failing, and is
tried again after long pauses, while the others go on; where the policy says so, everything ends instead, and `run`
raises `GaveUp`. A component that was never ready is not tried again: its first failure ends everything.

What others see of it is the `Announcement` of each deployment. What they may ask of it goes by `control.ControlServer`:

    status    the records of all deployments, with the processes of each component
    stop      ends everything, and answers when that is done

Nothing here needs a terminal. How it is started detached: a new process in a session of its own
(`subprocess.Popen([sys.executable, "-m", "pipeline.cli.main", "serve", …], start_new_session=True)`), its output in
`<store>/logs/<recipe>/serve.log`; then wait for a record with the pid of that process, and in it for the state `ready`
or `failed`, or for the end of the process, whose exit code and log then say why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pipeline.errors import ServerError
from pipeline.progress import Progress
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer, Handler, Say
from pipeline.serving.monitor import HealthIssue
from pipeline.serving.restart import RestartPolicy
from pipeline.serving.server import StartCancelled

_POLL_S = 0.2
_CONFIRM_S = 1.0
_ANSWERS_S = 5.0  # in which those who asked to stop have their answers
_WORDS = {"triton": "Triton", "gateway": "the gateway"}


class GaveUp(ServerError):
    """A component failed too often, and the policy says that this is the end."""


class Component(Protocol):
    """Something that is started, watched, ended and started again."""

    @property
    def kind(self) -> str:
        """ "triton" or "gateway"."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes; none while it is not running."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Fields of the deployment's record that a start may have changed."""

    def start(self, stop: threading.Event) -> None:
        """Start it, and wait until it is ready.

        Raises:
            StartCancelled: `stop` was set meanwhile.
            ServerError: It is not ready in time, or ended; the text says why.
        """

    def check(self) -> HealthIssue | None:
        """What is wrong with it, None if nothing is. Called several times a second, and does not take long."""

    def stop(self, *, at_once: bool) -> None:
        """End it: `at_once`, or when what is under way has ended. Does nothing if it is not running."""


class Keeper(threading.Thread):
    """Starts a component, and keeps it running until it is told to stop."""

    def __init__(
        self,
        component: Component,
        policy: RestartPolicy,
        announcements: Sequence[Announcement],
        progress: Progress,
        on_failure: Callable[[], None],
    ) -> None:
        """Prepare a thread; `start` starts it.

        Args:
            component: What to keep.
            policy: When it is started again.
            announcements: The deployments whose state depends on it.
            progress: Where to say what happens.
            on_failure: Called when `failure` is set, just before the thread ends.
        """
        super().__init__(name=component.kind, daemon=True)
        self.component = component
        self.ready = threading.Event()
        self._policy, self._announcements, self._progress = policy, announcements, progress
        self._on_failure = on_failure
        self._stop_keeping = threading.Event()
        # Set together with it, and while another component is to be taken.
        self._interrupt = threading.Event()
        self._next: tuple[Component, Callable[[], None]] | None = None
        self._guard = threading.Lock()
        self._taken = threading.Event()
        # How often it was tried since it counts as failing.
        self._tries = 0
        self.failure: Exception | None = None

    def stop(self) -> None:
        """End the component, and then the thread; `join` waits for it."""
        with self._guard:
            self._stop_keeping.set()
            self._interrupt.set()

    def exchange(self, component: Component, announce: Callable[[], None]) -> None:
        """Keep another component from now on. The one before is left to the caller, unless it was being restarted.

        Args:
            component: It runs already.
            announce: Called at the moment of the exchange, to say what is served now.

        Raises:
            ServerError: This keeper has ended; the component is still the caller's.
        """
        self._taken.clear()
        with self._guard:
            self._next = component, announce
            self._interrupt.set()
        while not self._taken.wait(_POLL_S):
            if not self.is_alive() and not self._taken.is_set():
                raise ServerError(f"{_WORDS[self.component.kind]} that was to be replaced has been given up")

    def run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            # Whoever made this thread raises it.
            self.failure = error
            self._on_failure()

    def _keep(self) -> None:
        failures: list[float] = []
        kind, at_once = self.component.kind, True
        try:
            while not self._stop_keeping.is_set():
                try:
                    if self._take_next():
                        failures.clear()
                    else:
                        self.component.start(self._interrupt)
                        self._say_ready(again=bool(failures))
                    self._tries = 0
                    fault = self._watch()
                except StartCancelled:
                    continue
                except Exception as error:
                    # Of the machine, too: a full disk or a lack of processes may pass.
                    if not self.ready.is_set():
                        raise
                    fault = str(error) or type(error).__name__
                if fault is None:
                    continue
                failures = [*failures, time.monotonic()][-self._policy.max_restarts - 1 :]
                self._prepare_restart(failures, fault)
            at_once = False
        finally:
            for one in self._announcements:
                one.set_state(kind, "draining")
            self.component.stop(at_once=at_once)

    def _take_next(self) -> bool:
        """Go over to the component of `exchange`. Returns whether there is one."""
        with self._guard:
            if self._next is None:
                return False
            (self.component, announce), self._next = self._next, None
            if not self._stop_keeping.is_set():
                self._interrupt.clear()
        announce()
        self._taken.set()
        return True

    def _say_ready(self, *, again: bool) -> None:
        self.ready.set()
        for one in self._announcements:
            one.set_state(self.component.kind, "ready", **self.component.addresses)
        if again:
            self._progress.say(f"{_WORDS[self.component.kind]} is ready again")

    def _watch(self) -> str | None:
        """Wait until something is wrong with it, and return what; None if it is to stop, or to be exchanged."""
        confirmed, last = time.monotonic(), None
        while not self._interrupt.wait(_POLL_S):
            found = self.component.check()
            if found is not None and found.kind == "fault":
                return found.reason
            if found != last:
                last = found
                for one in self._announcements:
                    if found is None:
                        one.set_state(self.component.kind, "ready")
                    else:
                        one.set_state(self.component.kind, "unready", found.reason)
            if time.monotonic() - confirmed >= _CONFIRM_S:
                confirmed = time.monotonic()
                for one in self._announcements:
                    one.confirm()
        return None

    def _prepare_restart(self, failures: Sequence[float], fault: str) -> None:
        """End it, and wait before it is started again."""
        kind, policy, now = self.component.kind, self._policy, failures[-1]
        failing = self._tries > 0 or policy.too_often(failures, now)
        pause_s = (
            policy.pause_while_failing(self._tries) if failing else policy.pause_before_restart(failures, now)
        )
        often = f"failed {policy.max_restarts + 1} times within {policy.window_s:g} s"
        reason = fault.partition("\n")[0]
        if failing:
            reason += (
                f"; it {often}, and is tried again after pauses of up to {policy.max_failing_pause_s:g} s"
            )
        for one in self._announcements:
            one.set_state(kind, "failing" if failing else "restarting", reason)
        self._progress.say(fault)
        self.component.stop(at_once=True)
        if failing and policy.gives_up:
            raise GaveUp(f"gave up on {_WORDS[kind]}: it {often}; the last time: {fault}")
        if failing and not self._tries:
            self._progress.say(
                f"{_WORDS[kind]} {often}: it is tried again from time to time, and all else goes on"
            )
        self._tries += failing
        self._progress.say(f"starting {_WORDS[kind]} again" + (f" in {pause_s:g} s" if pause_s else ""))
        for one in self._announcements:
            one.count_restart(kind)
        self._interrupt.wait(pause_s)


class Supervisor:
    """The keepers of some deployments and of their gateway, and what others may ask of them."""

    def __init__(
        self,
        deployments: Mapping[str, tuple[Component, Announcement]],
        gateway: Component | None,
        policy: RestartPolicy,
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        """Prepare a supervisor; `run` starts everything.

        Args:
            deployments: Name of a recipe -> its Triton, and its announcement, which is claimed already.
            gateway: In front of all; None for none.
            policy: When a component is started again.
            progress: Where to say what happens.
            stop: Ends everything when it is set.
        """
        self.announcements = {name: announcement for name, (_, announcement) in deployments.items()}
        self._stop, self._ended = stop, threading.Event()
        self.tritons = {
            name: Keeper(triton, policy, [announcement], progress, stop.set)
            for name, (triton, announcement) in deployments.items()
        }
        everywhere = tuple(self.announcements.values())
        self._gateway = None if gateway is None else Keeper(gateway, policy, everywhere, progress, stop.set)
        # Called when everything ends, after the gateway and before the rest.
        self.on_end: list[Callable[[], None]] = []
        self.handlers: dict[str, Handler] = {"status": self._status, "stop": self._stop_by_request}

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """Of all components, the gateway's first, as they are to be stopped."""
        return (*(() if self._gateway is None else (self._gateway,)), *self.tritons.values())

    def run(self, on_ready: Callable[[], None], control: ControlServer | None = None) -> None:
        """Run until it is told to stop, or something did not start; then end everything.

        Args:
            on_ready: Called when everything is ready for the first time.
            control: Takes requests meanwhile; None takes none.

        Raises:
            PipelineError: Why it ended, if it was not told to.
        """
        failure = None
        for keeper in self.keepers:
            keeper.start()
        try:
            self._wait_until_ready(on_ready)
            self._stop.wait()
        finally:
            self._end()
            failure = next((keeper.failure for keeper in self.keepers if keeper.failure is not None), None)
            if control is not None:
                control.close()
            for one in self.announcements.values():
                one.withdraw("" if failure is None else str(failure))
            self._ended.set()
            if control is not None:
                control.join(_ANSWERS_S)
        if failure is not None:
            raise failure

    def _wait_until_ready(self, on_ready: Callable[[], None]) -> None:
        for keeper in self.keepers:
            while not keeper.ready.wait(_POLL_S):
                if self._stop.is_set():
                    return
        on_ready()

    def _end(self) -> None:
        """The gateway first: what it has under way needs Triton."""
        if self._gateway is not None:
            self._gateway.stop()
            self._gateway.join()
        for end in self.on_end:
            end()
        for keeper in self.tritons.values():
            keeper.stop()
        for keeper in self.tritons.values():
            keeper.join()

    def _status(self, _request: Mapping[str, Any], _say: Say) -> dict[str, Any]:
        gateway = () if self._gateway is None else self._gateway.component.pids
        return {
            "deployments": {
                name: {
                    **announcement.record.as_json(),
                    "pids": {"triton": self.tritons[name].component.pids, "gateway": gateway},
                }
                for name, announcement in self.announcements.items()
            }
        }

    def _stop_by_request(self, _request: Mapping[str, Any], say: Say) -> dict[str, Any]:
        say("stopping: requests under way are completed")
        self._stop.set()
        self._ended.wait()
        return {"stopped": list(self.announcements)}
