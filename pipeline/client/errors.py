"""The errors that a client raises, as one tree, and how gRPC's and Triton's errors become them.

    ClientError
    ├── Refused                    the request is wrong: unknown parameter, bad value, bad prompt
    │   └── PromptTooLong          the prompt has more tokens than the engine takes
    ├── ModelNotFound              the server has no such model, or has not loaded it
    ├── ConnectFailed              the server cannot be reached or asked now, or was lost before the first token
    ├── DeadlineExceeded
    │   ├── FirstTokenDeadline     no token within `Timeouts.first_token_s`
    │   └── BetweenTokensDeadline  no further token within `Timeouts.between_tokens_s`
    ├── Cancelled                  the answer was stopped, by `cancel()`, by closing the client, or by the server
    └── ServerFailed               the model raised an error
        ├── ServerLost             the server, or a process of the model, was lost in the middle of the answer
        └── Busy                   the server's queue is full; nothing of the answer had come

What is raised in the middle of an answer says how much of it had come, and has it as `text`. Nothing of an answer that
had begun is ever repeated by a retry; `ServerLost.partial` lets a new stream go on after it.

Each message is one line that can be shown to a user. Mistakes in the use of the library itself (a closed client, a
stream outside of its `with` block) are RuntimeError.

Statuses are those of gRPC; messages those of Triton 24.10 and TensorRT-LLM 1.0 to 1.2.

>>> try:
...     answer = client.generate("Hi", temprature=0.5)  # doctest: +SKIP
... except Refused as error:
...     print(error)
unknown parameter 'temprature' (did you mean 'temperature'?)
"""

from __future__ import annotations

import re
from collections.abc import Collection

import grpc

from pipeline.client.answer import PartialAnswer


class ClientError(Exception):
    """Base class of all errors of a request.

    Attributes:
        request_id: the id under which the server logged the request; empty if the error concerns no one request.
        url: host:port of the server that was asked; empty if none was.
        text: the text of the answer that had come before.
    """

    url = ""
    text = ""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class Refused(ClientError):
    """The request is wrong, and repeating it would not help. Most mistakes are found before anything is sent."""


class PromptTooLong(Refused):
    """The prompt has more tokens than the engine takes; nothing was sent.

    Attributes:
        tokens: number of tokens of the prompt; a lower bound if `at_least`.
        most: number of tokens that the engine takes.
        at_least: the prompt is so long that it was refused without being tokenized.
    """

    def __init__(self, tokens: int, most: int, *, at_least: bool = False) -> None:
        self.tokens, self.most, self.at_least = tokens, most, at_least
        super().__init__(f"the prompt has {self.count} tokens, and this model takes at most {most}")

    @property
    def count(self) -> str:
        """The number of tokens as text: "9" or "at least 9"."""
        return f"at least {self.tokens}" if self.at_least else str(self.tokens)


class ModelNotFound(ClientError):
    """The server has no model of that name."""


class ConnectFailed(ClientError):
    """No server could be reached, or it was lost before the first token, or cannot run the model now. Retrying is safe.

    A server that is there cannot run the model while it starts or stops, and after a process of the model died.

    Attributes:
        taken: whether the server may have begun to work on the request, and so be lost because of it.
    """

    taken: bool = False


class DeadlineExceeded(ClientError):
    """The server was too slow. The request has been cancelled on the server, too."""


class FirstTokenDeadline(DeadlineExceeded):
    """No token came within `Timeouts.first_token_s` of sending the request."""


class BetweenTokensDeadline(DeadlineExceeded):
    """No chunk came within `Timeouts.between_tokens_s` of the chunk before."""


class Cancelled(ClientError):
    """The answer was stopped before its end: by `cancel()`, by closing the client, or by the server."""


class ServerFailed(ClientError):
    """The answer broke off: the model raised an error, or the server was lost."""


class ServerLost(ServerFailed):
    """The server or a process of the model was lost in the middle of the answer. Asking again is safe.

    Attributes:
        partial: part of the answer that had come, for `stream(…, prior=…)`; None if the tokens are not known, because
            the request did not ask for them (`token_ids=True`).
    """

    partial: PartialAnswer | None = None


class Busy(ServerFailed):
    """The server's queue is full and it turned the request away. Retrying later, or on another server, is safe."""


