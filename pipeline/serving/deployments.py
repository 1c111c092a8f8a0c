"""The recipe and the server that a name on a command line stands for.

A name is a recipe's file, a packaged recipe, or a running deployment. A deployment is found by its name whatever it was
served from: a recipe elsewhere with values of its own, one whose file has changed or gone since, or a package alone.
Its recipe is then the one that it is served with.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import Fault, InvalidInput, ServerError

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.recipe import Recipe
    from pipeline.store import Store
    from pipeline.triton.running import RunningServer, State

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class NamedDeployment:
    """A recipe with the overrides applied, and its server, or None if it does not run.

    Attributes:
        argv: Arguments of a command line that name it again, in any folder.
        as_served: Whether the recipe is that of the server's record, not of a file, which may have changed since.
    """

    recipe: Recipe
    server: RunningServer | None
    argv: tuple[str, ...]
    as_served: bool = False

    def require_server(self, store: Store) -> RunningServer:
        """Return the server.

        Raises:
            ServerError: It does not run, or cannot be asked yet; the message says what would help.
        """
        from pipeline.triton.running import SUPERVISED, RunningServer

        if self.server is not None:
            return self.server
        name = self.recipe.name
        record = RunningServer.read(store.running, name)
        if record is not None and record.state in SUPERVISED and record.alive:
            raise ServerError(f"{name} is {record.state}, and cannot be asked now: --wait-s S waits for it")
        state = "is not running" if record is None else "is no longer running"
        command = shlex.join(("pipeline", "serve", *self.argv))
        raise ServerError(f"{name} {state}. Start it in another terminal:\n  {command}")


def find_deployment(
    name: str,
    overrides: Sequence[str],
    store: Store,
    *,
    wait_s: float = 0.0,
    states: Collection[State] | None = None,
) -> NamedDeployment:
    """Find a deployment that runs, or the recipe of one that does not.

    The name of a running deployment comes before a packaged recipe of the same name; a path is always a recipe's file.

    Args:
        wait_s: Time to wait until it runs.
        states: States that count as running; None for those in which it answers.

    Raises:
        InvalidInput: No recipe and no running deployment has that name, or the recipe has faults.
    """
    from pipeline.recipe import load_recipe
    from pipeline.triton.running import ANSWERING, RunningServer

    wanted = ANSWERING if states is None else states
    deadline = time.monotonic() + wait_s
    while not _is_path(name):
        server = RunningServer.find(store.running, name, states=wanted)
        if server is not None:
            sets = (part for override in overrides for part in ("--set", override))
            recipe = served_recipe(name, server, overrides)
            return NamedDeployment(recipe, server, (name, *sets, *store.argv), as_served=True)
        # A name that is no recipe may be that of a package which is about to be served.
        if is_recipe(name) or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    _check_recipe(name, store)
    recipe = load_recipe(name, overrides)
    left_s = max(0.0, deadline - time.monotonic())
    server = RunningServer.find(store.running, recipe.name, wait_s=left_s, states=wanted)
    return NamedDeployment(recipe, server, (*recipe.argv, *store.argv))


def recipe_of(name: str, overrides: Sequence[str], store: Store) -> Recipe:
    """Load a recipe for a command that needs no running server.

    A recipe's file or name comes before the name of a running deployment, whose recipe is its file as it is now, or
    what it is served with if the file is gone. `overrides` are values of `--set`.

    Raises:
        InvalidInput: No recipe and no running deployment has that name, or the recipe has faults.
    """
    from pipeline.recipe import load_recipe
    from pipeline.triton.running import SUPERVISED, RunningServer

    if not is_recipe(name) and not _is_path(name):
        server = RunningServer.find(store.running, name, states=SUPERVISED)
        if server is not None:
            if server.recipe and is_recipe(server.recipe[0]):
                return load_recipe(server.recipe[0], (*server.overrides, *overrides))
            return served_recipe(name, server, overrides)
    _check_recipe(name, store)
    return load_recipe(name, overrides)


def recipe_to_serve(
    name: str | None, overrides: Sequence[str], store: Store, package: Path | None
) -> Recipe | None:
    """Load the recipe of a package that is to be served.

    Args:
        package: Folder of the package, if that is named.

    Returns:
        None for a package alone without overrides.

    Raises:
        InvalidInput: There is no such recipe, or it has faults.
    """
    from pipeline.triton.deployment import package_recipe

    if name is not None:
        return recipe_of(name, overrides, store)
    return package_recipe(package, overrides) if package is not None and overrides else None


def served_recipe(name: str, server: RunningServer, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a running deployment is served with.

    Raises:
        InvalidInput: The overrides have faults, or the package cannot be read.
    """
    from pipeline.recipe.loading import recipe_of_values
    from pipeline.triton.deployment import package_recipe

    if server.settings is None:
        return package_recipe(server.deployment.parent, overrides)
    return recipe_of_values(server.settings, overrides, name)


def announced_names(store: Store) -> list[str]:
    """List the deployments that are announced in a store, by the names of their records alone."""
    return sorted(file.stem for file in store.running.glob("[!.]*.json"))


def is_recipe(name: str) -> bool:
    """Whether a name is the file or the packaged name of a recipe."""
    from pipeline.recipe import find_recipe

    try:
        find_recipe(name)
    except InvalidInput:
        return False
    return True


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _check_recipe(name: str, store: Store) -> None:
    """Raise InvalidInput if a name is no recipe, with the deployments that it could have been."""
    from pipeline.recipe import find_recipe

    try:
        find_recipe(name)
    except InvalidInput as error:
        running = "" if _is_path(name) else ", ".join(announced_names(store))
        faults = [
            Fault(fault.problem, where=fault.where, fix=f"running: {running}; {fault.fix}")
            for fault in error.faults
            if running
        ]
        raise InvalidInput(error.subject, faults or error.faults) from None
