"""The first stage: a checkpoint from the Hugging Face Hub or from a local folder, as files that nobody changes.

    resolved = resolve(recipe.model, store=store)      # which content exactly: a commit, or a digest of files
    facts = fetch(resolved, folder, progress=progress)  # its files, checked

Only what later stages read is taken: safetensors, configuration, tokenizer. No code from a repository is, ever, and
pickled weights only where the recipe allows it. Written against huggingface_hub 1.33.
"""

from pipeline.stages.fetch.fetching import fetch
from pipeline.stages.fetch.resolved import HubCheckpoint, LocalCheckpoint, ResolvedSource
from pipeline.stages.fetch.resolving import resolve

__all__ = ["HubCheckpoint", "LocalCheckpoint", "ResolvedSource", "fetch", "resolve"]
