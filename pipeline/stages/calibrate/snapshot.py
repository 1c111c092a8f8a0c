"""Undo what an export does to the model, so that each export starts from what was calibrated.

ModelOpt's TensorRT-LLM export gives q, k and v common scales in place (with AWQ and SmoothQuant it rewrites
their weights, too), and writes the padded vocabulary into the model's configuration; a second export, or the
Hugging Face one, would begin from there. It replaces parameters and does not write into them, so keeping the
old ones costs no memory until they are replaced; scales are small and are copied.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Whatever happens to parameters, scales and configuration inside is undone."""
    parameters = {name: dict(module._parameters) for name, module in model.named_modules()}
    buffers = {name: _copies(module._buffers) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config.__dict__)
    try:
        yield
    finally:
        for name, module in model.named_modules():
            module._parameters.clear()
            module._parameters.update(parameters[name])
            module._buffers.clear()
            module._buffers.update(buffers[name])
        model.config.__dict__.clear()
        model.config.__dict__.update(config)


def _copies(buffers: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}
