"""Works on long texts of users: renders, tokenizes and validates, in processes that the kernel may end.

    python -m pipeline.gateway.text_server FOLDER CPU_S MEMORY_MIB [--tool-section]

FOLDER holds the tokenizer and its chat template. Standard input is a Unix socket on which each message is another
socket, for one worker. This process has read the tokenizer and compiled the template; workers are forks of it, which
take milliseconds to make, and share the memory. The kernel holds them to their limits: to processor time by
ITIMER_PROF, whose signal no library can put off, and to memory by RLIMIT_AS.

    gateway    {"do": "count", "text": "…"}     each message after its length, in 8 bytes
    worker     .                                the work begins
               {"result": 7, "cpu_s": 0.01}     or {"error": ["template" or "fault", text], "cpu_s": 0.01}

A worker that is ended says nothing more. `pipeline.gateway.text_processes` is the other end. Only what this needs is
imported, since each gateway has one of these for each model.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema

from pipeline.dropping_output import drop_unwritable_output
from pipeline.gateway.api.tools.prompt import load_chat_template
from pipeline.models.chat_template import ChatTemplate, TemplateError
from pipeline.reading import UnreadableFile, read_tokenizer

BEGUN = b"."
_LENGTH = struct.Struct("!Q")
_PIECE_BYTES = 2**18
_BYTES_PER_S = 1e6  # of the longest texts, on a slow machine
_NICENESS = 5  # streams and the engine go first
_MAX_KEPT_BYTES = 64 * 2**20  # memory of a worker, between two pieces of work
_MAX_FAULTS = 4  # of one schema
_NO_SCHEMAS = ("const", "default", "enum", "examples")  # keywords whose values are not schemas


class TextWork:
    """Work on long texts, with the tokenizer and the chat template of a model."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None) -> None:
        """`tokenizer` is a `tokenizers.Tokenizer`; `template` is None if the model has none."""
        self._tokenizer, self._template = tokenizer, template
        self.work: Mapping[str, Callable[..., Any]] = {
            "count": self.count, "encode": self.encode, "render": self.render, "schema_faults": schema_faults,
        }  # fmt: skip

    def count(self, text: str) -> int:
        """Count the tokens of a text, with those that are put around it."""
        return len(self._tokenizer.encode_batch_fast([text])[0])

    def encode(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and for each of them 1 if it was put around the text, else 0."""
        encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return encoding.ids, encoding.special_tokens_mask

    def render(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
        """Render a chat.

        Raises:
            TemplateError: the template does not take it.
        """
        assert self._template is not None, "chats are refused before"
        return self._template.render(messages, **settings)


def main(folder: Path, cpu_s: float, memory_mib: int, *, tool_section: bool) -> int:
    """Serve until the gateway closes its end; the exit code.

    Args:
        folder: folder of the tokenizer.
        cpu_s: processor time that a short piece of work may take, in seconds; see `cpu_budget_s`.
        memory_mib: memory that it may take besides what is shared.
        tool_section: see `load_chat_template`.
    """
    drop_unwritable_output()
    # The gateway ends this process, by closing the socket, when it has answered everything.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    # No worker is waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        tokenizer = read_tokenizer(folder / "tokenizer.json")
    except UnreadableFile as error:
        print(f"texts cannot be read: {error}", file=sys.stderr)
        return 1
    work = TextWork(tokenizer, load_chat_template(folder, tool_section=tool_section))
    # So that no worker has to load what validation needs.
    schema_faults('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    gc.freeze()
    gateway = socket.socket(fileno=sys.stdin.fileno())
    while True:
        message, sockets, _, _ = socket.recv_fds(gateway, 1, 1)
        if not message:
            return 0
        with socket.socket(fileno=sockets[0]) as asked:
            try:
                worker = os.fork()
            except OSError as error:
                print(f"texts cannot be read: {error}", file=sys.stderr)
                continue
            if worker == 0:
                gateway.close()
                _run(Worker(asked, work, cpu_s, memory_mib))


class Worker:
    """A process that does one piece of work after the other."""

    def __init__(self, gateway: socket.socket, work: TextWork, cpu_s: float, memory_mib: int) -> None:
        """Work comes on the socket `gateway`; see `main` for the bounds."""
        self._gateway, self._work, self._cpu_s = gateway, work, cpu_s
        os.nice(_NICENESS)
        # Where memory is short, rather this process is ended than the gateway; some containers forbid to say so.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        self._base = _memory_bytes()
        most = self._base + memory_mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def run(self) -> None:
        """Work until the gateway closes its end, or so much memory is kept that another worker is better."""
        while _memory_bytes() - self._base < _MAX_KEPT_BYTES:
            message = receive_message(self._gateway)
            if message is None:
                return
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, cpu_budget_s(self._cpu_s, len(message)))
            self._gateway.sendall(BEGUN)
            answer = self._answer(json.loads(message))
            message = None
            signal.setitimer(signal.ITIMER_PROF, 0)
            answer["cpu_s"] = time.process_time() - began
            send_message(self._gateway, json.dumps(answer).encode())

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": self._work.work[request.pop("do")](**request)}
        except TemplateError as error:
            return {"error": ["template", str(error)]}
        except MemoryError:
            raise
        except BaseException:
            # A panic of the tokenizer is no Exception.
            return {"error": ["fault", traceback.format_exc()]}


def cpu_budget_s(cpu_s: float, size: int) -> float:
    """Return the processor time that a request of `size` bytes may take; `cpu_s` for a short one."""
    return cpu_s + size / _BYTES_PER_S


def send_message(to: socket.socket, message: bytes) -> None:
    """Send a message, after its length."""
    to.sendall(_LENGTH.pack(len(message)))
    to.sendall(message)


def receive_message(of: socket.socket) -> bytes | None:
    """Receive a message; None if the other end is closed, or has gone."""
    head = _receive(of, _LENGTH.size)
    return None if head is None else _receive(of, *_LENGTH.unpack(head))


def _receive(of: socket.socket, size: int) -> bytes | None:
    received = bytearray()
    while len(received) < size:
        try:
            part = of.recv(min(size - len(received), _PIECE_BYTES))
        except ConnectionResetError:
            part = b""
        if not part:
            return None
        received += part
    return bytes(received)


def _run(worker: Worker) -> None:
    """Run a worker, and end this process, which is a fork: nothing of what it forked is to be cleaned up."""
    try:
        # What is ended for want of memory would say so there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        worker.run()
    except (MemoryError, BrokenPipeError):
        # Said by silence, as by whatever the kernel ends; or the gateway has gone.
        pass
    finally:
        os._exit(0)


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def schema_faults(text: str) -> list[tuple[str, str]]:
    """Find the first faults of a schema that is given as JSON: path within it, and what is wrong there."""
    schema = json.loads(text)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        errors = list(islice(kind(kind.META_SCHEMA).iter_errors(schema), _MAX_FAULTS))
        if not errors and (loop := _circular_reference(schema)) is not None:
            return [("", f"the reference {loop!r} leads back to itself")]
    except RecursionError:
        return [("", "is nested too deeply")]
    return sorted((error.json_path[1:], _short(_describe(error))) for error in errors)


def _circular_reference(schema: Any) -> str | None:
    """Find a reference that leads back to itself by references and `allOf` alone; None if there is none.

    Nothing can be validated against such a schema, and engines differ in how they fail at it. A schema that refers to
    itself from one of its properties or items, as that of a tree, is none of this kind.
    """
    followed: dict[int, bool] = {}  # id of a schema -> whether it is being followed

    def follow(part: Any, reference: str) -> str | None:
        if not isinstance(part, dict):
            return None
        if id(part) in followed:
            return reference if followed[id(part)] else None
        followed[id(part)] = True
        own = part.get("$ref")
        parts = [(_resolve(schema, own), own)] if isinstance(own, str) else []
        if isinstance(part.get("allOf"), list):
            parts += [(member, reference) for member in part["allOf"]]
        loops = (follow(*followed_part) for followed_part in parts)
        loop = next((loop for loop in loops if loop is not None), None)
        followed[id(part)] = False
        return loop

    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            if (loop := follow(part, "")) is not None:
                return loop
            rest += [inner for name, inner in part.items() if name not in _NO_SCHEMAS]
        elif isinstance(part, list):
            rest += part
    return None


def _resolve(schema: Any, reference: str) -> Any:
    """Resolve a reference into the schema itself (RFC 6901); None if it is no such reference, or leads nowhere."""
    if not reference.startswith("#"):
        return None
    part = schema
    for name in unquote(reference[1:]).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, dict):
            part = part.get(key)
        elif isinstance(part, list) and key.isdecimal() and int(key) < len(part):
            part = part[int(key)]
        else:
            return None
    return part


def _describe(error: jsonschema.ValidationError) -> str:
    """Describe an error without the meta-schema's own alternatives."""
    return f"{error.instance!r} is not allowed here" if error.context else str(error.message)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "…"


if __name__ == "__main__":
    _, where, seconds, mebibytes, *rest = sys.argv
    sys.exit(main(Path(where), float(seconds), int(mebibytes), tool_section="--tool-section" in rest))
