"""Keep something running: start it, watch it, and end and start it again when it is ill, after growing pauses.

A `Keeper` is a thread that keeps one `Component` by a `RestartPolicy`. A component that fails too often counts as
failing and is tried again after long pauses; where the policy says so, the keeper gives up instead. A component that
was never ready is not tried again: its first failure is the keeper's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pipeline.errors import ServerError
from pipeline.progress import Progress

_POLL_S = 0.2
_CONFIRM_S = 1.0

# ready        it works
# unready      something is wrong, and it may recover by itself
# restarting   it is down, and is being started again
# failing      it is down, and failed too often: it is tried again from time to time
# draining     it was told to stop, and completes what is under way
KeptState = Literal["ready", "unready", "restarting", "failing", "draining"]


class StartCancelled(ServerError):
    """A start was called off before the component was ready."""


class RestartsExhausted(ServerError):
    """A component failed too often, and the policy says that this is the end."""


@dataclass(frozen=True, slots=True)
class HealthIssue:
    """Something wrong with a component.

    Attributes:
        kind: "fault": it has to be started again. "doubt": it is not ready, but may recover by itself.
        reason: Description of it.
    """

    kind: Literal["doubt", "fault"]
    reason: str


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """A limit on failures within a window of time, and pauses that double. Pure; the keeper has the clock.

    Attributes:
        max_restarts: Restarts within the window; a component that fails more often counts as failing.
        window_s: Failures that are older do not count any more, in seconds.
        pause_s: Pause before the second restart within the window; the first is made at once.
        max_pause_s: Longest pause.
        max_failing_pause_s: Longest pause between two tries to start a component that is failing.
        gives_up: Whether a component that is failing is not tried again, because something above starts all anew.

    >>> policy = RestartPolicy(max_restarts=3)
    >>> [policy.pause_before_restart(range(n), now=4) for n in range(1, 5)]
    [0.0, 1.0, 2.0, 4.0]
    >>> [policy.too_often(range(n), now=4) for n in range(1, 5)]
    [False, False, False, True]
    """

    max_restarts: int = 5
    window_s: float = 300.0
    pause_s: float = 1.0
    max_pause_s: float = 30.0
    max_failing_pause_s: float = 60.0
    gives_up: bool = False

    def too_often(self, failures: Sequence[float], now: float) -> bool:
        """Decide whether a component counts as failing, by the times of all its failures and the same clock's `now`."""
        return self._recent(failures, now) > self.max_restarts

    def pause_before_restart(self, failures: Sequence[float], now: float) -> float:
        """Return the seconds to wait before the restart that follows a failure; see `too_often`."""
        recent = self._recent(failures, now)
        return 0.0 if recent < 2 else min(self.max_pause_s, _doubled(self.pause_s, recent - 2))

    def pause_while_failing(self, tries: int) -> float:
        """Return the seconds to wait before a component that is failing is tried again, after so many tries."""
        return min(self.max_failing_pause_s, _doubled(self.max_pause_s, tries))

    def _recent(self, failures: Sequence[float], now: float) -> int:
        return sum(now - failure < self.window_s for failure in failures)


def _doubled(seconds: float, times: int) -> float:
    """Double so often, but never so often that it overflows."""
    return seconds * 2.0 ** min(times, 64)


class Component(Protocol):
    """Something that is started, watched, ended and started again."""

    @property
    def kind(self) -> str:
        """Name of it for listeners, such as "triton" or "gateway"."""

    @property
    def title(self) -> str:
        """Name of it in messages, such as "the gateway"."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its processes; none while it is not running."""

    @property
    def addresses(self) -> Mapping[str, str]:
        """Addresses that a start may have changed, for listeners; empty where there are none."""

    def start(self, stop: threading.Event) -> None:
        """Start it, and wait until it is ready.

        Raises:
            StartCancelled: `stop` was set meanwhile.
            ServerError: It is not ready in time, or ended; the text says why.
        """

    def check(self) -> HealthIssue | None:
        """Say what is wrong with it, if anything. Called several times a second; does not take long."""

    def stop(self, *, at_once: bool) -> None:
        """End it: `at_once`, or when what is under way has ended. Does nothing if it is not running."""


