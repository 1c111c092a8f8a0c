"""What a word on a command line means: a recipe's file, a packaged recipe, or the name of a deployment that runs.

A deployment is known by its name whatever it was served from: a recipe elsewhere with values of its own, a recipe whose
file has changed or gone, or a package alone. Its recipe is then the one that it is served with.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import Fault, InvalidInput, UserError

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.store import Store
    from pipeline.triton.running import RunningServer, State

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class NamedDeployment:
    """What a word means.

    Attributes:
        name: Of the deployment.
        recipe: Its recipe; None for one that is served from a package alone.
        server: Where it runs; None where it does not.
        words: What names it again on a command line, in any folder.
    """

    name: str
    recipe: Recipe | None
    server: RunningServer | None
    words: tuple[str, ...]


def find_deployment(
    word: str,
    overrides: Sequence[str],
    store: Store,
    *,
    wait_s: float = 0.0,
    states: Collection[State] | None = None,
) -> NamedDeployment:
    """Find out what a word means, and where that runs.

    A name of a running deployment comes before a packaged recipe of the same name; a path is always a recipe's file.

    Args:
        word: File or name of a recipe, or name of a deployment.
        overrides: Values of `--set`, which replace what the deployment is served with.
        store: Where deployments are announced.
        wait_s: Time to wait until it runs, in seconds.
        states: Of deployments that count as running; None for those that can be asked.

    Raises:
        InvalidInput: It is no recipe, and no deployment of that name runs; or the recipe has faults.
    """
    from pipeline.triton.running import ANSWERING, RunningServer

    wanted = ANSWERING if states is None else states
    deadline = time.monotonic() + wait_s
    is_name = "/" not in word and not word.endswith((".yaml", ".yml"))
    while True:
        server = RunningServer.find(store.running, word, states=wanted) if is_name else None
        if server is not None:
            return NamedDeployment(
                word, served_recipe(word, server, overrides), server, (word, *_sets(overrides), *store.words)
            )
        try:
            loaded = _load(word, overrides, store)
        except InvalidInput:
            # A name that is nothing yet may be that of a package which is about to be served.
            if not is_name or time.monotonic() >= deadline or Path(word).exists():
                raise
            time.sleep(_POLL_S)
            continue
        left_s = max(0.0, deadline - time.monotonic())
        server = RunningServer.find(store.running, loaded.name, wait_s=left_s, states=wanted)
        return NamedDeployment(loaded.name, loaded, server, (*loaded.words, *store.words))


def recipe_of(word: str, overrides: Sequence[str], store: Store) -> Recipe:
    """Load the recipe that a word means, of a running deployment the one that it is served with.

    Args:
        word: File or name of a recipe, or name of a deployment.
        overrides: Values of `--set`.
        store: Where deployments are announced.

    Raises:
        InvalidInput: There is no such recipe and no such deployment; or the recipe has faults.
        UserError: The deployment is served from a package alone.
    """
    from pipeline.triton.running import SUPERVISED

    found = find_deployment(word, overrides, store, states=SUPERVISED)
    if found.recipe is None:
        raise UserError(f"{word} is served from a package alone, whose recipe is not known; name the recipe's file")
    return found.recipe


def served_recipe(name: str, server: RunningServer, overrides: Sequence[str] = ()) -> Recipe | None:
    """Return the recipe that a deployment is served with, None if that is not known.

    Args:
        name: Of the deployment.
        server: Its record.
        overrides: Values of `--set`.

    Raises:
        InvalidInput: The overrides have faults.
    """
    from pipeline.recipe.loading import recipe_of_values

    if server.settings is None:
        return None
    return recipe_of_values(server.settings, overrides, name)


def running_names(root: Path | None) -> list[str]:
    """Names of the deployments that are announced in a store, for completion in a shell: their files are not opened.

    Args:
        root: Of the store; None for the default one.
    """
    from pipeline.store import Store

    return sorted(file.stem for file in Store.at(root).running.glob("[!.]*.json"))


def _load(word: str, overrides: Sequence[str], store: Store) -> Recipe:
    from pipeline.recipe import load_recipe

    try:
        return load_recipe(word, overrides)
    except InvalidInput as error:
        names = running_names(store.root)
        # Of a word that is nothing, `find_recipe` says so in one fault without a line.
        if not names or len(error.faults) != 1 or error.faults[0].where != word or error.faults[0].line:
            raise
        fault = error.faults[0]
        fix = f"{fault.fix}; running: {', '.join(names)}" if fault.fix else f"running: {', '.join(names)}"
        raise InvalidInput(error.subject, [Fault(fault.problem, where=fault.where, fix=fix)]) from None


def _sets(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for one in overrides for part in ("--set", one))
