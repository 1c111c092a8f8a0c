"""`pipeline ps` and `pipeline top` before records, on terminals of several widths."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.main import cli
from pipeline.store import Store
from pipeline.triton.deployment import LaunchSpec
from pipeline.triton.running import RunningServer
from tests.support.deployments import gpu_deployment

ARTIFACT = "package-42e451333aac24b05b44"
OTHER = "/srv/packages/of-another-machine/with-a-long-name"
ADDRESSES = (
    "http://127.0.0.1:18080/v1",
    "gRPC 127.0.0.1:18001",
    "HTTP 127.0.0.1:18000",
    "metrics 127.0.0.1:9",
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """`chat` is served from the store with values of `--set`, `own` from a package elsewhere; no page answers."""
    shelf = Store.at(tmp_path)
    package = shelf.artifacts / ARTIFACT
    package.mkdir(parents=True)
    gpu_deployment(LaunchSpec(mode="single", engine_models=("tensorrt_llm",), weights_gib=1)).save(package)
    record = RunningServer(
        pid=os.getpid(),
        grpc_url="127.0.0.1:18001",
        http_url="http://127.0.0.1:18000",
        metrics_url="http://127.0.0.1:9/metrics",
        gateway_url="http://127.0.0.1:18080",
        deployment=package / "deployment.json",
        started=datetime.now(UTC).isoformat(),
        state="unready",
        reason="a check by inference got no answer within three seconds, and before that one took two of them",
        recipe=("/srv/chat.yaml", "--set", "limits.max_concurrency=4", "--store", str(tmp_path)),
    )
    record.write(shelf.running, "chat")
    replace(record, deployment=Path(OTHER, "deployment.json"), recipe=()).write(shelf.running, "own")
    return tmp_path


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch, store: Path) -> Callable[..., str]:
    """Output of a command on a terminal of so many columns."""

    def shown(columns: int, *words: str) -> str:
        monkeypatch.setattr("pipeline.cli.output.output_width", lambda _: columns)
        done = CliRunner().invoke(cli, [*words, "--store", str(store)])
        assert done.exit_code == 0, done.output
        return done.output

    return shown


@pytest.mark.parametrize("columns", [60, 200])
def test_no_width_takes_addresses_packages_and_values_from_ps(
    on_terminal: Callable[..., str], columns: int
) -> None:
    shown = on_terminal(columns, "ps")
    chat, own = shown.split("\nown ")
    for part in (chat, own):
        assert all(address in part for address in ADDRESSES)
    assert f"package  {ARTIFACT}, model tensorrt_llm_bls (tensorrt)\n" in chat
    assert "recipe   /srv/chat.yaml --set limits.max_concurrency=4\n" in chat
    assert f"package  {OTHER}\n" in own
    assert "0" * 12 not in shown, "the digest of its deployment.json names no artifact"
    assert "recipe" not in own
    assert "before that one took two of them" in chat


@pytest.mark.parametrize(("columns", "tables"), [(60, 3), (80, 2), (200, 1)])
def test_no_width_takes_columns_from_top(on_terminal: Callable[..., str], columns: int, tables: int) -> None:
    shown = on_terminal(columns, "top", "--interval", "0.1", "--once")
    heads = [line.split() for line in shown.splitlines() if line.strip().startswith("deployment")]
    assert len(heads) == tables
    assert "…" not in shown.split("chat: ")[0]
    titles = " ".join(word for head in heads for word in head if word != "deployment")
    assert titles == (
        "state up run/wait/stall tok/s TTFT p50/p95 ITL p50/p95 KV hits requests restarts memory"
    )
    table = shown.split("chat: ")[0]
    assert [table.count(f" {name} ") for name in ("chat", "own")] == [tables, tables]
    assert max(map(len, table.splitlines())) <= columns
