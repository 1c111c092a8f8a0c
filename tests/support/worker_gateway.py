"""A gateway of several workers in front of a scripted model server, as a program.

python -m tests.support.worker_gateway WORKERS KEYS CACHE BATCHES HOSTS URL    prints its port when all workers listen

KEYS, CACHE, BATCHES and HOSTS (a `tests.support.names.HostsFile`) may be "" for none.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client import AsyncClient, ChatTemplate, PromptLimit, Retries
from pipeline.gateway.access_log import log_to_stderr
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.responses.stored import SqlStoredResponses, StoredResponseLimits
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
from tests.support.names import HostsFile, use_names

DRAIN_S, MAX_WAITING, PLACES = 5, 64, 4
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(slots=True)
class WorkerGateway:
    """A gateway of several workers that runs."""

    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listens(self) -> bool:
        """Whether a worker answers."""
        import httpx

        from tests.support.http_clients import http

        with suppress(httpx.TransportError):
            http.get(f"{self.url}/healthz")
            return True
        return False

    def workers(self) -> list[int]:
        """Process ids of the workers, the oldest first."""
        return [child.pid for child in psutil.Process(self.process.pid).children()]


@contextmanager
def worker_gateway(
    url: str,
    workers: int,
    *,
    keys: Path | None = None,
    cache: Path | None = None,
    batches: Path | None = None,
    hosts: Path | None = None,
) -> Iterator[WorkerGateway]:
    """Run it until the block ends."""
    words = [
        sys.executable,
        "-m",
        "tests.support.worker_gateway",
        str(workers),
        str(keys or ""),
        str(cache or ""),
        str(batches or ""),
        str(hosts or ""),
        url,
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield WorkerGateway(process, int(process.stdout.readline()))
        finally:
            process.kill()


def main(words: Sequence[str]) -> None:
    workers, keys, cache, batches, hosts, url, *message = words
    if hosts:
        use_names(HostsFile(Path(hosts)))
    log_to_stderr(as_json=False)
    if message:
        serve(GatewayStart.from_descriptor(int(message[0])), cache, batches, url)
        return
    settings = GatewaySettings(
        keys=Path(keys) if keys else None, workers=int(workers), max_waiting=MAX_WAITING, drain_s=DRAIN_S
    )
    with bound_sockets("127.0.0.1", 0) as sockets:
        command = (sys.executable, "-m", "tests.support.worker_gateway", *words)
        say = partial(print, sockets[0].getsockname()[1], flush=True)
        tenants = Tenants.load(settings.keys) if settings.keys else Tenants()
        WorkerPool(GatewayStart(settings=settings), sockets, command, tenants, say).run()


def model_at(url: str, cache: Path | None) -> ServedModel:
    """A model that takes 50 words and gives 40."""
    template = ChatTemplate(TEMPLATE)
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return ServedModel(
        name="tiny",
        created=1,
        deployment="digest",
        client=AsyncClient(url, template=template, retries=Retries(attempts=1)),
        template=template,
        prompt_limit=PromptLimit(tokenizer, max_tokens=50),
        max_output_tokens=40,
        queue=FairQueue(PLACES, max_waiting=MAX_WAITING),
        cache=None if cache is None else ResponseCache(SqliteBackend(cache)),
    )


def serve(start: GatewayStart, cache: str, batches: str, url: str) -> None:
    """Be a worker."""
    place, parent, keys = start.worker, start.parent, start.settings.keys
    assert place is not None
    assert parent is not None
    assert die_with_parent(parent)
    tenants = Tenants.load(keys) if keys else Tenants()
    worker = GatewayWorker.join(place, tenants)
    model = model_at(url, Path(cache) if cache else None)
    worker.share(model)
    kept = BatchStorage(BatchFolder(Path(batches))) if batches else None
    stored = SqlStoredResponses.of_gateway(StoredResponseLimits(), place.metrics / "responses.sqlite")
    gateway = Gateway({"tiny": model}, tenants, start.settings, GatewayParts(kept, stored, worker=worker))
    server = GatewayServer(gateway, "127.0.0.1", 0, drain_s=DRAIN_S)
    server.on_start = partial(worker.tell, "listens")
    server.run([socket.socket(fileno=start.sockets[0])])


if __name__ == "__main__":
    main(sys.argv[1:])
