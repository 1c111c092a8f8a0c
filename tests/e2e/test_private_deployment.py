"""What a whole deployment leaves, or holds while it runs, is for its own user: seen as another user of the machine."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.machine.process_guard import MARK
from pipeline.machine.processes import processes_below
from pipeline.triton.running import RunningServer
from tests.e2e.conftest import pipeline
from tests.support.other_user import readable_by_nobody, require_root

KEYS = "tenants: {shop: {keys: [sk-of-the-shop]}}\n"
SECRET = "the secret of the shop"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can enter, with one for temporary files and the umask that hides nothing."""
    require_root()
    made = Path(tempfile.mkdtemp(prefix="open-", dir="/tmp"))
    made.chmod(0o755)
    (made / "tmp").mkdir()
    (made / "tmp").chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(made / "tmp"))
    before = os.umask(0)
    yield made
    os.umask(before)
    shutil.rmtree(made)


def shared_memory(pid: int) -> list[Path]:
    """Regions of the Triton below a supervisor."""
    marks = set()
    for process in processes_below(pid):
        variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        marks |= {
            variable.partition(b"=")[2].decode()
            for variable in variables
            if variable.startswith(f"{MARK}=".encode())
        }
    return [region for mark in marks for region in Path("/dev/shm").glob(f"{mark}*")]


def ask(url: str, path: str, body: bytes | None = None, kind: str = "application/json") -> dict[str, Any]:
    headers = {"Authorization": "Bearer sk-of-the-shop", **({"Content-Type": kind} if body else {})}
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def chat(text: str) -> dict[str, Any]:
    return {"model": "tiny-cpu", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


def use(url: str) -> None:
    """Ask, answer from the cache, keep a response, upload a file, and have a batch of it answered."""
    for _ in range(2):
        ask(url, "/v1/chat/completions", json.dumps(chat(SECRET)).encode())
    ask(url, "/v1/responses", json.dumps({"model": "tiny-cpu", "input": SECRET}).encode())
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": chat(SECRET)}
    parts = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
        f"{json.dumps(line)}\n\r\n--b--\r\n"
    )
    file = ask(url, "/v1/files", parts.encode(), "multipart/form-data; boundary=b")["id"]
    wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    ask(url, "/v1/batches", json.dumps(wanted).encode())


@pytest.mark.servers
def test_another_user_reads_nothing_of_a_deployment(folder: Path) -> None:
    store, keys = folder / "store", folder / "keys.yaml"
    store.mkdir()
    keys.write_text(KEYS)
    keys.chmod(0o600)
    sets = ("--set", "cache.enabled=true", "--set", "serving.http=true")
    done = pipeline("build", "tiny-cpu", *sets, store=store)
    assert done.returncode == 0, done.stderr
    built = set(readable_by_nobody([store]))
    assert any("model.safetensors" in name or "config.pbtxt" in name for name in built)
    words = (
        "--set",
        "gateway={workers: 2, log_prompts: full}",
        "--keys",
        str(keys),
        "--port",
        "0",
        "--detach",
    )
    done = pipeline("serve", "tiny-cpu", *sets, *words, store=store)
    assert done.returncode == 0, done.stderr
    try:
        record = RunningServer.find(store / "running", "tiny-cpu")
        assert record is not None
        use(record.gateway_url)
        regions = shared_memory(record.pid)
        assert len(regions) >= 4
        assert set(readable_by_nobody([folder, *regions])) <= built
    finally:
        done = pipeline("stop", "tiny-cpu", store=store)
    assert done.returncode == 0, done.stderr
    assert SECRET in "".join(path.read_text() for path in (store / "logs").rglob("gateway.log*"))
    assert set(readable_by_nobody([folder])) <= built
