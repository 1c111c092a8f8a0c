"""How fast a batch is answered by where it lies: in a folder, or in PostgreSQL, by one gateway and by two.

    python benchmarks/storages.py [--requests N] [--rounds N] [--json]

Gateways stand before a model server that answers at once, so that figures are of gateways and storage alone: a real
model answers a batch more slowly. Ways take turns, round by round; figures are medians. PostgreSQL is the one of the
tests, on this machine, with its own defaults: it waits for the disk at each commit, as the folder does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psycopg

from benchmarks.common import in_turns, markdown, running
from pipeline.client.testing import FakeServer, Reply
from tests.support.servers import PostgresServer

CHAT = "/v1/chat/completions"
WAIT_S = 600
UPLOAD_MIB = 64
PROGRAM = """
import sys
from pathlib import Path

from benchmarks.gateway_server import model_at
from pipeline.gateway.app import Gateway
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.api.batches.storage import StorageLimits
from pipeline.gateway.api.responses.stored import StoredResponseLimits
from pipeline.gateway.app import GatewayServer, bound_sockets
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.state import open_state
from pipeline.gateway.tenants import Tenants
from pipeline.recipe import CacheSettings

url, folder, postgres = sys.argv[1:]
backend = {"kind": "pgvector", "url": postgres} if postgres else {"kind": "sqlite"}
caches = [CacheSettings.model_validate({"backend": backend})]
state = open_state(caches, GatewaySettings(), own_folder=Path(folder))
gateway = Gateway({"tiny": model_at(url)}, Tenants(), parts=GatewayParts(*state))
with bound_sockets("127.0.0.1", 0) as sockets:
    server = GatewayServer(gateway, "127.0.0.1", 0)
    server.on_start = lambda: print(sockets[0].getsockname()[1], flush=True)
    server.run(sockets)
"""


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch of each gateway, and one upload.

    Attributes:
        answers_per_s: Answers of all batches together.
        upload_mib_per_s: Speed of one upload.
        stored_ms: Median time of a response that is stored, less that of one that is not.
    """

    answers_per_s: float
    upload_mib_per_s: float
    stored_ms: float


@contextmanager
def gateways(model_server: str, folder: str, postgres: str, count: int) -> Iterator[list[httpx.Client]]:
    """Run gateways on one storage, with a client each."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            port, _ = stack.enter_context(running(PROGRAM, model_server, folder, postgres))
            url = f"http://127.0.0.1:{port}"
            made.append(stack.enter_context(httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)))
        yield made


def another(url: str) -> str:
    """Make one more database on a server; gateways of one database share their batches."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE two")
    return url.rpartition("/")[0] + "/two"


def upload(client: httpx.Client, text: bytes) -> str:
    """Upload a file, and return its id."""
    files = {"file": ("in.jsonl", text)}
    sent = client.post("/v1/files", files=files, data={"purpose": "batch"}).raise_for_status()
    return str(sent.json()["id"])


def measure(clients: list[httpx.Client], requests: int) -> Sample:
    """Take one sample."""
    lines = "\n".join(
        json.dumps({"custom_id": str(number), "method": "POST", "url": CHAT, "body": {
            "model": "tiny", "messages": [{"role": "user", "content": f"Where is parcel {number}?"}]
        }})
        for number in range(requests)
    ).encode()  # fmt: skip
    began = time.monotonic()
    large = upload(clients[0], b"x" * (UPLOAD_MIB * 2**20))
    upload_s = time.monotonic() - began
    clients[0].delete(f"/v1/files/{large}").raise_for_status()
    stored_ms = response_ms(clients[0], stored=True) - response_ms(clients[0], stored=False)
    wanted = [{"input_file_id": upload(client, lines), "endpoint": CHAT, "completion_window": "24h"}
              for client in clients]  # fmt: skip
    began = time.monotonic()
    ids = [
        client.post("/v1/batches", json=request).raise_for_status().json()["id"]
        for client, request in zip(clients, wanted, strict=True)
    ]
    for client, id in zip(clients, ids, strict=True):
        wait_until_over(client, id, requests)
    return Sample(len(ids) * requests / (time.monotonic() - began), UPLOAD_MIB / upload_s, stored_ms)


def response_ms(client: httpx.Client, *, stored: bool) -> float:
    """Median time of a response."""
    taken = []
    for _ in range(50):
        began = time.monotonic()
        body = {"model": "tiny", "input": "Where is my parcel?", "store": stored}
        answer = client.post("/v1/responses", json=body).raise_for_status().json()
        taken.append(time.monotonic() - began)
        if answer["store"] is not stored:
            raise SystemExit(f"it was to be stored: {stored}, and was: {answer['store']}")
    return statistics.median(taken) * 1e3


def wait_until_over(client: httpx.Client, id: str, requests: int) -> None:
    """Wait for the end of a batch; all its requests are answered."""
    deadline = time.monotonic() + WAIT_S
    while (batch := client.get(f"/v1/batches/{id}").raise_for_status().json())["status"] != "completed":
        if time.monotonic() > deadline or batch["status"] in ("failed", "expired"):
            raise SystemExit(f"the batch does not end: {batch}")
        time.sleep(0.02)
    if batch["request_counts"]["completed"] != requests:
        raise SystemExit(f"answers are missing: {batch}")


def table(result: Any) -> str:
    """Write the rows as a Markdown table."""
    head = (f"{result['requests']:,} requests", "answers/s", "upload MiB/s", "a stored response")
    rows = [
        (
            row["way"],
            f"{row['answers_per_s']:,.0f}",
            f"{row['upload_mib_per_s']:,.0f}",
            f"+{row['stored_ms']:.2f} ms",
        )
        for row in result["rows"]
    ]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    chosen = parser.parse_args()
    with ExitStack() as stack:
        model = stack.enter_context(FakeServer(Reply(["On", " its", " way."])))
        database = stack.enter_context(PostgresServer(options=("-c", "fsync=on")))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        places = {
            "folder, one gateway": ("", 1),
            "PostgreSQL, one gateway": (database.url, 1),
            "PostgreSQL, two gateways": (another(database.url), 2),
        }
        ways = {
            name: stack.enter_context(gateways(model.url, folder, postgres, count))
            for name, (postgres, count) in places.items()
        }
        found = in_turns(ways, lambda clients: measure(clients, chosen.requests), chosen.rounds, warm_up=1)
    rows = [
        {
            "way": name,
            **{key: statistics.median(getattr(run, key) for run in taken) for key in asdict(taken[0])},
        }
        for name, taken in found.items()
    ]
    result = {"requests": chosen.requests, "rounds": chosen.rounds, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
