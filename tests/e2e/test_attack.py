"""A deployment under attack by one tenant, judged by another: the suite that people run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.servers
@pytest.mark.timeout(900)
def test_no_attack_is_noticed_by_another_tenant(store: Path) -> None:
    environment = {**os.environ, "PIPELINE_STORE": str(store)}
    done = subprocess.run(
        # Longer than by default: here other tests take the processors, too.
        [ROOT / "scripts" / "attack", "--json", "--allow-s", "10"],
        env=environment, stdout=subprocess.PIPE, text=True, timeout=850, check=False,
    )  # fmt: skip
    outcomes = json.loads(done.stdout)
    assert {outcome["name"]: outcome["broken"] for outcome in outcomes if outcome["broken"]} == {}
    assert len(outcomes) > 10
    assert done.returncode == 0
