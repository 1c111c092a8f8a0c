"""`pipeline chat` against the fake server: turns, commands, a history that gets too long, Ctrl-C."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time

from pipeline.client.testing import Ending, FakeServer, Received, Reply
from tests.cli.conftest import Run
from tests.cli.test_stream import COMMAND
from tests.support import CHECKPOINTS


def words(server: FakeServer, *more: str) -> list[str]:
    return ["chat", "--url", server.url, "--tokenizer", str(CHECKPOINTS / "support-target"), *more]


def questions(received: Received) -> list[str]:
    """What users said in a prompt, oldest first."""
    parts = received.prompt.split("<|start_header_id|>user<|end_header_id|>\n\n")[1:]
    return [part.split("<|eot_id|>")[0] for part in parts]


def test_turns_remember_each_other(run: Run) -> None:
    with FakeServer([Reply(["One."]), Reply(["Two."])]) as server:
        done = run(*words(server, "--system", "Be brief."), stdin="first\n\nsecond\n")
    assert done.out == "One.\nTwo.\n"
    assert done.err == ""
    assert done.code == 0
    assert [questions(request) for request in server.requests] == [["first"], ["first", "second"]]
    assert "assistant<|end_header_id|>\n\nOne.<|eot_id|>" in server.requests[1].prompt
    assert "system<|end_header_id|>\n\nBe brief.<|eot_id|>" in server.requests[1].prompt


def test_commands(run: Run) -> None:
    stdin = "/stats\nfirst\n/stats\n/reset\nsecond\n/system Be kind.\n/system\nthird\n/what\n/quit\nnever\n"
    with FakeServer() as server:
        done = run(*words(server), stdin=stdin)
    assert done.out == "Hello world\n" * 3
    assert [questions(request) for request in server.requests] == [["first"], ["second"], ["third"]]
    assert "Be kind." in server.requests[2].prompt
    assert done.err.startswith("no answer yet\nTTFT ")
    assert "\nBe kind.\n" in done.err
    assert "no command /what" in done.err


def test_a_history_that_gets_too_long_loses_its_oldest_turns(run: Run) -> None:
    def short_memory(received: Received) -> Reply:
        if len(questions(received)) > 2:
            error = "input_lengths = 900: prompts may have 512 tokens here"
            return Reply([], ending=Ending.ERROR, error=error)
        return Reply(["Yes."])

    with FakeServer(short_memory) as server:
        done = run(*words(server), stdin="a\nb\nc\nd\n")
    assert done.out == "Yes.\n" * 4
    assert done.err == "[too long for the model: forgot the oldest turn]\n" * 2
    assert questions(server.requests[-1]) == ["c", "d"]
    assert done.code == 0


def test_a_question_that_is_too_long_by_itself_costs_no_history(run: Run) -> None:
    def script(received: Received) -> Reply:
        if "long" in received.prompt:
            error = "Prompt length (900) exceeds maximum input length (512)."
            return Reply([], ending=Ending.ERROR, error=error)
        return Reply(["Yes."])

    with FakeServer(script) as server:
        done = run(*words(server), stdin="a\nlong\nb\n")
    assert done.out == "Yes.\nYes.\n"
    assert done.err == "pipeline: Prompt length (900) exceeds maximum input length (512).\n"
    assert questions(server.requests[-1]) == ["a", "b"]
    assert done.code == 1


def test_a_failed_turn_is_told_and_forgotten(run: Run) -> None:
    with FakeServer([Reply(ending=Ending.ERROR, error="boom"), Reply()]) as server:
        done = run(*words(server), stdin="a\nb\n")
    assert done.out == "Hello world\nHello world\n"
    assert done.err == "pipeline: boom (after 2 chunks of the answer, 11 characters)\n"
    assert questions(server.requests[1]) == ["b"]
    assert done.code == 1


def test_neither_recipe_nor_url(run: Run) -> None:
    done = run("chat")
    assert done.code == 2
    assert "give a RECIPE, or the --url of a server" in done.err


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
            self._read(0.1)
        self._unread = self._unread.partition(text)[2]

    def _read(self, timeout_s: float) -> None:
        if select.select([self._ours], [], [], timeout_s)[0]:
            try:
                self._unread += os.read(self._ours, 65536).decode()
            except OSError as error:
                raise AssertionError(f"the program left ({self.process.wait(30)}): {self._unread}") from error

    def interrupt_until(self, text: str) -> None:
        """Ctrl-C, again if need be: one that comes just before Python reads a line waits for that line to end."""
        until = time.monotonic() + 30
        while text not in self._unread:
            assert time.monotonic() < until, self._unread
            self.process.send_signal(signal.SIGINT)
            self._read(1)
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
    with FakeServer(script) as server, Terminal([*COMMAND, *words(server)]) as terminal:
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
