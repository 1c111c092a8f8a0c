"""Look at the machine and judge recipes, all within one deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipeline.deploy.doctor.judging import Found, judge, unreadable
from pipeline.deploy.doctor.needs import hub_repositories
from pipeline.deploy.doctor.report import SCHEMA, Report, Verdict
from pipeline.deploy.doctor.sections import sections
from pipeline.errors import InvalidInput, UserError
from pipeline.machine.asking import Late, at_once
from pipeline.machine.inventory import DEADLINE_S, take
from pipeline.machine.packages import read_extras, read_python, version_of
from pipeline.machine.surroundings import now, read_text
from pipeline.recipe import Recipe, load_recipe, packaged
from pipeline.store import Store
from pipeline.triton.installation import WHEEL, Installation

TRITON_PORTS, GATEWAY_PORT = (8000, 8001, 8002), 8080
_GRACE_S = 0.2  # beside the probes' own deadline, so that what the others said is heard


def examine(names: Sequence[str], store: Store, *, deadline_s: float = DEADLINE_S) -> Report:
    """The whole report. Judging the recipes adds some tenths of a second to the deadline.

    `names`: recipes to judge; empty for all packaged ones.

    Raises:
        UserError: there is no recipe of such a name.
    """
    start = time.monotonic()
    recipes = {name: _load(name) for name in names or packaged()}
    repositories = {
        repo: revision
        for recipe in recipes.values()
        if isinstance(recipe, Recipe)
        for repo, revision in hub_repositories(recipe).items()
    }
    look = partial(
        take,
        store.root,
        ports=(*TRITON_PORTS, GATEWAY_PORT),
        repositories=repositories.items(),
        deadline_s=deadline_s,
    )
    probes: dict[str, Callable[[], Any]] = {
        "machine": look,
        "server": partial(_server_problem, deadline_s),
        "in_store": partial(_in_store, store),
    }
    answers = at_once(probes, deadline_s + _GRACE_S)
    server, in_store = answers["server"], answers["in_store"]
    found = Found(
        machine=answers["machine"],
        extras=read_extras(),
        server_problem=server.reason if isinstance(server, Late) else server,
        in_store={} if isinstance(in_store, Late) else in_store,
    )
    python, text = read_python(), read_text()
    verdicts = tuple(_judge(name, recipe, found) for name, recipe in recipes.items())
    wanted = all if names else any
    return Report(
        schema=SCHEMA,
        time=now(),
        seconds=round(time.monotonic() - start, 3),
        runnable=wanted(verdict.runnable for verdict in verdicts),
        sections=sections(found, python, text),
        recipes=verdicts,
        python=python,
        extras=found.extras,
        text=text,
        server=None if found.server_problem else version_of(WHEEL),
        machine=found.machine,
    )


def _load(name: str) -> Recipe | InvalidInput:
    try:
        return load_recipe(name)
    except InvalidInput as error:
        return error


def _judge(name: str, recipe: Recipe | InvalidInput, found: Found) -> Verdict:
    return judge(name, recipe, found) if isinstance(recipe, Recipe) else unreadable(name, recipe)


def _server_problem(deadline_s: float) -> str:
    """Why the embedded Triton cannot run; empty if it can."""
    try:
        Installation.find(deadline_s)
    except UserError as error:
        return str(error)
    return ""


def _in_store(store: Store) -> dict[str, int]:
    """Repositories of the hub of which the store has a checkpoint -> its bytes. Damaged artifacts do not count."""
    made = (artifact.manifest for artifact in store.scan()[0])
    sources = {str(one.settings.get("source", "")): one.total_bytes for one in made if one.stage == "fetch"}
    return {source.removeprefix("hf:"): size for source, size in sources.items() if source.startswith("hf:")}
