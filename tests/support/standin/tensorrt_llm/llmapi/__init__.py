"""The part of the LLM API that a server needs beside LLM."""

from __future__ import annotations

from typing import Any

from tensorrt_llm.release import Parameters, bound
from tensorrt_llm.sampling_params import GuidedDecodingParams

__all__ = ["GuidedDecodingParams", "LoRARequest", "MpiCommSession", "RequestError"]


class RequestError(RuntimeError):
    """Error that upstream raises for a prompt that is too long, and where an answer is awaited."""


class LoRARequest(Parameters):
    lora_ckpt_source: str

    def check(self) -> None:
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source must be 'hf' or 'nemo', got '{self.lora_ckpt_source}'")


class MpiCommSession:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.comm, self.n_workers = bound("MpiCommSession", *args, **kwargs).values()
