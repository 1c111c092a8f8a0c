"""`pipeline rollout`: exchange the package of a running deployment for another one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.options import allow_option, complete_deployment, json_option, set_option, store_option
from pipeline.cli.output import note, print_json, reporter
from pipeline.errors import ServerError, UserError

if TYPE_CHECKING:
    from pipeline.recipe import Recipe
    from pipeline.store import Store
    from pipeline.triton.running import RunningServer

skip_golden_option = click.option(
    "--skip-golden", is_flag=True, help="Do not ask the package's golden questions."
)
in_place_option = click.option(
    "--in-place",
    is_flag=True,
    help="End the old Triton first, for two that do not fit in memory. Requests wait meanwhile.",
)
drain_option = click.option(
    "--drain-s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="Time for requests that the old package has under way; then they are cut off.",
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Print what would be done, and exit.")


@click.command(name="rollout")
@click.argument("recipe", metavar="NAME|RECIPE", shell_complete=complete_deployment)
@set_option
@store_option
@allow_option
@click.option(
    "--package",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Package to serve; by default the one that the recipe makes as it says now.",
)
@click.option("--build", is_flag=True, help="Build what is missing first, as `pipeline build` does.")
@click.option("--offline", is_flag=True, help="Ask no hub; use what the store has.")
@skip_golden_option
@in_place_option
@drain_option
@dry_run_option
@json_option
def command(
    recipe: str,
    overrides: tuple[str, ...],
    store: Path | None,
    allowed: frozenset[str],
    package: Path | None,
    build: bool,
    offline: bool,
    skip_golden: bool,
    in_place: bool,
    drain_s: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Serve another package of a deployment that runs, without a request that fails.

    The new package is started beside the old one, verified, warmed up, and asked the golden questions of its recipe.
    Then new requests go to it, and the old Triton ends when it has completed its own. If anything fails before, the old
    package stays in service, and the exit code is 1. So it does after Ctrl-C.

    Triton's ports change, except with --in-place: clients go by name, and the gateway keeps its address. Where two do
    not fit in memory, this is refused beforehand.

    Values of --set last: a rollout by NAME applies those that the deployment is served with again, and says so. The
    same key given anew replaces the value, and a rollout by the path of the recipe's file drops them all.

    \b
    pipeline rollout tiny-cpu --build
    pipeline rollout tiny-cpu --set quantization.format=int4_awq --build
    pipeline rollout tiny-cpu --package /models/tiny-cpu-2 --dry-run
    """
    from pipeline.cli.serving import choose_package
    from pipeline.store import Store

    if package is not None and (build or overrides):
        raise click.UsageError("--package takes a package as it is: leave out --build and --set")
    shelf = Store.at(store)
    name, server = find_running(recipe, overrides, shelf)
    words, settings, found = server.recipe, server.settings, None
    if package is not None:
        package = package.resolve()
    else:
        found = next_recipe(recipe, name, server, overrides)
        values = {"package": None, "build": build, "offline": offline, "allowed": allowed}
        chosen = choose_package(
            str(found.provenance.file), found.provenance.overrides, shelf, values, reporter(silent=as_json)
        )
        package, words, settings = chosen.folder, chosen.words, chosen.settings
    exchange(
        "rollout", name, server, package, found, shelf,
        words=words, settings=settings, skip_golden=skip_golden, in_place=in_place, drain_s=drain_s,
        dry_run=dry_run, as_json=as_json,
    )  # fmt: skip


