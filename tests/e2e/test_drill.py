"""Each kind of process of a deployment killed and stopped once under 16 streams, by the command that people run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_nothing_hangs_and_nothing_is_answered_wrongly(store: Path) -> None:
    command = [sys.executable, "benchmarks/drill.py", "--times", "1", "--json"]
    environment = {**os.environ, "PIPELINE_STORE": str(store), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=1200, check=False
    )
    rows = json.loads(done.stdout)
    assert len(rows) == 15
    for row in rows:
        assert row["answers"].get("right"), row
        assert not row["answers"].get("wrong"), row
        assert not row["answers"].get("hung"), row
        assert (row["times"], row["lost"], len(row["recovery_s"])) == (1, 0, 1), row
    assert done.returncode == 0
