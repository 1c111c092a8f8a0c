"""What several folders of tests share."""

from pathlib import Path

CHECKPOINTS = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
