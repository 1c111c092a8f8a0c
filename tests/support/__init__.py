"""What several folders of tests share."""

from pathlib import Path

# A draft for recipes of Llama 3, as `--set` takes it.
LLAMA_DRAFT = (
    "draft={source: 'hf:meta-llama/Llama-3.2-1B-Instruct', revision: 9213176726f574b556790deb65791e0c5aa438b6, "
    "max_draft_tokens: 6}"
)
CHECKPOINTS = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints"
