"""Replicas for real: Triton servers behind a DNS name, gateways by the command that people run, limits in Redis."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pipeline.serving.live import MetricsPage
from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from tests.e2e.conftest import Build
from tests.support.names import HostsFile
from tests.support.servers import RedisServer, Unavailable
from tests.support.waiting import wait_for

pytestmark = pytest.mark.servers

NAME, MINUTE, LONG_S, CONVERSATIONS = "replicas.test", 20, 120.0, 16
KEYS = f"""tenants:
  shop: {{keys: [sk-shop], limits: {{requests_per_minute: {MINUTE}}}}}
  free: {{keys: [sk-free]}}
"""
# The command, in a process that knows the name. Workers do not ask DNS: their parent does.
GATEWAY = """
import sys
from pathlib import Path
from tests.support.names import HostsFile, use_names
use_names(HostsFile(Path(sys.argv.pop(1))))
from pipeline.cli.main import main
main()
"""


@contextmanager
def gateway(hosts: HostsFile, *words: str) -> Iterator[str]:
    """Run a gateway until the block ends. Yields its URL."""
    command = [sys.executable, "-c", GATEWAY, str(hosts.file), "gateway", "--port", "0", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"(http://\S+)/v1", process.stdout.readline())
            assert found is not None
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def endpoints(url: str) -> set[str]:
    """The servers of a gateway that is ready."""
    answer = httpx.get(f"{url}/readyz", timeout=60, trust_env=False).json()
    return set(answer["models"]["tiny-cpu"]["endpoints"]) if answer["ready"] else set()


def converse(client: httpx.Client, number: int, key: str = "sk-free") -> list[str]:
    """Three turns; the answers."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    said = []
    for question in (f"Where is parcel {number}?", "And when does it come?", "Thanks."):
        messages.append({"role": "user", "content": question})
        body = {"model": "tiny-cpu", "messages": messages, "max_tokens": 16, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        said.append(answer.json()["choices"][0]["message"]["content"])
        messages.append({"role": "assistant", "content": said[-1]})
    return said


def reused(server: TritonServer) -> float:
    """Tokens of prompts that a server had in its KV cache."""
    page = MetricsPage.fetch(server.metrics_url, timeout_s=20)
    assert page is not None
    found = page.total("nv_trt_llm_general_metrics", general_type="prompt_tokens_reused")
    return found or 0.0


def asked(url: str, count: int) -> int:
    """How many of so many requests of a tenant are let in."""
    with httpx.Client(base_url=url, timeout=LONG_S, trust_env=False) as client:
        body = {"model": "tiny-cpu", "prompt": "Hi", "max_tokens": 0}
        answers = [
            client.post("/v1/completions", json=body, headers={"Authorization": "Bearer sk-shop"})
            for _ in range(count)
        ]
    return sum(answer.status_code != 429 for answer in answers)


def test_replicas_are_exchanged_and_killed_under_load_and_no_request_fails(
    build: Build, tmp_path: Path
) -> None:
    package = Path(build("tiny-cpu")["artifact"])
    # Two servers with one port, at two addresses of loopback.
    ports = replace(Ports.free(), movable=False)
    hosts, keys = HostsFile(tmp_path / "hosts"), tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    hosts.write(NAME, "127.0.0.1", "127.0.0.2")
    try:
        redis = RedisServer()
    except Unavailable as error:
        pytest.skip(f"no Redis here: {error}")
    with ExitStack() as stack:
        stack.enter_context(redis)
        first, two = (
            stack.enter_context(TritonServer.of_package(package, ports=ports, address=address))
            for address in ("127.0.0.1", "127.0.0.2")
        )
        words: Sequence[str] = (
            *("--package", str(package), "--endpoint", f"dns:{NAME}:{ports.grpc}", "--keys", str(keys)),
            *("--set", f"gateway={{limits_redis: '{redis.url}', workers: 2}}"),
        )
        url = stack.enter_context(gateway(hosts, *words))
        both = {first.grpc_url, two.grpc_url}
        wait_for(lambda: endpoints(url) == both, "both replicas", LONG_S)

        # Whoever answers, the answer is the same.
        client = stack.enter_context(httpx.Client(base_url=url, timeout=LONG_S, trust_env=False))
        # Each conversation belongs to one replica: by chance, all of a few would belong to the same.
        expected = [converse(client, number) for number in range(CONVERSATIONS)]
        stop = threading.Event()

        def keep_conversing(first: int) -> int:
            with httpx.Client(base_url=url, timeout=LONG_S, trust_env=False) as own:
                for count in itertools.count(first):
                    if stop.is_set():
                        return count - first
                    assert converse(own, count % CONVERSATIONS) == expected[count % CONVERSATIONS]
            raise AssertionError

        with ThreadPoolExecutor(4) as threads:
            conversing = [threads.submit(keep_conversing, number) for number in range(4)]
            try:
                # One leaves the name, ends what it has, and stops.
                hosts.write(NAME, "127.0.0.1")
                wait_for(lambda: endpoints(url) == {first.grpc_url}, "one replica", LONG_S)
                two.stop()
                two.start()
                hosts.write(NAME, "127.0.0.1", "127.0.0.2")
                wait_for(lambda: endpoints(url) == both, "both replicas again", LONG_S)
                wait_for(lambda: reused(two) > 0, "turns at the one that is back", LONG_S)
                # The other one is killed, and stays in the name.
                first.stop(at_once=True)
                before = reused(two)
                wait_for(lambda: reused(two) > before, "turns at the one that is left", LONG_S)
                first.start()
                wait_for(lambda: reused(first) > 0, "turns at the one that was started again", LONG_S)
            finally:
                stop.set()
            assert all(conversation.result(LONG_S) for conversation in conversing)

        # Two gateways, one of them with two workers, let as many in as one.
        other = stack.enter_context(gateway(hosts, *words))
        wait_for(lambda: endpoints(other) == both, "the other gateway", LONG_S)
        began = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            let_in = sum(threads.map(lambda address: asked(address, MINUTE), (url, other)))
        assert MINUTE <= let_in <= MINUTE + (time.monotonic() - began) * MINUTE / 60 + 1
