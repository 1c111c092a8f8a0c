"""Settings of one subject, declared once: a model whose fields become options, help, JSON messages and manifest fields.

A room declares its settings where they are meant; `pipeline.cli.settings_options` makes the options of a command line.

    class FrontSettings(Settings):
        host: str = Field(default="127.0.0.1", description="Address to listen on.")
        endpoints: Annotated[tuple[str, ...], Option("--endpoint", metavar="HOST:PORT")] = Field(
            default=(), description="Server that runs the model."
        )
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from pipeline.errors import Fault


@dataclass(frozen=True, slots=True)
class Option:
    """Command-line form of a field, where its name and type do not say it.

    Attributes:
        name: Option, such as "--endpoint" or "-d --detach"; by default the field's
            name.
        metavar: Placeholder of the value in the help.
        envvar: Environment variable that gives the value where the option is absent.
        parse: Function from the option's text to the field's value, which raises ValueError with what is wrong; by
            default pydantic converts the text. Of an option that may be repeated, it gets each text.
        separator: Character between several values of one option, such as ","; by default the option is repeated.
        default: Default as the help shows it, where the value itself says little.
        hidden: Whether the help leaves it out.
        complete: Shell completion, as in click.
    """

    name: str = ""
    metavar: str | None = None
    envvar: str | None = None
    parse: Callable[[str], Any] | None = None
    separator: str | None = None
    default: str | None = None
    hidden: bool = False
    complete: Callable[..., Any] | None = None


class Settings(BaseModel):
    """Base of all settings models. Units are in the names of fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)
    # Fields that exclude each other: one that a command line gives replaces the others of a file.
    alternatives: ClassVar[tuple[str, ...]] = ()

    def conflicts(self) -> Iterator[Fault]:
        """Yield options that exclude or need each other; a model with such options overrides it."""
        yield from ()

    def to_descriptor(self) -> int:
        """Write the settings that were set as JSON into an anonymous file, for a child process that inherits it.

        Returns:
            The descriptor, positioned at the start and not inherited unless passed on; the caller closes it.
        """
        descriptor = os.memfd_create("settings")
        os.write(descriptor, self.model_dump_json(exclude_unset=True).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Self:
        """Read what `to_descriptor` wrote, and close the descriptor."""
        with os.fdopen(descriptor, "rb") as file:
            return cls.model_validate_json(file.read())
