"""The model in memory: float32 on a CPU, in its own type on a GPU; what ModelOpt knows of it; a sample of its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import StageError, UserError
from pipeline.machine.host import read_memory
from pipeline.models import Architecture, TensorFiles
from pipeline.runtimes.tensorrt.checkpoint import MODEL_TYPES
from pipeline.stages.calibrate import attention, experts
from pipeline.store import Json

_MOST_TOKENS, _MOST_SECONDS = 64, 60.0


def check_known(directory: Path, architecture: Architecture) -> None:
    """Build the model without its weights and ask ModelOpt's exporter whether it finds its way in it.

    Seconds, and no memory: better than to find out after hours of calibration.
    """
    from modelopt.torch.export.layer_utils import check_model_compatibility, get_transformer_layers
    from modelopt.torch.export.model_utils import get_model_type
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):
        model = auto.from_config(config)
        if architecture.experts:
            experts.separate(model)
    kind = get_model_type(model)
    compatible, _, _ = check_model_compatibility(get_transformer_layers(model))
    if kind != MODEL_TYPES[architecture.family] or not compatible:
        raise UserError(
            f"ModelOpt does not know {architecture.class_name} (takes it for {kind!r}): it cannot be exported"
        )


def load(directory: Path, architecture: Architecture, device: str) -> Any:
    """Load a model, ready to be calibrated.

    Args:
        directory: A checkpoint in the Hugging Face layout.
        device: "cpu" (float32) or "cuda" (the checkpoint's own type, spread over GPUs by transformers).

    Raises:
        StageError: A weight is missing or left over.
        UserError: Memory does not hold the weights in float32.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if device == "cpu" else getattr(torch, architecture.dtype)
    _check_memory(directory, device)
    attention.register()
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention.NAME,
        device_map=None if device == "cpu" else "auto",
        local_files_only=True,
        output_loading_info=True,
    )
    wrong = [
        f"{kind.replace('_', ' ')}: {name}"
        for kind in loading
        for name in sorted(map(str, loading[kind] or ()))
    ]
    if wrong:
        raise StageError("\n  ".join([f"{directory} does not fit {architecture.class_name}:", *wrong]))
    if architecture.experts:
        experts.separate(model)
    return model.eval().requires_grad_(False)


def _check_memory(directory: Path, device: str) -> None:
    """A process that is killed for its memory says nothing; this does."""
    if device != "cpu":
        return
    needed = 4 * TensorFiles(directory).elements
    available = read_memory().available_bytes
    if needed > available:
        raise UserError(
            f"calibrating {directory} on a CPU needs {needed / 2**30:.1f} GiB for its weights in float32, "
            f"and {available / 2**30:.1f} GiB are free; calibrate on a GPU, or on a larger machine"
        )


def generate_sample(model: Any, dataset_dir: Path, tokenizer: Path) -> dict[str, Json]:
    """Have the fake-quantized model answer a question that was held out: the figure that everybody can read.

    Args:
        dataset_dir: What `stages.dataset.freeze` left.
        tokenizer: The checkpoint's tokenizer.json.

    Returns:
        "prompt", "answer" (greedy, at most 64 tokens), and "expected", the answer of the data set.
    """
    from tokenizers import Tokenizer

    prompt = json.loads((dataset_dir / "dataset.json").read_text(encoding="utf-8"))["prompt"]
    tokens = torch.tensor([prompt["tokens"]], device=model.device)
    with torch.inference_mode():
        generated = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=_MOST_TOKENS,
            max_time=_MOST_SECONDS,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=0,
        )[0, tokens.shape[1] :]
    words: Any = Tokenizer.from_file(str(tokenizer))
    text = words.decode(generated.tolist(), skip_special_tokens=True)
    return {"prompt": prompt["text"], "answer": text.strip(), "expected": prompt["expected"]}
