"""Keeps deployments running: one Triton for each recipe, and one gateway in front of all, each with a keeper.

Others see the `Announcement` of each deployment, and ask for more by `control.ControlServer`:

    status    the records of all deployments, with the processes of each component
    stop      ends everything, and answers when that is done
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.keeper import Component, Keeper, RestartPolicy
from pipeline.progress import Progress
from pipeline.serving.announcement import Announcement
from pipeline.serving.control import ControlServer, Handler, Say

_POLL_S = 0.2
# Those who asked to stop have their answers within this time.
_ANSWERS_S = 5.0


class Supervisor:
    """The keepers of some deployments and of their gateway, and the requests that others may make of them."""

    def __init__(
        self,
        deployments: Mapping[str, tuple[Component, Announcement]],
        gateway: Component | None,
        policies: Mapping[str, RestartPolicy],
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        """Prepare a supervisor; `run` starts everything, until `stop` is set.

        `deployments` has for each recipe its Triton, and its announcement, which is claimed already. The policy of the
        first recipe's Triton holds for the gateway, too.
        """
        self.announcements = {name: announcement for name, (_, announcement) in deployments.items()}
        self._stop, self._ended = stop, threading.Event()
        self.tritons = {
            name: Keeper(triton, policies[name], [announcement], progress, stop.set)
            for name, (triton, announcement) in deployments.items()
        }
        everywhere = tuple(self.announcements.values())
        first = next(iter(policies.values()))
        self._gateway = None if gateway is None else Keeper(gateway, first, everywhere, progress, stop.set)
        # Called when everything ends, after the gateway and before the rest.
        self.on_end: list[Callable[[], None]] = []
        self.handlers: dict[str, Handler] = {"status": self._status, "stop": self._stop_by_request}

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """All keepers, the gateway's first, as they are to be stopped."""
        return (*(() if self._gateway is None else (self._gateway,)), *self.tritons.values())

    def run(self, on_ready: Callable[[], None], control: ControlServer | None = None) -> None:
        """Run until it is told to stop, or something did not start; then end everything.

        `on_ready` is called when everything is ready for the first time; `control` takes requests meanwhile.

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
            for announcement in self.announcements.values():
                announcement.withdraw("" if failure is None else str(failure))
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
        """End the gateway first: what it has under way needs Triton."""
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
