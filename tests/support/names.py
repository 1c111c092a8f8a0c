"""DNS of the tests: names with addresses of loopback, which change at will."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.client import discovery

INTERVAL_S = 0.05


class Names:
    """What the names of a test resolve to, in this process."""

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {}

    def resolve(self, name: str) -> Sequence[str] | None:
        return self.addresses.get(name)


class HostsFile(Names):
    """The same, from a file with a line for each name, so that other processes see it change."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def write(self, name: str, *addresses: str) -> None:
        """Give a name its addresses; only one process writes."""
        self.addresses[name] = addresses
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{' '.join([name, *found])}\n" for name, found in self.addresses.items()))
        new.rename(self.file)

    def resolve(self, name: str) -> Sequence[str] | None:
        lines = (line.split() for line in self.file.read_text().splitlines())
        return next((addresses for known, *addresses in lines if known == name), None)


def use_names(names: Names, replace: Callable[[Any, str, object], None] = setattr) -> None:
    """Let this process resolve these names, and ask for them often.

    Args:
        names: those that no other DNS is asked for.
        replace: sets an attribute; `pytest.MonkeyPatch.setattr` takes it back.
    """
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *more: Any, **named: Any) -> Any:
        addresses = names.resolve(host) if isinstance(host, str) else None
        if addresses is None:
            return real(host, port, *more, **named)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    replace(socket, "getaddrinfo", getaddrinfo)
    replace(discovery, "_INTERVAL_S", INTERVAL_S)
