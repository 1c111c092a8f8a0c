"""Python, and the distributions of each extra: which version is wanted, which is installed, what would install it."""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pipeline import resources
from pipeline.errors import UserError
from pipeline.extras import DISTRIBUTION, install_line

# Extras that only name others, or are for those who work on the project itself.
_LEFT_OUT = ("all", "dev", "test")


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """The interpreter that runs this."""

    version: str
    wanted: str  # ">=3.11,<3.13"
    fits: bool
    executable: str
    environment: bool  # a virtual environment


@dataclass(frozen=True, slots=True)
class Package:
    """One distribution."""

    name: str
    wanted: str  # "==2.13.0"; "" for any
    installed: str | None
    # The only ones that it can be installed on, if this is none of them: ("3.11", "3.12").
    pythons: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it is there in a version that is wanted; local versions (2.13.0+cpu) are theirs."""
        return self.installed is not None and SpecifierSet(self.wanted).contains(
            self.installed, prereleases=True
        )


@dataclass(frozen=True, slots=True)
class Extra:
    """Distributions that one part of the product needs; the extra "" has those that every part needs."""

    name: str
    packages: tuple[Package, ...]

    @property
    def lacking(self) -> tuple[Package, ...]:
        """Distributions that are missing, or of another version."""
        return tuple(package for package in self.packages if not package.fits)

    @property
    def install(self) -> str:
        """The line that installs it, or the Python that it needs."""
        if pythons := next((package.pythons for package in self.lacking if package.pythons), ()):
            return f"make an environment with Python {' or '.join(pythons)}"
        return install_line(*([self.name] if self.name else []))


def read_python() -> PythonFacts:
    """This interpreter."""
    version, wanted = platform.python_version(), _wanted().python
    return PythonFacts(
        version=version,
        wanted=wanted,
        fits=SpecifierSet(wanted).contains(version, prereleases=True),
        executable=sys.executable,
        environment=sys.prefix != sys.base_prefix,
    )


def read_extras() -> tuple[Extra, ...]:
    """All extras, and first what needs none; the versions are of this Python's environment."""
    return tuple(
        Extra(name, tuple(_package(name, requirement) for requirement in wanted))
        for name, wanted in _wanted().extras.items()
    )


@dataclass(frozen=True, slots=True)
class Need:
    """Distributions of an extra that one piece of work imports."""

    extra: str
    purpose: str  # "calibrate.target": what needs it
    packages: frozenset[str] | None = None  # names of distributions; None: all of the extra


def require(subject: str, needs: Iterable[Need]) -> None:
    """Check that what some work imports is installed, in any version; `subject` begins the error's text.

    Raises:
        UserError: Something is not installed; the text names every extra, and the one line that installs them.
    """
    needs = tuple(needs)
    if text := wrong_python(needs):
        raise UserError(f"{subject} {text}")
    if text := missing_text(needs):
        raise UserError(f"{subject} needs distributions that are not installed here:\n{text}")


def wrong_python(needs: Iterable[Need]) -> str:
    """Name a need that cannot be installed on this Python, in one line; empty if all can."""
    needs = tuple(needs)
    extras = {extra.name: extra for extra in read_extras()} if needs else {}
    for need in needs:
        for package in extras[need.extra].lacking:
            if package.pythons and (need.packages is None or package.name in need.packages):
                running = ".".join(platform.python_version_tuple()[:2])
                return (
                    f"needs Python {' or '.join(package.pythons)} for {need.purpose}: {package.name} cannot be "
                    f"installed on {running}"
                )
    return ""


def missing_text(needs: Iterable[Need]) -> str:
    """List what is not installed, a line for each extra, and the line that installs it all; empty if all is there."""
    needs = tuple(needs)
    extras = {extra.name: extra for extra in read_extras()} if needs else {}
    missing: dict[str, set[str]] = {}
    purposes: dict[str, list[str]] = {}
    for need in needs:
        absent = {package.name for package in extras[need.extra].packages if package.installed is None}
        absent &= need.packages if need.packages is not None else absent
        if absent:
            missing.setdefault(need.extra, set()).update(absent)
            purposes.setdefault(need.extra, []).append(need.purpose)
    lines = [
        f"  {extra}: {', '.join(sorted(missing[extra]))} (for {', '.join(dict.fromkeys(purposes[extra]))})"
        for extra in missing
    ]
    return "\n".join([*lines, f"  {install_line(*missing)}"]) if missing else ""


def pinned_version(distribution: str) -> str | None:
    """The one version that an extra wants of a distribution; None where several would do."""
    for extra in read_extras():
        for package in extra.packages:
            pin = package.wanted.removeprefix("==")
            if package.name == distribution and pin != package.wanted and "," not in pin:
                return pin
    return None


@cache
def version_of(distribution: str) -> str | None:
    """The version that is installed; None if none is. What is installed does not change while a program runs."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _package(extra: str, wanted: Requirement) -> Package:
    if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
        return Package(wanted.name, str(wanted.specifier), version_of(wanted.name))
    supported, own = SpecifierSet(_wanted().python), wanted.marker
    versions = (f"3.{minor}" for minor in range(50) if supported.contains(f"3.{minor}"))
    pythons = (version for version in versions if own.evaluate({"extra": extra, "python_version": version}))
    return Package(wanted.name, str(wanted.specifier), None, tuple(pythons))


@dataclass(frozen=True, slots=True)
class _Requirements:
    """Requirements of the product."""

    python: str
    extras: Mapping[str, tuple[Requirement, ...]]


def _wanted() -> _Requirements:
    """By pyproject.toml in a checkout, where what pip wrote down may be old; else by what pip wrote down."""
    checkout = resources.checkout()
    return _installed() if checkout is None else _declared(checkout / "pyproject.toml")


def _declared(file: Path) -> _Requirements:
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    kept = {name: tuple(map(Requirement, lines)) for name, lines in extras.items() if name not in _LEFT_OUT}
    return _Requirements(project["requires-python"], kept)


def _installed() -> _Requirements:
    own = metadata.metadata(DISTRIBUTION)
    requirements = [Requirement(line) for line in own.get_all("Requires-Dist") or ()]
    names = ["", *(name for name in own.get_all("Provides-Extra") or () if name not in _LEFT_OUT)]
    extras = {
        name: tuple(requirement for requirement in requirements if _holds(requirement, name))
        for name in names
    }
    return _Requirements(own["Requires-Python"], extras)


def _holds(requirement: Requirement, extra: str) -> bool:
    """Whether an extra asks for it; of what every part needs, only the part without an extra does."""
    marker = requirement.marker
    if not extra:
        return marker is None or marker.evaluate({"extra": ""})
    # What is for other Pythons only is kept, to be told what it needs; what is for other systems is not.
    return marker is not None and not _on_any_python(marker, "") and _on_any_python(marker, extra)


def _on_any_python(marker: Marker, extra: str) -> bool:
    return any(marker.evaluate({"extra": extra, "python_version": f"3.{minor}"}) for minor in range(50))
