"""Ask a supervisor to exchange the package of a deployment: the other side of `rollout`."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ServerError, UserError
from pipeline.golden import GoldenSet
from pipeline.prepare.second_server import memory_beside
from pipeline.recipe import SERVED_SECTIONS, Recipe, find_recipe, load_recipe
from pipeline.serving.control import ask
from pipeline.serving.settings import ExchangeSettings
from pipeline.store import Store
from pipeline.triton.running import SUPERVISED, RunningServer

_STARTED = SERVED_SECTIONS - {"cache"}


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange that is to be asked for.

    Attributes:
        recipe: Recipe that the package was made from; None if that is not known.
        argv: Arguments of a command line that name the recipe and its store.
        values: All values of the recipe; None for those that it is served with.
        back: Whether it is the package that was served before.
    """

    name: str
    server: RunningServer
    package: Path
    way: ExchangeSettings
    recipe: Recipe | None = None
    argv: tuple[str, ...] = ()
    values: Mapping[str, Any] | None = None
    back: bool = False

    def check_memory(self, store: Store) -> str | None:
        """Check that the package fits beside the package that is served, and return the figures of memory for a reader.

        None where the old Triton ends first.

        Raises:
            UserError: Two do not fit in memory.
        """
        if self.way.in_place:
            return None
        beside = memory_beside(self.package, self.recipe, store)
        if not beside.fits:
            raise UserError(
                f"{self.name}: a second server does not fit beside the first: {beside}\n"
                "give --in-place to end the old one first: requests then wait until the new one is ready"
            )
        return str(beside)

    def preview(self, memory: str | None) -> dict[str, Any]:
        """Describe what would be done; `memory` is what `check_memory` returned."""
        golden = GoldenSet.load(self.package)
        return {
            "name": self.name,
            "from": str(self.server.deployment.parent),
            "to": str(self.package),
            "recipe": shlex.join(self.argv) or None,
            "in_place": self.way.in_place,
            "memory": memory,
            "golden_questions": len(golden.questions) if golden and not self.way.skip_golden else 0,
        }

    def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Have it done, and wait. `say` gets each line of progress.

        Raises:
            UserError: The supervisor refuses.
            ServerError: The exchange failed; the old package is served.
        """
        if self.server.control is None:
            raise UserError(
                f"{self.name}: its server takes no commands; stop it, and serve the other package"
            )
        request: dict[str, Any] = {
            "name": self.name,
            "golden": not self.way.skip_golden,
            "in_place": self.way.in_place,
            "drain_s": self.way.drain_s,
        }
        if not self.back:
            request |= {"package": str(self.package), "recipe": list(self.argv), "settings": self.values}
        return ask(self.server.control, "rollback" if self.back else "rollout", on_progress=say, **request)

    def cancel(self) -> str:
        """Cancel the exchange. Returns the package that is served."""
        assert self.server.control is not None, "it was asked for"
        return str(ask(self.server.control, "cancel_rollout", name=self.name)["package"])


def find_running(name: str, overrides: Sequence[str], store: Store) -> tuple[str, RunningServer]:
    """Find a deployment that runs by its name or its recipe, and return its name and its record.

    Raises:
        InvalidInput: There is no such recipe, or it has faults.
        ServerError: It does not run.
    """
    server = None if "/" in name else RunningServer.find(store.running, name, states=SUPERVISED)
    if server is not None:
        return name, server
    recipe = load_recipe(name, overrides)
    server = RunningServer.find(store.running, recipe.name, states=SUPERVISED)
    if server is None:
        serve = shlex.join(("pipeline", "serve", *recipe.argv, *store.argv))
        raise ServerError(f"{recipe.name} is not running, so there is nothing to exchange; {serve}")
    return recipe.name, server


def next_recipe(
    source: str, name: str, server: RunningServer, overrides: Sequence[str], say: Callable[[str], None]
) -> Recipe:
    """Return the recipe that the next package of a deployment is made from, and say which values of `--set` are kept.

    Args:
        source: Name of the deployment, or name or file of its recipe. By the name of the deployment, values that it is
            served with are kept.

    Raises:
        InvalidInput: The recipe has faults.
        UserError: It was served from a package alone.
    """
    kept: list[str] = []
    if source == name:
        if not server.recipe:
            raise UserError(f"{name} was served from a package alone: name a RECIPE, or --package")
        kept, source = _kept(server.overrides, overrides), server.recipe[0]
    dropped = [override for override in server.overrides if override not in (*kept, *overrides)]
    if later := [override for override in overrides if _is_of_start(override)]:
        say(f"applied at the next start: {_sets(later)}")
    again, dropped = (
        [override for override in group if not _is_of_start(override)] for group in (kept, dropped)
    )
    if again:
        say(f"applied again: {_sets(again)}")
        say(f"to drop them: pipeline rollout {shlex.quote(str(find_recipe(source).absolute()))}")
    if dropped:
        say(f"no longer applied: {_sets(dropped)}")
    return load_recipe(source, (*kept, *overrides))


def _is_of_start(override: str) -> bool:
    """Whether a value of `--set` is in a section that programs read when they start, and no package depends on."""
    return override.partition("=")[0].partition(".")[0].strip() in _STARTED


def _sets(overrides: Sequence[str]) -> str:
    return shlex.join(part for override in overrides for part in ("--set", override))


def _kept(earlier: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the earlier values of `--set` that no new one replaces.

    >>> _kept(["limits.max_concurrency=4", "draft=null"], ["limits={max_concurrency: 8}"])
    ['draft=null']
    """
    keys = [override.partition("=")[0].strip() for override in overrides]

    def replaced(override: str) -> bool:
        earlier_key = override.partition("=")[0].strip()
        return any(earlier_key == key or earlier_key.startswith(f"{key}.") for key in keys)

    return [override for override in earlier if not replaced(override)]
