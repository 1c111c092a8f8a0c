"""What was found, as lines that a person reads: what is there, what is not, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.doctor.hardware import gpus, host
from pipeline.doctor.judging import Found
from pipeline.doctor.report import Check, Section, State
from pipeline.doctor.services import containers, network, serving
from pipeline.machine.locale_clock import Text
from pipeline.machine.packages import Extra, PythonFacts


def sections(found: Found, python: PythonFacts, text: Text) -> tuple[Section, ...]:
    """All of them, in the order of the table."""
    return (
        Section("Python", tuple(_python(python, found.extras, text))),
        Section("GPU", tuple(gpus(found.machine))),
        Section("Machine", tuple(host(found.machine))),
        Section("Containers", tuple(containers(found.machine))),
        Section("Serving", tuple(serving(found.machine, found.server_problem))),
        Section("Network", tuple(network(found.machine))),
    )


def _python(python: PythonFacts, extras: Sequence[Extra], text: Text) -> Iterator[Check]:
    kind = "virtual environment" if python.environment else "no virtual environment"
    yield Check(
        "Python",
        "ok" if python.fits else "missing",
        f"{python.version}, {kind}, {python.executable}",
        "" if python.fits else f"make an environment with Python {python.wanted}",
    )
    for extra in extras:
        yield _extra(extra)
    names = f"files {text.encoding}, output {text.output}, file names {text.file_names}"
    state: State = "ok" if text.is_utf8 else "warning"
    fix = "" if text.is_utf8 else "export PYTHONUTF8=1, or a UTF-8 locale such as LANG=C.UTF-8"
    yield Check("text", state, f"{names}; locale {text.language or 'not set'}", fix)


def _extra(extra: Extra) -> Check:
    name = f"extra {extra.name}" if extra.name else "packages"
    if not extra.lacking:
        return Check(name, "ok", ", ".join(f"{one.name} {one.installed}" for one in extra.packages))
    lacking = [
        f"{one.name}{one.wanted} is missing"
        if one.installed is None
        else f"{one.name} is {one.installed}, not {one.wanted}"
        for one in extra.lacking
    ]
    return Check(name, "missing", ", ".join(lacking), extra.install)
