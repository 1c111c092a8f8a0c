"""Work that another machine does: the script for it, and taking what it left.

A script is a template that extends `elsewhere.sh.j2`. A person reads it, carries it to the machine and runs it. It
makes one folder ($OUT), goes on where it was if it is run again, and ends with the commands that take its results in.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pipeline.documents import dump_yaml
from pipeline.errors import UserError
from pipeline.store import files

_FRAME = "elsewhere.sh.j2"


@dataclass(frozen=True, slots=True)
class ReturnCommand:
    """A command to run where the script was written, once its work is done."""

    command: str  # quoted for a shell
    brought: str = ""  # last argument: the result that was brought back; empty if it takes none
    left: str = ""  # path of the same result on the other machine

    def __str__(self) -> str:
        return f"{self.command} {self.brought}".rstrip()


@dataclass(frozen=True, slots=True)
class HandoverScript:
    """A script for another machine."""

    path: Path
    names: tuple[str, ...]  # names of its results: steps of a build, or trials and rounds of a search
    folder: str  # folder that it makes for them where it runs
    following: tuple[ReturnCommand, ...]

    def write(self, package: str, template: str, recipe: Any = None, **values: Any) -> HandoverScript:
        """Write the file from a template in the folder of a package; its owner can run it.

        Variables are written as @(name)@, and comments as @# … #@: shells and Docker have braces of their own.

        Args:
            recipe: Values that the script writes to $OUT/recipe.yaml.
        """
        import jinja2

        def load(name: str) -> str:
            return (resources.files(__package__ if name == _FRAME else package) / name).read_text("utf-8")

        environment = jinja2.Environment(
            loader=jinja2.FunctionLoader(load),
            variable_start_string="@(",
            variable_end_string=")@",
            comment_start_string="@#",
            comment_end_string="#@",
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters |= {"quote": lambda value: shlex.quote(str(value)), "words": shlex.join}
        written = "" if recipe is None else dump_yaml(recipe)
        text = environment.get_template(template).render(script=self, recipe=written, **values)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(text, encoding="utf-8")
        self.path.chmod(0o755)
        return self


def adopt_commands(arguments: str, results: Iterable[tuple[str, str, str]]) -> tuple[ReturnCommand, ...]:
    """Return the commands that take results into a build and go on with it.

    Args:
        arguments: How recipe and store are called on the command line, quoted for a shell.
        results: Step, folder as it is brought, and folder as it is left.
    """
    adopting = (ReturnCommand(f"pipeline adopt {arguments} {step}", *folders) for step, *folders in results)
    return (*adopting, ReturnCommand(f"pipeline build {arguments}"))


def require_result(folder: Path, actual: str | None, wanted: str, verb: str = "is") -> None:
    """Raise UserError unless a folder that came back holds the wanted artifact."""
    if actual != wanted:
        raise UserError(
            f"{folder} {verb} {actual}, what is missing is {wanted}: it is of another step, or the recipe, a "
            "checkpoint or the tools have changed since; then print the script again"
        )


def copy_result(folder: Path, names: Iterable[str], into: Path) -> None:
    """Copy files of a folder that came back. Never as links: it stays its owner's."""
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        files.copy_file(folder / name, into / name)
