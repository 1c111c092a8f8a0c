"""What a word on a command line means: a recipe's file, a packaged recipe, or the name of a deployment that runs.

A deployment is known by its name whatever it was served from: a recipe elsewhere with values of its own, one whose file
has changed or gone since, or a package alone. Its recipe is then the one that it is served with.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import Fault, InvalidInput, ServerError

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.store import Store
    from pipeline.triton.running import RunningServer, State

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class NamedDeployment:
    """What a word means.

    Attributes:
        recipe: Of the deployment, with the overrides.
        server: Where it runs; None where it does not.
        words: What names it again on a command line, in any folder.
        as_served: Whether the recipe is that of the server's record, not of a file, which may have changed since.
    """

    recipe: Recipe
    server: RunningServer | None
    words: tuple[str, ...]
    as_served: bool = False


def find_deployment(
    word: str,
    overrides: Sequence[str],
    store: Store,
    *,
    wait_s: float = 0.0,
    states: Collection[State] | None = None,
) -> NamedDeployment:
    """Find out which deployment a word means, and where it runs.

    The name of a running deployment comes before a packaged recipe of the same name; a path is always a recipe's file.

    Args:
        word: Name of a deployment, or file or name of a recipe.
        overrides: Values of `--set`, which replace what the deployment is served with.
        store: Where deployments are announced.
        wait_s: Time to wait until it runs, in seconds.
        states: Of deployments that count as running; None for those that can be asked.

    Returns:
        The recipe that it is served with, and its server.

    Raises:
        InvalidInput: It is no recipe, and no deployment of that name runs; or the recipe has faults.
    """
    from pipeline.recipe import load_recipe
    from pipeline.triton.running import ANSWERING, RunningServer

    wanted = ANSWERING if states is None else states
    deadline = time.monotonic() + wait_s
    while _is_name(word):
        server = RunningServer.find(store.running, word, states=wanted)
        if server is not None:
            sets = (part for one in overrides for part in ("--set", one))
            return NamedDeployment(
                served_recipe(word, server, overrides), server, (word, *sets, *store.words), as_served=True
            )
        # A name that is no recipe may be that of a package which is about to be served.
        if is_recipe(word) or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_S)
    _check(word, store)
    loaded = load_recipe(word, overrides)
    left_s = max(0.0, deadline - time.monotonic())
    server = RunningServer.find(store.running, loaded.name, wait_s=left_s, states=wanted)
    return NamedDeployment(loaded, server, (*loaded.words, *store.words))


def require_server(found: NamedDeployment, store: Store) -> RunningServer:
    """Return where a deployment runs.

    Args:
        found: From `find_deployment`.
        store: Where deployments are announced.

    Raises:
        ServerError: It does not run, or cannot be asked yet; the message says what would help.
    """
    from pipeline.triton.running import SUPERVISED, RunningServer

    if found.server is not None:
        return found.server
    name = found.recipe.name
    record = RunningServer.read(store.running, name)
    if record is not None and record.state in SUPERVISED and record.alive:
        raise ServerError(f"{name} is {record.state}, and cannot be asked now: --wait-s S waits for it")
    state = "is not running" if record is None else "is no longer running"
    command = shlex.join(("pipeline", "serve", *found.words))
    raise ServerError(f"{name} {state}. Start it in another terminal:\n  {command}")


def recipe_of(word: str, overrides: Sequence[str], store: Store) -> Recipe:
    """Load the recipe that a word means, for a command that needs no running server.

    Of a running deployment it is the file as it is now, and where that is gone, what it is served with.

    Args:
        word: File or name of a recipe, or else the name of a running deployment.
        overrides: Values of `--set`.
        store: Where deployments are announced.

    Raises:
        InvalidInput: There is no such recipe and no such deployment; or the recipe has faults.
    """
    from pipeline.recipe import load_recipe
    from pipeline.triton.running import SUPERVISED, RunningServer

    if not is_recipe(word) and _is_name(word):
        server = RunningServer.find(store.running, word, states=SUPERVISED)
        if server is not None:
            return _written_recipe(server, overrides) or served_recipe(word, server, overrides)
    _check(word, store)
    return load_recipe(word, overrides)


def served_recipe(name: str, server: RunningServer, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a deployment is served with.

    Args:
        name: Of the deployment.
        server: Its record.
        overrides: Values of `--set`.

    Raises:
        InvalidInput: The overrides have faults, or the package cannot be read.
    """
    from pipeline.recipe.loading import recipe_of_values

    if server.settings is None:
        return package_recipe(server.deployment.parent, overrides)
    return recipe_of_values(server.settings, overrides, name)


def _written_recipe(server: RunningServer, overrides: Sequence[str]) -> Recipe | None:
    """The recipe that a deployment was served from, with the values that it was given; None if its file is gone."""
    from pipeline.recipe import load_recipe

    if not server.recipe or not is_recipe(server.recipe[0]):
        return None
    return load_recipe(server.recipe[0], (*server.overrides, *overrides))


def package_recipe(package: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return what a package says of its recipe: its name, its limits, and no response cache.

    Args:
        package: Folder of the package.
        overrides: Values of `--set`.

    Raises:
        InvalidInput: The overrides have faults, or the package cannot be read.
    """
    from pipeline.recipe.loading import recipe_of_values
    from pipeline.triton.deployment import Deployment

    deployment = Deployment.load(package)
    limits = deployment.limits.model_dump(
        include={"max_input_tokens", "max_output_tokens", "max_concurrency"}
    )
    source = f"local:{(package / deployment.tokenizer_dir).absolute()}"
    values = {"name": deployment.name, "model": {"source": source}, "limits": limits}
    return recipe_of_values(values, overrides, str(package))


def running_names(root: Path | None) -> list[str]:
    """List the deployments that are announced in a store, by their files' names alone: for completion in a shell.

    Args:
        root: Of the store; None for the default one.
    """
    from pipeline.store import Store

    return sorted(file.stem for file in Store.at(root).running.glob("[!.]*.json"))


def _is_name(word: str) -> bool:
    return "/" not in word and not word.endswith((".yaml", ".yml"))


def is_recipe(word: str) -> bool:
    """Whether a word is the file or the packaged name of a recipe."""
    from pipeline.recipe import find_recipe

    try:
        find_recipe(word)
    except InvalidInput:
        return False
    return True


def _check(word: str, store: Store) -> None:
    """Raise InvalidInput if a word is no recipe, with the deployments that it could have been."""
    from pipeline.recipe import find_recipe

    try:
        find_recipe(word)
    except InvalidInput as error:
        names = running_names(store.root) if _is_name(word) else []
        faults = [
            Fault(one.problem, where=one.where, fix="; ".join((f"running: {', '.join(names)}", one.fix)))
            for one in error.faults
            if names
        ]
        raise InvalidInput(error.subject, faults or error.faults) from None
