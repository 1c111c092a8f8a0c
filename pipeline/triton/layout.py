"""Names in a model repository that every layout shares."""

from __future__ import annotations

VERSION = "1"  # folder of a model's files
TOKENIZER = f"{VERSION}/tokenizer"  # relative to the model's folder
ENTRY = "tensorrt_llm_bls"  # the model that clients talk to
TARGET_MODEL, DRAFT_MODEL = "tensorrt_llm", "tensorrt_llm_draft"  # the models that hold an engine
