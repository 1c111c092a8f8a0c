"""Health, answers and bad input, as KServe's two clients see them: prints what each call returned or raised."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from typing import Any

import grpc
import httpx
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

URL, GRPC = f"http://{os.environ['TRITON_HTTP']}", os.environ["TRITON_GRPC"]
MODEL, PROMPT = "tensorrt_llm_bls", sys.argv[1]


def request(prompt: str = PROMPT, dtype: str = "INT32", max_tokens: int | None = 8) -> InferRequest:
    inputs = [
        InferInput("text_input", [1, 1], "BYTES", [prompt]),
        InferInput("exclude_input_in_output", [1, 1], "BOOL", [True]),
    ]
    if max_tokens is not None:
        inputs.append(InferInput("max_tokens", [1, 1], dtype, [max_tokens]))
    return InferRequest(MODEL, inputs)


async def outcome(call: Any) -> Any:
    """What a call returns, or [status, message] of what it raises."""
    try:
        found = await call
    except grpc.aio.AioRpcError as error:
        return [error.code().name, error.details()]
    except httpx.HTTPStatusError as error:
        return [error.response.status_code, str(error)]
    except ValueError as error:
        return [type(error).__name__, str(error)]
    if isinstance(found, bool):
        return found
    text = next(output for output in found.outputs if output.name == "text_output").as_numpy()[0]
    return text.decode() if isinstance(text, bytes) else text


async def main() -> None:
    logging.disable()
    faults = {
        "wrong dtype": {"dtype": "INT64"}, "missing input": {"max_tokens": None},
        "long prompt": {"prompt": "word " * 3000},
    }  # fmt: skip
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    async with InferenceGRPCClient(GRPC) as client:
        said = {
            "rest": {
                "answer": await outcome(rest.infer(URL, request(), model_name=MODEL)),
                "model": await outcome(rest.is_model_ready(URL, MODEL)),
                "ready": await outcome(rest.is_server_ready(URL)),
                "faults": {
                    name: await outcome(rest.infer(URL, request(**fault), model_name=MODEL))
                    for name, fault in faults.items()
                },
            },
            "grpc": {
                "answer": await outcome(client.infer(request())),
                "model": await outcome(client.is_model_ready(MODEL)),
                "ready": await outcome(client.is_server_ready()),
                "live": await outcome(client.is_server_live()),
                "faults": {
                    name: await outcome(client.infer(request(**fault))) for name, fault in faults.items()
                },
            },
        }
    await rest.close()
    print(json.dumps(said))


asyncio.run(main())
