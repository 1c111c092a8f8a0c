"""Runs a gateway until it is told to stop; requests that are under way may finish."""

from __future__ import annotations

import uvicorn

from pipeline.gateway.app import Gateway


class GatewayServer(uvicorn.Server):
    """uvicorn with the gateway in it. On SIGTERM and Ctrl-C it takes no more requests and drains."""

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
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=drain_s,
                timeout_keep_alive=75,
            )
        )
        self._gateway = gateway

    @property
    def port(self) -> int:
        """Where it listens, once it has started."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number

    async def shutdown(self, sockets: object = None) -> None:
        self._gateway.draining = True
        await super().shutdown(sockets)  # type: ignore[arg-type]
