"""The part of the LLM API that a server needs beside LLM."""

from typing import Any

from tensorrt_llm.sampling_params import GuidedDecodingParams

__all__ = ["GuidedDecodingParams", "MpiCommSession"]


class MpiCommSession:
    def __init__(self, comm: Any, n_workers: int) -> None:
        self.comm, self.n_workers = comm, n_workers
