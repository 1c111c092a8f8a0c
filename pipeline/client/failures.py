"""Turns what gRPC and Triton report into the errors of this package, each with one readable line.

Triton could end a stream with the status of an error (header `triton_grpc_error`), but then crashes when a model sends
anything after its error, as TensorRT-LLM's do (seen with 24.10). So we do without, and go by the text.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import grpc

from pipeline.client.errors import (
    Busy,
    Cancelled,
    ClientError,
    ConnectFailed,
    ModelNotFound,
    Refused,
    ServerFailed,
)

Code = grpc.StatusCode
_BUSY = "queue size"  # Triton: "Exceeds maximum queue size"
# TensorRT-LLM reports it as a failure of its own: "Prompt length (9) exceeds maximum input length (8)."
_TOO_LONG = re.compile(r"\b(prompt|input)\b.{0,60}\b(exceeds?|too long|longer than)\b", re.IGNORECASE)

_VALUE = re.compile(r"[a-z_]+ = ")  # begins what names an input and its value
_CANCELLED = re.compile(r"\bcancell?ed\b", re.IGNORECASE)


def from_status(error: grpc.RpcError, *, url: str, started: bool = False) -> ClientError:
    """For a call that ended with a status. `started`: some of the answer had come."""
    code, text = error.code(), one_line(error.details() or str(error.code()))
    if "unknown model" in text.lower() or code is Code.NOT_FOUND:
        return ModelNotFound(text)
    match code:
        case Code.UNAVAILABLE if started:
            return ServerFailed(f"the server was lost in the middle of the answer: {text}")
        case Code.UNAVAILABLE if _BUSY in text:
            return Busy(f"the server has too much to do: {text}")
        case Code.UNAVAILABLE | Code.DEADLINE_EXCEEDED:
            return ConnectFailed(f"no answer from {url}: {text}")
        case Code.INVALID_ARGUMENT | Code.OUT_OF_RANGE | Code.FAILED_PRECONDITION:
            return Refused(text)
        case Code.UNAUTHENTICATED | Code.PERMISSION_DENIED | Code.UNIMPLEMENTED:
            return Refused(f"{url} refuses the call: {text}")
        case Code.CANCELLED:
            return Cancelled(text)
        case _:
            return ServerFailed(text)


def from_message(message: str, *, at_admission: bool, inputs: Collection[str] = ()) -> ClientError:
    """For an error inside a stream, which carries no code.

    `at_admission`: Triton did not let the request in. A model that refuses a request names the input first, as those
    of this project do: "max_tokens = 0: must be …"; `inputs` are the names that it may mean.
    """
    text = one_line(message)
    subject, colon, _ = text.partition(": ")
    if "unknown model" in text.lower():
        return ModelNotFound(text)
    if _BUSY in text:
        return Busy(f"the server has too much to do: {text}")
    if at_admission or _TOO_LONG.search(text) or (colon and (_VALUE.match(subject) or subject in inputs)):
        return Refused(text)
    return Cancelled(text) if _CANCELLED.search(text) else ServerFailed(text)


def one_line(text: str) -> str:
    """The line that says what happened: of a Python traceback the last, else the first.

    >>> one_line("Traceback (most recent call last):\\n  File ...\\nValueError: too long\\n")
    'ValueError: too long'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return lines[-1] if any("Traceback (most recent call last)" in line for line in lines) else lines[0]