class Listener(Protocol):
    """Receives the events of a component, such as the record of a deployment."""

    def set_state(self, component: str, state: KeptState, reason: str = "", **changes: Any) -> None:
        """Note a component's state, why it is not ready, and its `addresses` if they may have changed."""

    def count_restart(self, component: str) -> None:
        """Count one more start after a failure."""

    def confirm(self) -> None:
        """Note that the state is still true; called about once a second while the component runs."""


class Keeper(threading.Thread):
    """Starts a component, and keeps it running until it is told to stop."""

    def __init__(
        self,
        component: Component,
        policy: RestartPolicy,
        listeners: Sequence[Listener],
        progress: Progress,
        on_failure: Callable[[], None],
    ) -> None:
        """Prepare a thread; `on_failure` is called when `failure` is set, just before the thread ends."""
        super().__init__(name=component.kind, daemon=True)
        self.component = component
        self.ready = threading.Event()
        self._policy, self._listeners, self._progress = policy, listeners, progress
        self._on_failure = on_failure
        self._stop_keeping = threading.Event()
        # Set together with it, and while another component is to be taken.
        self._interrupt = threading.Event()
        self._next: tuple[Component, Callable[[], None]] | None = None
        self._guard = threading.Lock()
        self._taken = threading.Event()
        # Tries since the component counts as failing.
        self._tries = 0
        self.failure: Exception | None = None

    def stop(self) -> None:
        """End the component, and then the thread; `join` waits for it."""
        with self._guard:
            self._stop_keeping.set()
            self._interrupt.set()

    def exchange(self, component: Component, announce: Callable[[], None]) -> None:
        """Keep another component, which runs already. The one before is left to the caller, unless it was restarted.

        At the moment of the exchange, `announce` publishes what is served now.

        Raises:
            ServerError: This keeper has ended; the component is still the caller's.
        """
        self._taken.clear()
        with self._guard:
            self._next = component, announce
            self._interrupt.set()
        while not self._taken.wait(_POLL_S):
            if not self.is_alive() and not self._taken.is_set():
                raise ServerError(f"{self.component.title} that was to be replaced has been given up")

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
                    # Errors of the machine, too: a full disk or a lack of processes may pass.
                    if not self.ready.is_set():
                        raise
                    fault = str(error) or type(error).__name__
                if fault is None:
                    continue
                failures = [*failures, time.monotonic()][-self._policy.max_restarts - 1 :]
                self._prepare_restart(failures, fault)
            at_once = False
        finally:
            for listener in self._listeners:
                listener.set_state(kind, "draining")
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
        for listener in self._listeners:
            listener.set_state(self.component.kind, "ready", **self.component.addresses)
        self.ready.set()  # last: whoever waits for it finds the record, too
        if again:
            self._progress.say(f"{self.component.title} is ready again")

    def _watch(self) -> str | None:
        """Wait until there is a fault, and return it; None when the component is to stop or to be exchanged."""
        confirmed, last = time.monotonic(), None
        while not self._interrupt.wait(_POLL_S):
            issue = self.component.check()
            if issue is not None and issue.kind == "fault":
                return issue.reason
            if issue != last:
                last = issue
                for listener in self._listeners:
                    if issue is None:
                        listener.set_state(self.component.kind, "ready")
                    else:
                        listener.set_state(self.component.kind, "unready", issue.reason)
            if time.monotonic() - confirmed >= _CONFIRM_S:
                confirmed = time.monotonic()
                for listener in self._listeners:
                    listener.confirm()
        return None

    def _prepare_restart(self, failures: Sequence[float], fault: str) -> None:
        """End the component, and wait before it is started again."""
        kind, title, policy, now = self.component.kind, self.component.title, self._policy, failures[-1]
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
        for listener in self._listeners:
            listener.set_state(kind, "failing" if failing else "restarting", reason)
        self._progress.say(fault)
        self.component.stop(at_once=True)
        if failing and policy.gives_up:
            raise RestartsExhausted(f"gave up on {title}: it {often}; the last time: {fault}")
        if failing and not self._tries:
            self._progress.say(f"{title} {often}: it is tried again from time to time, and all else goes on")
        self._tries += failing
        self._progress.say(f"starting {title} again" + (f" in {pause_s:g} s" if pause_s else ""))
        for listener in self._listeners:
            listener.count_restart(kind)
        self._interrupt.wait(pause_s)
