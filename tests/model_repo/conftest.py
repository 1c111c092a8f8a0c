"""The models' sources are not a package: Triton puts each model's folder on sys.path, and so do these tests."""

from __future__ import annotations

import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "model_repo"
sys.path.insert(0, str(SOURCES))
