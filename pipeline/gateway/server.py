"""Runs a gateway until it is told to stop; requests that are under way may finish."""

from __future__ import annotations

import gc
from collections.abc import Callable
from socket import socket

import uvicorn

from pipeline.gateway.app import Gateway


class GatewayServer(uvicorn.Server):
    """uvicorn with the gateway in it.

    On SIGTERM and Ctrl-C it listens no more, and answers what is under way; what takes longer than `drain_s` is
    broken off, so that whoever reads it sees that it is not complete.
    """

    def __init__(
        self, gateway: Gateway, host: str, port: int, *, drain_s: int = 30, log_level: str = "warning"
    ) -> None:
        """`port` 0 takes a free one; `drain_s`: how long requests may still take when it is told to stop."""
        super().__init__(
            uvicorn.Config(
                gateway.app,
                host=host,
                port=port,
                log_level=log_level,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=drain_s,
                timeout_keep_alive=75,
                ws="none",
            )
        )
        self._gateway, self._host = gateway, host
        self.on_start: Callable[[], None] = lambda: None  # called when it listens

    @property
    def port(self) -> int:
        """Where it listens, once it has started."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number

    @property
    def url(self) -> str:
        """For clients, once it has started."""
        return f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{self.port}"

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: templates, tokenizers, modules; looking through them halts all streams
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._gateway.draining = True
        await super().shutdown(sockets)
