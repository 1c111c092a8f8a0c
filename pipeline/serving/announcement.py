"""The record of a deployment as its supervisor holds it: locked, and rewritten whenever something changes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import StoreError, UserError
from pipeline.progress import Progress
from pipeline.serving.health import Ready
from pipeline.store import lock
from pipeline.triton.running import RunningServer, State


class Announcement:
    """Publishes the state of one deployment. Thread-safe.

    The state of the deployment is that of Triton, unless that is ready and the gateway is not.
    """

    def __init__(
        self,
        folder: Path | None,
        name: str,
        record: RunningServer,
        components: Sequence[str],
        *,
        ready_file: Path | None = None,
        entry_model: str = "",
    ) -> None:
        """Prepare an announcement; `claim` makes it.

        Args:
            folder: Folder of records; None announces nowhere.
            components: "triton", and "gateway" if there is a gateway. They are starting.
            ready_file: File that is there, and new, while the deployment is ready; see `pipeline.serving.health`.
            entry_model: Model that clients ask, for that file.
        """
        self.name = name
        self._folder, self._ready_file, self._entry_model = folder, ready_file, entry_model
        self._record = record
        self._states: dict[str, tuple[State, str]] = dict.fromkeys(components, ("starting", ""))
        self._guard = threading.RLock()
        self._lock: lock.Lock | None = None
        # Whether the published record is older than this one: the disk was full.
        self._stale = False
        self._say: Callable[[str], None] = lambda _: None

    @property
    def record(self) -> RunningServer:
        """Record as it is now."""
        return self._record

    def claim(self, progress: Progress, *, needed: bool = False) -> None:
        """Make sure that no other supervisor serves the recipe, and publish the record.

        Where the folder cannot be written, as in a store that is only read, the deployment is served all the same.

        Args:
            needed: Whether somebody depends on the record: a gateway finds Triton by it.

        Raises:
            UserError: The recipe is served already; or the record cannot be written, and is needed.
        """
        self._say = progress.say
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock.exclusive(self._folder / f"{self.name}.lock")
            if self._lock is not None:
                self._record.write(self._folder, self.name)
        except (OSError, StoreError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            if needed:
                raise UserError(
                    f"{self._folder} cannot be written ({why}), and the gateway finds Triton by what lies there: "
                    "name another --store, or serve Triton alone with --no-gateway"
                ) from error
            progress.say(
                f"{self._folder} cannot be written ({why}): clients find this server by its --url only"
            )
            self._folder = None
            return
        if self._lock is None:
            other = RunningServer.read(self._folder, self.name)
            by = "" if other is None else f" by process {other.pid} at {other.grpc_url}"
            # It is the other's.
            self._folder = None
            second = "or name another --store for a second one"
            raise UserError(f"{self.name} is served already{by}; stop that first, {second}")

    def set_state(self, component: str, state: State, reason: str = "", **changes: Any) -> None:
        """Set the state of a component, and so that of the deployment, with other fields that change with it."""
        with self._guard:
            self._states[component] = (state, reason)
            combined, why = self._combined()
            components = {name: component_state for name, (component_state, _) in self._states.items()}
            self.update(state=combined, reason=why, components=components, **changes)

    def count_restart(self, component: str) -> None:
        """Count one more restart of a component."""
        with self._guard:
            restarts = dict(self._record.restarts)
            self.update(restarts={**restarts, component: restarts.get(component, 0) + 1})

    def update(self, **changes: Any) -> None:
        """Change fields of the record, such as `deployment` and addresses after an exchange."""
        with self._guard:
            changed = replace(self._record, **changes)
            if changed == self._record:
                return
            self._record = changed
            self._publish()
            self.confirm()

    def exchange(self, entry_model: str, **changes: Any) -> None:
        """Publish another Triton, which is ready: the fields of the record that it changes."""
        with self._guard:
            self._entry_model = entry_model
            # In this order: a gateway that follows the record goes to the new addresses when they are ready.
            self.update(**changes)
            self.set_state("triton", "ready")

    def confirm(self) -> None:
        """Renew the ready file, which counts as stale when it is old; to be called about once a second."""
        with self._guard:
            if self._stale:
                self._publish()
            if self._ready_file is None:
                return
            if self._record.state == "ready":
                with contextlib.suppress(OSError):
                    # A full disk: the file is too old soon, and then not believed.
                    ready = Ready(self._record.grpc_url, self._entry_model, time.monotonic())
                    ready.write(self._ready_file)
            else:
                self._ready_file.unlink(missing_ok=True)

    def withdraw(self, failure: str = "") -> None:
        """End the announcement. Where the supervisor gave up, the record stays and has the `failure`."""
        with self._guard:
            if failure:
                self.update(state="failed", reason=failure, control=None)
            elif self._folder is not None:
                with contextlib.suppress(OSError):
                    self._remove(self._folder)
            if self._ready_file is not None:
                self._ready_file.unlink(missing_ok=True)
            if self._lock is not None:
                self._lock.release()
                self._lock = None
            self._folder = self._ready_file = None

    def _remove(self, folder: Path) -> None:
        published = RunningServer.read(folder, self.name) if self._stale else self._record
        # A record that could not be brought up to date is this supervisor's all the same, which holds the lock.
        if published is not None:
            published.remove(folder, self.name)

    def _publish(self) -> None:
        """Write the record. A disk that is full ends no deployment: it is tried again with each `confirm`."""
        if self._folder is None:
            return
        try:
            self._record.write(self._folder, self.name)
            self._stale = False
        except OSError as error:
            if not self._stale:
                self._say(
                    f"{self._folder} cannot be written ({error.strerror}): what clients find there is old"
                )
            self._stale = True

    def _combined(self) -> tuple[State, str]:
        triton, reason = self._states["triton"]
        gateway, why = self._states.get("gateway", ("ready", ""))
        if triton != "ready":
            return triton, reason
        if gateway in ("ready", "starting", "draining"):
            return gateway, why
        return "unready", why
