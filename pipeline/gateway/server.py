"""The HTTP server of a gateway, and its graceful stop."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from socket import socket

from pipeline.gateway.access_log import log_request
from pipeline.gateway.app import Gateway
from pipeline.gateway.connections import ConnectionLimits
from pipeline.gateway.errors import ApiError
from pipeline.gateway.http_server import HttpServer


class GatewayServer(HttpServer):
    """Server of a gateway.

    On SIGTERM and Ctrl-C it stops listening, and completes the requests that are under way; those that take longer than
    `drain_s` are broken off, so that clients see that the answer is not complete.
    """

    def __init__(
        self,
        gateway: Gateway,
        host: str,
        port: int,
        *,
        limits: ConnectionLimits | None = None,
        drain_s: int = 30,
    ) -> None:
        """
        Args:
            gateway: to serve.
            host: address or name to listen on.
            port: 0 takes a free one.
            limits: on connections; None: the default ones.
            drain_s: how long requests may still take after a stop, in seconds.
        """
        super().__init__(gateway.app, host, port, self._note_refusal, limits=limits, drain_s=drain_s)
        self._gateway = gateway
        self.on_start: Callable[[], None] = lambda: None  # called when it listens

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        # Templates, tokenizers and modules stay. Each time the collector looks through them, all streams halt.
        gc.freeze()
        if self.started:
            self.on_start()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        self._gateway.context.draining = True
        await super().shutdown(sockets)

    def _note_refusal(self, error: ApiError) -> None:
        self._gateway.metrics.count_request("other", "", error.status)
        line = {
            "status": error.status,
            "outcome": error.status,
            "error": error.message,
            "error_type": error.code,
        }
        log_request(logging.INFO, line)