# What Triton says of a full queue: "Exceeds maximum queue size".
_QUEUE_FULL = "queue size"
# How Triton refuses a request that another server, or the same one after a restart, would answer: the process of a
# Python model is dead (`python_backend`), models are being unloaded or not loaded yet, the server stops (`core`).
_UNAVAILABLE = re.compile(
    r"\bstub process\b.*\bis not healthy|failed to obtain the health mutex|has no available versions"
    r"|is not at ready state|server not ready|server is stopping",
    re.IGNORECASE,
)
# How gRPC's C core words the loss of a connection where its status is not UNAVAILABLE, but one of these.
_BROKEN = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
# What gRPC says where nothing listens.
_NEVER_CONNECTED = "failed to connect to all addresses"
_CONNECTION_LOST = re.compile(
    r"RST_STREAM|GOAWAY|connection reset|stream removed|socket closed", re.IGNORECASE
)
# TensorRT-LLM reports it as a failure of its own: "Prompt length (9) exceeds maximum input length (8)."
_TOO_LONG = re.compile(r"\b(prompt|input)\b.{0,60}\b(exceeds?|too long|longer than)\b", re.IGNORECASE)
# How a model's complaint about an input begins: "max_tokens = 0".
_INPUT_VALUE = re.compile(r"[a-z_]+ = ")
# What an engine calls the parameters that have another name in requests.
_ENGINE_INPUTS = {"request_output_len": "max_tokens", "runtime_top_k": "top_k", "runtime_top_p": "top_p"}
_CANCELLED = re.compile(r"\bcancell?ed\b", re.IGNORECASE)


def error_from_status(error: grpc.RpcError, *, url: str, started: bool = False) -> ClientError:
    """Convert the error of a gRPC call.

    Args:
        error: with `code()` and `details()`.
        started: whether a part of the answer had come.
    """
    code, text = error.code(), one_line(error.details() or str(error.code()))
    status = grpc.StatusCode
    if _UNAVAILABLE.search(text) or (code in _BROKEN and _CONNECTION_LOST.search(text)):
        return lost(text, url=url, started=started)
    if "unknown model" in text.lower() or code is status.NOT_FOUND:
        return ModelNotFound(text)
    match code:
        case status.UNAVAILABLE if _QUEUE_FULL in text and not started:
            return Busy(f"the server has too much to do: {text}")
        case status.UNAVAILABLE | status.DEADLINE_EXCEEDED:
            return lost(text, url=url, started=started)
        case status.INVALID_ARGUMENT | status.OUT_OF_RANGE | status.FAILED_PRECONDITION:
            return Refused(text)
        case status.UNAUTHENTICATED | status.PERMISSION_DENIED | status.UNIMPLEMENTED:
            return Refused(f"{url} refuses the call: {text}")
        case status.CANCELLED:
            return Cancelled(text)
        case _:
            return ServerFailed(text)


def lost(text: str, *, url: str, started: bool) -> ClientError:
    """Make the error of a server that was lost, or cannot run the model now.

    Args:
        text: reason, as gRPC or Triton say it.
        started: whether a part of the answer had come.
    """
    if started:
        return ServerLost(f"the server was lost in the middle of the answer: {text}")
    error = ConnectFailed(f"no answer from {url}: {text}")
    error.url, error.taken = url, _NEVER_CONNECTED not in text
    return error


def error_from_message(
    message: str, *, url: str, at_admission: bool, inputs: Collection[str] = (), started: bool = False
) -> ClientError:
    """Convert the error message of a stream response, which carries no status code.

    With the header `triton_grpc_error` Triton would end the stream with a status instead, but then it crashes when a
    model sends anything after its error, as TensorRT-LLM's do (seen with 24.10). So the text has to decide.

    Args:
        message: as Triton sent it.
        url: host:port of the server.
        at_admission: Triton refused the request before a model saw it.
        inputs: names of the model's inputs. A model of this project that refuses a request begins its message with the
            input: "max_tokens = 0: must be …".
        started: whether a part of the answer had come.
    """
    text = one_line(message)
    subject, colon, reason = text.partition(": ")
    engines, equals, value = subject.partition(" = ")
    if equals and engines in _ENGINE_INPUTS:
        subject = f"{_ENGINE_INPUTS[engines]} = {value}"
        text = f"{subject}: {reason}"
    names_input = colon and (_INPUT_VALUE.match(subject) or subject in inputs)
    if _UNAVAILABLE.search(text) and not names_input:
        return lost(text, url=url, started=started)
    if "unknown model" in text.lower():
        return ModelNotFound(text)
    if _QUEUE_FULL in text:
        return Busy(f"the server has too much to do: {text}")
    if at_admission or _TOO_LONG.search(text) or names_input:
        return Refused(text)
    return Cancelled(text) if _CANCELLED.search(text) else ServerFailed(text)


def one_line(text: str) -> str:
    """Return the line that says what happened: the last of a Python traceback, else the first.

    >>> one_line("Traceback (most recent call last):\\n  File ...\\nValueError: too long\\n")
    'ValueError: too long'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return lines[-1] if any("Traceback (most recent call last)" in line for line in lines) else lines[0]
