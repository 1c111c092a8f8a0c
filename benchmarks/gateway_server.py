"""Our gateway in front of a model server, as a program: with the tokenizer and chat template of a checkpoint.

python benchmarks/gateway_server.py HOST:PORT WORKERS        prints its port; HOST:PORT is gRPC of the model server
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path

# First: it says how gRPC is to work, as for the command.
import pipeline.cli.gateway  # noqa: F401
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.http_server import bound_sockets
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.settings import GatewaySettings, GatewayStart
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.workers.pool import WorkerPool
from pipeline.gateway.workers.worker import GatewayWorker
from pipeline.machine.processes import die_with_parent

CHECKPOINT = Path(__file__).resolve().parent.parent / "recipes" / "checkpoints" / "support-target"
SLOTS = 256


def model_at(url: str) -> ServedModel:
    """The model, as a package would say it."""
    template = ChatTemplate.from_directory(CHECKPOINT).compile()
    return ServedModel(
        name="tiny",
        created=0,
        deployment="",
        client=AsyncClient(url, template=template),
        template=template,
        prompt_limit=PromptLimit.from_tokenizer(CHECKPOINT, 4096),
        max_output_tokens=4096,
        queue=FairQueue(SLOTS, max_waiting=SLOTS),
    )


def serve(model: ServedModel, sockets: list[socket.socket], worker: GatewayWorker | None = None) -> None:
    """Serve until it is killed."""
    server = GatewayServer(
        Gateway({"tiny": model}, Tenants(), parts=GatewayParts(worker=worker)), "127.0.0.1", 0
    )
    listening = partial(print, sockets[0].getsockname()[1], flush=True)
    server.on_start = listening if worker is None else partial(worker.tell, "listens")
    server.run(sockets)


def main(url: str, workers: str, *message: str) -> None:
    if message:
        start = GatewayStart.from_descriptor(int(message[0]))
        assert start.parent is not None
        assert start.worker is not None
        assert die_with_parent(start.parent), "its parent is gone"
        worker, model = GatewayWorker.join(start.worker, Tenants()), model_at(url)
        worker.share(model)
        serve(model, [socket.socket(fileno=start.sockets[0])], worker)
        return
    with bound_sockets("127.0.0.1", 0) as sockets:
        if workers == "1":
            serve(model_at(url), sockets)
            return
        settings = GatewaySettings(workers=int(workers), max_waiting=SLOTS, drain_s=0)
        listening = partial(print, sockets[0].getsockname()[1], flush=True)
        command = (sys.executable, __file__, url, workers)
        WorkerPool(GatewayStart(settings=settings), sockets, command, Tenants(), listening).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