def exchange(
    do: str,
    name: str,
    server: RunningServer,
    package: Path,
    recipe: Recipe | None,
    store: Store,
    *,
    words: tuple[str, ...],
    settings: Mapping[str, Any] | None = None,
    skip_golden: bool,
    in_place: bool,
    drain_s: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Check that a package fits beside what is served, and ask the supervisor to exchange it.

    Args:
        do: "rollout" or "rollback".
        name: of the deployment.
        server: its record.
        package: to serve.
        recipe: it was made from; None if that is not known.
        store: of artifacts.
        words: of a command line that name the recipe and its store.
        settings: values of the recipe; None for those that it is served with.
        skip_golden: ask no golden questions.
        in_place: end the old one first.
        drain_s: time for requests under way.
        dry_run: print what would be done.
        as_json: print one JSON object.

    Raises:
        UserError: two do not fit in memory, or the supervisor refuses.
        ServerError: the exchange failed; the old package is served.
    """
    from pipeline.golden import GoldenSet
    from pipeline.prepare.second_server import memory_beside
    from pipeline.serving.control import ask

    golden = GoldenSet.load(package)
    beside = None if in_place else memory_beside(package, recipe, store)
    if beside is not None and not beside.fits:
        raise UserError(
            f"{name}: a second server does not fit beside the first: {beside}\n"
            "give --in-place to end the old one first: requests then wait until the new one is ready"
        )
    if dry_run:
        shown: dict[str, Any] = {
            "name": name,
            "from": str(server.deployment.parent),
            "to": str(package),
            "recipe": shlex.join(words) or None,
            "in_place": in_place,
            "memory": None if beside is None else str(beside),
            "golden_questions": len(golden.questions) if golden and not skip_golden else 0,
        }
        if as_json:
            print_json(shown)
        else:
            click.echo("\n".join(f"{key}: {value}" for key, value in shown.items()))
        return
    if server.control is None:
        raise UserError(f"{name}: its server takes no commands; stop it, and serve the other package")
    request: dict[str, Any] = {
        "name": name,
        "golden": not skip_golden,
        "in_place": in_place,
        "drain_s": drain_s,
    }
    if do == "rollout":
        request |= {"package": str(package), "recipe": list(words), "settings": settings}
    try:
        result = ask(server.control, do, on_progress=note, **request)
    except KeyboardInterrupt:
        note("cancelling the rollout")
        left = ask(server.control, "cancel_rollout", name=name)
        note(f"{name} is served from {left['package']}")
        raise click.exceptions.Exit(130) from None
    if as_json:
        print_json(result)


def find_running(word: str, overrides: Sequence[str], store: Store) -> tuple[str, RunningServer]:
    """Find a deployment that runs, and return its name and its record.

    Args:
        word: name of the deployment, or name or file of its recipe.
        overrides: values of `--set`, which may name it.
        store: where it is announced.

    Raises:
        InvalidInput: there is no such recipe, or it has faults.
        ServerError: it does not run.
    """
    from pipeline.recipe import load_recipe
    from pipeline.triton.running import SUPERVISED, RunningServer

    server = None if "/" in word else RunningServer.find(store.running, word, states=SUPERVISED)
    if server is not None:
        return word, server
    recipe = load_recipe(word, overrides)
    server = RunningServer.find(store.running, recipe.name, states=SUPERVISED)
    if server is None:
        serve = shlex.join(("pipeline", "serve", *recipe.words, *store.words))
        raise ServerError(f"{recipe.name} is not running, so there is nothing to exchange; {serve}")
    return recipe.name, server


def next_recipe(word: str, name: str, server: RunningServer, overrides: Sequence[str]) -> Recipe:
    """Return the recipe that the next package of a deployment is made from, and say what of `--set` is kept.

    Args:
        word: name of the deployment, or name or file of its recipe.
        name: of the deployment.
        server: its record.
        overrides: values of `--set`: by its name, besides those that it is served with.

    Raises:
        InvalidInput: the recipe has faults.
        UsageError: it was served from a package alone.
    """
    from pipeline.recipe import find_recipe, load_recipe

    kept: list[str] = []
    if word == name:
        if not server.recipe:
            raise click.UsageError(f"{name} was served from a package alone: name a RECIPE, or --package")
        kept, word = _kept(server.overrides, overrides), server.recipe[0]
    dropped = [one for one in server.overrides if one not in (*kept, *overrides)]
    if kept:
        note(f"applied again: {_sets(kept)}")
        note(f"to drop them: pipeline rollout {shlex.quote(str(find_recipe(word).absolute()))}")
    if dropped:
        note(f"no longer applied: {_sets(dropped)}")
    return load_recipe(word, (*kept, *overrides))


def _sets(overrides: Sequence[str]) -> str:
    return shlex.join(word for one in overrides for word in ("--set", one))


def _kept(earlier: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Return the earlier values of `--set` that no new one replaces.

    >>> _kept(["limits.max_concurrency=4", "draft=null"], ["limits={max_concurrency: 8}"])
    ['draft=null']
    """
    given = [override.partition("=")[0].strip() for override in overrides]

    def replaced(override: str) -> bool:
        key = override.partition("=")[0].strip()
        return any(key == one or key.startswith(f"{one}.") for one in given)

    return [override for override in earlier if not replaced(override)]
