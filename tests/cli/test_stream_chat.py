"""`pipeline chat` against the fake server: turns, commands, a history that gets too long, Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.client.testing import Ending, FakeServer, Received, Reply

TOKENIZER = Path(__file__).resolve().parents[2] / "recipes" / "checkpoints" / "support-target"


def words(server: FakeServer, *more: str) -> list[str]:
    chat = [sys.executable, "-m", "pipeline.cli.main", "chat"]
    return [*chat, "--url", server.url, "--tokenizer", str(TOKENIZER), *more]


def chat(server: FakeServer, stdin: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words(server, *more), capture_output=True, text=True, input=stdin, timeout=60, check=False
    )


def questions(received: Received) -> list[str]:
    """What users said in a prompt, oldest first."""
    parts = received.prompt.split("<|start_header_id|>user<|end_header_id|>\n\n")[1:]
    return [part.split("<|eot_id|>")[0] for part in parts]


def test_turns_remember_each_other() -> None:
    with FakeServer([Reply(["One."]), Reply(["Two."])]) as server:
        done = chat(server, "first\n\nsecond\n", "--system", "Be brief.")
    assert done.stdout == "One.\nTwo.\n"
    assert done.stderr == ""
    assert done.returncode == 0
    assert [questions(request) for request in server.requests] == [["first"], ["first", "second"]]
    assert "assistant<|end_header_id|>\n\nOne.<|eot_id|>" in server.requests[1].prompt
    assert "system<|end_header_id|>\n\nBe brief.<|eot_id|>" in server.requests[1].prompt


def test_commands() -> None:
    stdin = "/stats\nfirst\n/stats\n/reset\nsecond\n/system Be kind.\n/system\nthird\n/what\n/quit\nnever\n"
    with FakeServer() as server:
        done = chat(server, stdin)
    assert done.stdout == "Hello world\n" * 3
    assert [questions(request) for request in server.requests] == [["first"], ["second"], ["third"]]
    assert "Be kind." in server.requests[2].prompt
    assert done.stderr.startswith("no answer yet\nTTFT ")
    assert "\nBe kind.\n" in done.stderr
    assert "no command /what" in done.stderr


def test_a_history_that_gets_too_long_loses_its_oldest_turns() -> None:
    def short_memory(received: Received) -> Reply:
        if len(questions(received)) > 2:
            error = "input_lengths = 900: prompts may have 512 tokens here"
            return Reply([], ending=Ending.ERROR, error=error)
        return Reply(["Yes."])

    with FakeServer(short_memory) as server:
        done = chat(server, "a\nb\nc\nd\n")
    assert done.stdout == "Yes.\n" * 4
    assert done.stderr == "[too long for the model: forgot the oldest turn]\n" * 2
    assert questions(server.requests[-1]) == ["c", "d"]
    assert done.returncode == 0


def test_a_question_that_is_too_long_by_itself_costs_no_history() -> None:
    def script(received: Received) -> Reply:
        if "long" in received.prompt:
            error = "Prompt length (900) exceeds maximum input length (512)."
            return Reply([], ending=Ending.ERROR, error=error)
        return Reply(["Yes."])

    with FakeServer(script) as server:
        done = chat(server, "a\nlong\nb\n")
    assert done.stdout == "Yes.\nYes.\n"
    assert done.stderr == "pipeline: Prompt length (900) exceeds maximum input length (512).\n"
    assert questions(server.requests[-1]) == ["a", "b"]
    assert done.returncode == 1


def test_a_failed_turn_is_told_and_forgotten() -> None:
    with FakeServer([Reply(ending=Ending.ERROR, error="boom"), Reply()]) as server:
        done = chat(server, "a\nb\n")
    assert done.stdout == "Hello world\nHello world\n"
    assert done.stderr == "pipeline: boom (after 2 chunks of the answer, 11 characters)\n"
    assert questions(server.requests[1]) == ["b"]
    assert done.returncode == 1


def test_neither_recipe_nor_url() -> None:
    chat = [sys.executable, "-m", "pipeline.cli.main", "chat"]
    done = subprocess.run(chat, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "give a RECIPE, or the --url of a server" in done.stderr


class Terminal:
    """Our end of a terminal that a program runs in."""

    def __init__(self, arguments: list[str]) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            arguments, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self._unread = ""

    def expect(self, text: str) -> None:
        """Read on until `text` has come."""
        until = time.monotonic() + 30
        while text not in self._unread:
            assert time.monotonic() < until, self._unread
            if select.select([self._ours], [], [], 0.1)[0]:
                self._unread += os.read(self._ours, 65536).decode()
        self._unread = self._unread.partition(text)[2]

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, again if need be: one that comes just before Python reads a line waits for that line to end."""
        until = time.monotonic() + 30
        while text not in self._unread:
            assert time.monotonic() < until, self._unread
            self.process.send_signal(signal.SIGINT)
            if select.select([self._ours], [], [], 1)[0]:
                self._unread += os.read(self._ours, 65536).decode()
        self._unread = self._unread.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    script = [Reply(["word "] * 1000, delay_s=0.02), Reply(["Fine."])]
    with FakeServer(script) as server, Terminal(words(server)) as terminal:
        terminal.expect("> ")
        terminal.type("first\n")
        terminal.expect("word word")
        terminal.process.send_signal(signal.SIGINT)
        terminal.expect("[stopped]")
        assert server.requests[0].cancelled.wait(5)
        terminal.expect("> ")
        terminal.interrupt_until("/quit or Ctrl-D leaves")  # at the prompt
        terminal.expect("> ")
        terminal.type("second\n")
        terminal.expect("Fine.")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) == 0
    assert questions(server.requests[1]) == ["first", "second"]
    assert "assistant<|end_header_id|>\n\nword word" in server.requests[1].prompt
