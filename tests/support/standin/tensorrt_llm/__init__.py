"""A stand-in for TensorRT-LLM, for tests of the `llmapi` model under a real Triton.

Its classes and calls are made from the signatures of the release in `release.json`. It refuses what the contract
says that upstream refuses, needs the checkpoint that it is pointed at, and makes up text, token by token, that only
depends on the prompt and the seed. There is no model in it. Set by the environment:

    STANDIN_TOKEN_S   seconds a token takes (0.002)
    STANDIN_STATUS    a folder, for one file a process that says what it has done
    STANDIN_RANKS     ranks that MPI has (1)
"""

from tensorrt_llm.engine import LLM
from tensorrt_llm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
