"""Tries the chat template of a checkpoint in a process that the kernel ends when it takes too much time or memory.

    python -m pipeline.models.template_trial FOLDER CPU_S MEMORY_MIB       names each conversation before it is rendered

A template is a program that came with the weights. One that loops without end, or whose text grows without bounds, on
ordinary conversations is found here, before it is served. A template that does so for other messages only is not:
where chats are served, long ones are rendered in processes with limits of their own (`pipeline.gateway.text_server`).
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.models.chat_template import ChatTemplate, TemplateError

# For all conversations together; ordinary templates take a hundredth of either.
CPU_S, MEMORY_MIB = 10.0, 512
_TURNS, _WORDS = 500, 200
_OUT_OF_MEMORY = 3
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up an order.",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
    },
}


def try_template(tokenizer: Path, cpu_s: float = CPU_S, memory_mib: int = MEMORY_MIB) -> None:
    """Render a short, a long and a tool conversation with the template of a tokenizer's folder.

    A folder without a template, and a template that refuses a conversation, pass.

    Args:
        tokenizer: folder, see `ChatTemplate.from_directory`.
        cpu_s: processor time of all renderings together.
        memory_mib: memory besides that of Python.

    Raises:
        CheckpointError: the template takes more than the limits; the text names the conversation.
    """
    try:
        ChatTemplate.from_directory(tokenizer)
    except TemplateError:
        # Said by those who need one.
        return
    command = [sys.executable, "-m", "pipeline.models.template_trial", str(tokenizer)]
    done = subprocess.run(
        [*command, str(cpu_s), str(memory_mib)], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode == 0:
        return
    tried = "".join(done.stdout.splitlines()[-1:])
    if done.returncode == -signal.SIGPROF:
        reason = f"takes more than {cpu_s:g} s of processor time"
    elif done.returncode == _OUT_OF_MEMORY:
        reason = f"takes more than {memory_mib} MiB of memory"
    else:
        reason = f"ended its process with exit code {done.returncode}"
    raise CheckpointError(f"the chat template {reason}, for {tried} conversation")


def conversations() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each conversation, with the arguments of `ChatTemplate.render`."""
    question = {"role": "user", "content": "Where is my order?"}
    yield "a short", {"messages": [question]}
    roles = ("user", "assistant")
    text = "word " * _WORDS
    turns = [{"role": role, "content": text} for _ in range(_TURNS) for role in roles]
    yield "a long", {"messages": [{"role": "system", "content": "Be brief."}, *turns, question]}
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"order": "7"}},
    }
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": '{"state": "sent"}'},
    ]
    yield "a tool", {"messages": [question, *answers], "tools": [_TOOL]}


def main(template: ChatTemplate, cpu_s: float, memory_mib: int) -> int:
    """Take the limits, and render; the exit code, if the kernel does not end this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    for name, arguments in conversations():
        print(name, flush=True)
        try:
            template.render(**arguments)
        except TemplateError as error:
            if isinstance(error.__cause__, MemoryError):
                return _OUT_OF_MEMORY
    return 0


if __name__ == "__main__":
    _, folder, seconds, mebibytes = sys.argv
    try:
        code = main(ChatTemplate.from_directory(folder), float(seconds), int(mebibytes))
    except MemoryError:
        code = _OUT_OF_MEMORY
    # Nothing is cleaned up for want of memory.
    os._exit(code)
