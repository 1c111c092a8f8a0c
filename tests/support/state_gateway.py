"""A gateway in front of a scripted model server, as a program: `pipeline gateway` as to where it keeps its state.

python -m tests.support.state_gateway MODEL_SERVER FOLDER POSTGRES REDIS CLAIM_S        prints its port

FOLDER, POSTGRES and REDIS (that of gateway.limits_redis) may be "" for none.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.gateway.api.batches import claims, runner
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.context import GatewayParts
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.state import open_state
from pipeline.gateway.tenants import Tenants
from pipeline.recipe import CacheSettings
from pipeline.recipe.response_cache import PgvectorSettings
from tests.support.scripted_model import Upstream, tiny

if TYPE_CHECKING:
    import openai


@contextmanager
def gateway_process(
    upstream: Upstream,
    folder: Path | None = None,
    *,
    postgres: str = "",
    redis: str = "",
    claim_s: float = 15.0,
) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """Run it until the block ends, with a client in front."""
    words = [upstream.url, str(folder or ""), postgres, redis, str(claim_s)]
    command = [sys.executable, "-m", "tests.support.state_gateway", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            from tests.support.http_clients import openai_client

            with openai_client(url, timeout_s=60) as client:
                yield process, client
        finally:
            process.kill()


def main(url: str, folder: str, postgres: str, redis: str, claim_s: str) -> None:
    claims.CLAIM_S = float(claim_s)
    runner._RENEW_S = claims.CLAIM_S / 5
    runner._POLL_S = 0.05
    backend = {"backend": PgvectorSettings(kind="pgvector", url=postgres)} if postgres else {}
    settings = GatewaySettings(limits_redis=redis or None, batch_folder=Path(folder) if folder else None)
    state = open_state([CacheSettings(**backend)], settings, own_folder=Path("/nonexistent"))
    gateway = Gateway({"tiny": tiny(url)}, Tenants(), settings, GatewayParts(*state))
    server = GatewayServer(gateway, "127.0.0.1", 0, drain_s=1)
    server.on_start = lambda: print(server.port, flush=True)
    server.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
