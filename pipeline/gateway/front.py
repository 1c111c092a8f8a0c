"""Triton's open ports, in a process of their own: gRPC that is relayed, and HTTP behind a guard.

    python -m pipeline.gateway.front '{"grpc": 5, "grpc_socket": "/…/grpc:1", "http": 6, "http_socket": "/…/http", …}'

`grpc` and `http` are descriptors of sockets that are bound and handed down; either may be missing. `pipeline serve`
starts it beside Triton and again when it dies, and ends it after Triton. No process of our own depends on it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from contextlib import suppress
from socket import socket
from typing import Any

from pipeline.dropping_output import drop_unwritable_output
from pipeline.gateway.grpc_relay import GrpcRelay
from pipeline.printable import PrintableFormatter

_BACKLOG = 512


async def _serve(settings: dict[str, Any]) -> None:
    serving = []
    if "grpc" in settings:
        relay = GrpcRelay(settings["grpc_socket"])
        server = await asyncio.get_running_loop().create_server(
            relay.connection, sock=socket(fileno=settings["grpc"]), backlog=_BACKLOG
        )
        serving.append(server.serve_forever())
    if "http" in settings:
        serving.append(_serve_http(settings))
    await asyncio.gather(*serving)


async def _serve_http(settings: dict[str, Any]) -> None:
    from pipeline.gateway.client_connection import ConnectionLimits
    from pipeline.gateway.errors import ApiError
    from pipeline.gateway.http_server import HttpServer
    from pipeline.gateway.triton_http import TritonHttp
    from pipeline.gateway.web import AllowedHosts

    def note(error: ApiError) -> None:
        logging.getLogger(__name__).warning("HTTP: a connection is refused: %s", error.message)

    hosts = AllowedHosts(settings["address"], settings["hosts"])
    app = TritonHttp(settings["http_socket"]).guarded(hosts)
    server = HttpServer(app, settings["address"], 0, note, limits=ConnectionLimits(connections=256))
    await server.serve([socket(fileno=settings["http"])])


def main(text: str) -> int:
    """Serve until the process is ended."""
    drop_unwritable_output()
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler])
    with suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(json.loads(text)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
