"""HTTP server: uvicorn, on sockets that are bound before."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from errno import EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT
from functools import partial
from socket import (
    AF_INET6,
    AI_PASSIVE,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    SO_REUSEADDR,
    SOCK_STREAM,
    SOL_SOCKET,
    getaddrinfo,
    socket,
)

import uvicorn
from starlette.types import ASGIApp

from pipeline.errors import ServerError
from pipeline.gateway.client_connection import ClientConnection, ConnectionLimits, Connections, OnRefusal

_SPARE_FILES = 256  # descriptors for all but the connections of clients
_NOT_HERE = (EADDRNOTAVAIL, EAFNOSUPPORT)
_TICKS_PER_CHECK = 5  # of uvicorn's 0.1 s


@contextmanager
def bound_sockets(host: str, port: int) -> Iterator[list[socket]]:
    """Bind sockets to an address, or to all addresses of a name, so that nobody else can listen there.

    Args:
        port: 0 takes a free port.

    Raises:
        ServerError: the address cannot be bound; the text says why.
    """
    with ExitStack() as stack:
        sockets: list[socket] = []
        try:
            addresses = dict.fromkeys(getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE))
            for number, (family, kind, protocol, _, address) in enumerate(addresses, start=1):
                try:
                    bound = stack.enter_context(socket(family, kind, protocol))
                    bound.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
                    if family == AF_INET6:
                        bound.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1)
                    bound.bind((address[0], port, *address[2:]))
                except OSError as error:
                    # `localhost` may have an address of IPv6 on a machine that has none
                    if error.errno in _NOT_HERE and (sockets or number < len(addresses)):
                        continue
                    raise
                port = bound.getsockname()[1]
                sockets.append(bound)
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield sockets


def _cannot_listen(host: str, port: int, error: OSError) -> ServerError:
    why = (error.strerror or str(error)).lower()
    fix = (
        "--port 0 takes a free one"
        if error.errno in (EACCES, EADDRINUSE)
        else "--host is an address of this machine"
    )
    return ServerError(f"the gateway cannot listen on {host}:{port}: {why} ({fix})")


class HttpServer(uvicorn.Server):
    """uvicorn server of an application, whose connections have limits."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        on_refusal: OnRefusal,
        *,
        limits: ConnectionLimits | None = None,
        drain_s: int = 30,
    ) -> None:
        """
        Args:
            on_refusal: see `Connections`.
            drain_s: seconds that requests may still take after a stop.
        """
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=partial(
                    ClientConnection,
                    connections=Connections(_with_files(limits or ConnectionLimits()), on_refusal),
                ),  # type: ignore[arg-type]
                log_level="warning",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=drain_s,
                timeout_keep_alive=75,
                ws="none",
            )
        )
        self._host = host

    @property
    def port(self) -> int:
        """Port on which it listens, once it has started."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number

    @property
    def url(self) -> str:
        """URL for clients, once it has started."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    def run(self, sockets: list[socket] | None = None) -> None:
        """Serve until a signal stops it.

        Args:
            sockets: by `bound_sockets`; None binds them now.

        Raises:
            ServerError: it cannot listen on the address.
        """
        if sockets is not None:
            super().run(sockets)
            return
        with bound_sockets(self._host, self.config.port) as own:
            super().run(own)

    async def startup(self, sockets: list[socket] | None = None) -> None:
        try:
            for bound in sockets or ():
                # uvloop would not report a failure.
                bound.listen(self.config.backlog)
        except OSError as error:
            # Another process was bound to the same address, and listens already.
            raise _cannot_listen(self._host, self.config.port, error) from error
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS_PER_CHECK == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, ClientConnection):
                    connection.check(now)
        return await super().on_tick(counter)


def _with_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the process' limit of open files as far as needed and allowed, and lower that of connections to fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = limits.connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return replace(limits, connections=min(limits.connections, max(1, allowed - _SPARE_FILES)))
