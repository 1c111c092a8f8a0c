"""`pipeline gateway` in front of a recipe that a real Triton serves: OpenAI's client, the cache, and SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml

from pipeline.triton.running import RunningServer
from pipeline.triton.server import TritonServer
from tests.e2e.conftest import Build
from tests.support.served import CHECKPOINTS
from tests.support.waiting import wait_for

QUESTION = [{"role": "user", "content": "Where is my parcel?"}]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "cached",
                "model": {"source": f"local:{CHECKPOINTS / 'support-target'}"},
                "runtime": {"kind": "cpu", "threads": 1},
                "limits": {"max_input_tokens": 128, "max_output_tokens": 64, "max_concurrency": 4},
                "cache": {"enabled": True, "backend": {"kind": "sqlite", "path": str(tmp_path / "cache.db")}},
            }
        )
    )
    return path


@pytest.fixture
def gateway(recipe: Path, build: Build, store: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process."""
    package = Path(build(str(recipe))["artifact"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with TritonServer.of_package(package) as server:
        record = RunningServer.of(server, package)
        record.write(store / "running", "cached")
        command = [sys.executable, "-m", "pipeline.cli.main", "gateway", str(recipe), "--port", str(port)]
        process = subprocess.Popen(command, env={**os.environ, "PIPELINE_STORE": str(store)})
        try:
            wait_for(lambda: answers(f"http://127.0.0.1:{port}/readyz"), "readiness of the gateway", 30)
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.kill()
            process.wait(10)
            record.remove(store / "running", "cached")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_openais_client_streams_from_triton(gateway: tuple[str, subprocess.Popen[bytes]]) -> None:
    url, process = gateway
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    whole = client.chat.completions.create(model="cached", messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content
    assert text
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(model="cached", messages=QUESTION, temperature=0, stream=True)
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    uncached = client.chat.completions.create(
        model="cached", messages=QUESTION, temperature=0, stream=True, extra_body={"cache": False}
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in uncached) == text
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
        assert b'pipeline_gateway_cache_total{model="cached",event="hit_exact"} 1' in page.read()
    with pytest.raises(openai.BadRequestError, match="prompts of at most 128 tokens"):
        client.chat.completions.create(
            model="cached", messages=[{"role": "user", "content": "parcel " * 200}]
        )
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) in (0, -signal.SIGTERM)
