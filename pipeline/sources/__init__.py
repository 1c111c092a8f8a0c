"""Checkpoints and calibration sets that a recipe names, settled: on the Hugging Face Hub or on this machine.

    resolved = resolve_checkpoint(recipe.model, store=store)    # which content exactly: a commit, or hashes of files
    resolved.identity                                           # what keys of artifacts are made from

checkpoint.py resolves; selection.py says which files of a checkpoint are taken; hub.py is the client of the Hub, and
dataset.py does the same for calibration sets. Nothing is downloaded but answers of the Hub's API (and, by
`resolve_dataset`, the files of a set). Written against huggingface_hub 1.33.
"""

from pipeline.sources.checkpoint import (
    HubCheckpoint,
    LocalCheckpoint,
    ResolvedSource,
    find_fetched,
    is_offline,
    resolve_checkpoint,
)

__all__ = [
    "HubCheckpoint",
    "LocalCheckpoint",
    "ResolvedSource",
    "find_fetched",
    "is_offline",
    "resolve_checkpoint",
]
