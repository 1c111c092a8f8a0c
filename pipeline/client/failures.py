"""Turns what gRPC and Triton report into the errors of this package, each with one readable line."""

from __future__ import annotations

import re

import grpc

from pipeline.client.errors import Cancelled, ClientError, ConnectFailed, ModelNotFound, Refused, ServerFailed

Code = grpc.StatusCode
_BUSY = "queue size"  # Triton: "Exceeds maximum queue size"
# TensorRT-LLM reports it as a failure of its own: "Prompt length (9) exceeds maximum input length (8)."
_TOO_LONG = re.compile(r"\b(prompt|input)\b.{0,60}\b(exceeds?|too long|longer than)\b", re.IGNORECASE)


def from_status(error: grpc.RpcError, *, url: str, started: bool = False) -> ClientError:
    """For a call that ended with a status. `started`: some of the answer had come."""
    code, text = error.code(), one_line(error.details() or str(error.code()))
    if "unknown model" in text.lower() or code is Code.NOT_FOUND:
        return ModelNotFound(text)
    if _TOO_LONG.search(text):
        return Refused(text)
    match code:
        case Code.UNAVAILABLE if started:
            return ServerFailed(f"the server was lost in the middle of the answer: {text}")
        case Code.UNAVAILABLE if _BUSY in text:
            return ServerFailed(f"the server has too much to do: {text}")
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


def from_message(message: str, *, at_admission: bool) -> ClientError:
    """For an error inside the stream, which carries no code."""
    text = one_line(message)
    if "unknown model" in text.lower():
        return ModelNotFound(text)
    if _TOO_LONG.search(text):
        return Refused(text)
    return Refused(text) if at_admission and _BUSY not in text else ServerFailed(text)


def one_line(text: str) -> str:
    """The line that says what happened: of a Python traceback the last, else the first.

    >>> one_line("Traceback (most recent call last):\\n  File ...\\nValueError: too long\\n")
    'ValueError: too long'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return lines[-1] if any("Traceback (most recent call last)" in line for line in lines) else lines[0]
