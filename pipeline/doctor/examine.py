"""Look at the machine and judge recipes, all within one deadline."""

from __future__ import annotations

import locale
import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from pipeline.doctor.report import SCHEMA, Report, Text
from pipeline.doctor.sections import sections
from pipeline.doctor.verdicts import DoctorFacts, judge, unreadable
from pipeline.errors import InvalidInput, UserError
from pipeline.machine.inventory import DEADLINE_S, MARGIN, Inventory, take
from pipeline.machine.packages import read_extras, read_python, version_of
from pipeline.machine.probe import ProbeTimeout, begin
from pipeline.plan.preflight import findings
from pipeline.prepare.facts import hub_files
from pipeline.recipe import Recipe, load_recipe, packaged
from pipeline.serving.launch_embedded import WHEEL, Installation
from pipeline.store import Store

TRITON_PORTS, GATEWAY_PORT = (8000, 8001, 8002), 8080
_GRACE_S = 60.0  # beside the inventory's own deadline, which it keeps


def examine(names: Sequence[str], store: Store, *, deadline_s: float = DEADLINE_S) -> Report:
    """The whole report. Judging the recipes adds some tenths of a second to the deadline.

    Args:
        names: recipes to judge; empty for all packaged ones.
        deadline_s: seconds for looking at the machine; what is late is reported as such.

    Raises:
        UserError: there is no recipe of such a name.
    """
    start = time.monotonic()
    recipes = {name: _load(name) for name in names or packaged()}
    files = [file for recipe in recipes.values() if isinstance(recipe, Recipe) for file in hub_files(recipe)]
    look = partial(
        take,
        store.root,
        ports=(*TRITON_PORTS, GATEWAY_PORT),
        hub_files=files,
        deadline_s=deadline_s,
    )
    looking = begin({"machine": look}, deadline_s + _GRACE_S)
    others = begin(
        {"server": partial(_server_problem, deadline_s * MARGIN), "in_store": partial(_in_store, store)},
        deadline_s,
    )
    recipe_findings = {
        name: findings(recipe) for name, recipe in recipes.items() if isinstance(recipe, Recipe)
    }
    machine, (server, in_store) = looking()["machine"], others().values()
    assert isinstance(machine, Inventory), "it keeps its own deadline, which is earlier"
    facts = DoctorFacts(
        machine=machine,
        extras=read_extras(),
        server_problem=server.reason if isinstance(server, ProbeTimeout) else server,
        in_store={} if isinstance(in_store, ProbeTimeout) else in_store,
    )
    python, text = read_python(), read_text()
    verdicts = tuple(
        judge(name, recipe, recipe_findings[name], facts)
        if isinstance(recipe, Recipe)
        else unreadable(name, recipe)
        for name, recipe in recipes.items()
    )
    wanted = all if names else any
    return Report(
        schema=SCHEMA,
        time=now(),
        seconds=round(time.monotonic() - start, 3),
        runnable=wanted(verdict.runnable for verdict in verdicts),
        sections=sections(facts, python, text),
        recipes=verdicts,
        python=python,
        extras=facts.extras,
        text=text,
        server=None if facts.server_problem else version_of(WHEEL),
        machine=facts.machine,
    )


def _load(name: str) -> Recipe | InvalidInput:
    try:
        return load_recipe(name)
    except InvalidInput as error:
        return error


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
    sources = {
        str(artifact.settings.get("source", "")): artifact.total_bytes
        for artifact in made
        if artifact.stage == "fetch"
    }
    return {source.removeprefix("hf:"): size for source, size in sources.items() if source.startswith("hf:")}


def read_text(environment: Mapping[str, str] = os.environ) -> Text:
    """Encodings and locale of this process."""
    language = next(
        (value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := environment.get(name))), ""
    )
    output = getattr(sys.stdout, "encoding", None) or locale.getpreferredencoding(False)
    return Text(locale.getpreferredencoding(False), output, sys.getfilesystemencoding(), language)


def now() -> str:
    """The time as this machine has it, in ISO 8601 and UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
