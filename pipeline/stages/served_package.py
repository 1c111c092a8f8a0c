"""Choose the package to serve: the one that a recipe makes, built first where that is wanted, or a folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import UserError
from pipeline.machine.packages import Need, require
from pipeline.plan.settings import PackageSettings
from pipeline.prepare import prepare
from pipeline.progress import Progress
from pipeline.recipe import Recipe
from pipeline.stages.builder import Builder, preview_deployment
from pipeline.store import Store
from pipeline.triton.deployment import Deployment, package_recipe


@dataclass(frozen=True, slots=True)
class ChosenPackage:
    """A package that is to be served.

    Attributes:
        folder: Folder of the package, which may not be there yet.
        deployment: Content of its deployment.json, as it is or will be.
        recipe: Its recipe; None where only the package is known.
        argv: Arguments of a command line that find the recipe in this store again; empty without a recipe.
        built: Whether it is there.
        note: Work to be done before it can be run; empty if it is there.
    """

    folder: Path
    deployment: Deployment
    recipe: Recipe | None = None
    argv: tuple[str, ...] = ()
    built: bool = True
    note: str = ""

    @property
    def served_recipe(self) -> Recipe:
        """Recipe that it is served with; for a package alone, the one that it amounts to."""
        return self.recipe or package_recipe(self.folder)

    @property
    def settings(self) -> Mapping[str, Any] | None:
        """All values of the recipe, as the record of a running deployment keeps them."""
        # Golden questions are a file of the recipe's; the package has its own copy of them.
        return None if self.recipe is None else self.recipe.model_dump(mode="json", exclude={"golden"})


def choose_package(
    recipe: Recipe | None, store: Store, wanted: PackageSettings, progress: Progress, *, preview: bool = False
) -> ChosenPackage:
    """Find the package of a recipe in the store, built first if that is wanted; or take a folder.

    Args:
        recipe: Recipe of the package; None for a folder alone.
        preview: Foresee the package of a recipe that is not built, instead of refusing it.

    Raises:
        UserError: The package is not built, or is not the recipe's.
        GateFailed: Its figures are over the recipe's budgets.
    """
    known = recipe is not None and recipe.provenance.file is not None
    argv = (*recipe.argv, *store.argv) if recipe is not None and known else ()
    if wanted.package is not None:
        deployment = Deployment.load(wanted.package)
        if recipe is not None and deployment.name != recipe.name:
            raise UserError(f"{wanted.package} is the package of {deployment.name}, not of {recipe.name}")
        return ChosenPackage(wanted.package, deployment, recipe, argv)
    assert recipe is not None, "the caller asked for one"
    if preview:
        previewed = preview_deployment(recipe, store, progress=progress, allowed=wanted.allowed)
        if previewed.deployment is None:
            return ChosenPackage(previewed.package, Deployment.load(previewed.package), recipe, argv)
        allowing = (part for rule in sorted(wanted.allowed) for part in ("--allow", rule))
        lines = [f"Before: {shlex.join(('pipeline', 'build', *recipe.build_argv, *store.argv, *allowing))}"]
        lines += [f"Where the package will be is not known: {previewed.note}"] if previewed.note else []
        return ChosenPackage(
            previewed.package, previewed.deployment, recipe, argv, built=False, note="\n".join(lines)
        )
    prepared = prepare(recipe, store, progress=progress, allowed=wanted.allowed)
    builder = Builder(prepared, store, progress)
    serving = [Need(extra, "serve") for extra in ("cpu", "server")] if recipe.runtime.kind == "cpu" else []
    if wanted.build:
        prepared.check(store, afterwards=serving)
    package = builder.run() if wanted.build else builder.finished()
    require(recipe.name, serving)
    return ChosenPackage(package.path, Deployment.load(package.path), recipe, argv)
