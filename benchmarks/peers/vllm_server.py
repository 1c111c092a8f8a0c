"""vLLM's own API server on an engine that only says tokens: its HTTP, its chat template and its events, without CUDA.

    python vllm_server.py PORT TOKENS GAP_MS FOLDER [--api-server-option …]

Written against vLLM 0.33. The engine takes the place of `AsyncLLM` (an `EngineClient`, vllm/engine/protocol.py): the
request is rendered and tokenized by vLLM's own code, and each token comes as the `RequestOutput` that its detokenizer
would have made. So what vLLM does besides in the process of its API server is left out: the messages of its engine over
ZeroMQ, and detokenizing. FOLDER is a checkpoint with a chat template.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvloop
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

# Before anything of vLLM asks for it: the wheel is for CUDA, and finds no platform here.
vllm.platforms._current_platform = CpuPlatform()

from vllm.engine.protocol import EngineClient  # noqa: E402
from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: E402
from vllm.entrypoints.launchers.api_server import entry  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402

PORT, TOKENS, GAP_S, FOLDER = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) / 1e3, sys.argv[4]


class StandInEngine(EngineClient):
    """Says the same words to everybody, each GAP_S after the one before."""

    is_running, is_stopped, errored, dead_error = True, False, False, RuntimeError("it never dies")

    def __init__(self, config: Any) -> None:
        self.vllm_config, self.model_config = config, config.model_config
        self.renderer = renderer_from_config(config)
        self.input_processor = InputProcessor(config, self.renderer)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncIterator[RequestOutput]:
        ids = list(prompt["prompt_token_ids"])
        # A stream gets what is new, an answer as a whole all of it at its end.
        whole = sampling_params.output_kind is RequestOutputKind.FINAL_ONLY
        begun, said = asyncio.get_running_loop().time(), ""
        for number in range(TOKENS):
            pause_s = begun + number * GAP_S - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, pause_s) if GAP_S else 0)
            text, last = f"token{number} ", number == TOKENS - 1
            said += text
            if whole and not last:
                continue
            tokens = range(TOKENS) if whole else (number,)
            output = CompletionOutput(0, said if whole else text, tokens, None, None)
            output.finish_reason = "stop" if last else None
            yield RequestOutput(request_id, None, ids, None, [output], last)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def is_tracing_enabled(self) -> bool:
        return False

    async def check_health(self) -> None:
        pass

    async def do_log_stats(self) -> None:
        pass

    async def abort(self, request_id: Any) -> None:
        pass


# What nobody asks of a stand-in.
StandInEngine.__abstractmethods__ = frozenset()


@asynccontextmanager
async def stand_in(engine_args: Any, **_: Any) -> AsyncIterator[StandInEngine]:
    """Takes the place of `build_async_engine_client_from_engine_args`."""
    yield StandInEngine(engine_args.create_engine_config())


def main() -> None:
    entry.build_async_engine_client_from_engine_args = stand_in
    words = ["--model", FOLDER, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", PORT]
    words += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512"]
    words += ["--disable-uvicorn-access-log", "--disable-log-stats", *sys.argv[5:]]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(arguments)
    uvloop.run(entry.run_server(arguments))


if __name__ == "__main__":
    main()
