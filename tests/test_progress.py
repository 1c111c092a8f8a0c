"""Progress: lines for logs, and live ones for terminals."""

from __future__ import annotations

import io
import threading

from pipeline.progress import Lines, Terminal, human_bytes


class Stream(io.StringIO):
    """Sets an event as soon as something is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_work_that_does_not_advance_is_shown_all_the_same() -> None:
    stream = Stream()
    with Lines(stream, interval_s=0.01).task("importing ModelOpt"):
        assert stream.written.wait(60)
    assert stream.getvalue().startswith("    importing ModelOpt: 0 s\n")


def test_of_nested_tasks_the_inner_one_is_shown() -> None:
    stream = Stream()
    lines = Lines(stream, interval_s=0.01)
    with lines.task("outer"):
        assert stream.written.wait(60)
        with lines.task("inner", 4, "files") as task:
            stream.truncate(stream.seek(0))
            task.advance(2)
            while "inner: 2/4 files" not in stream.getvalue():
                stream.written.clear()
                assert stream.written.wait(60)
    assert "outer" in stream.getvalue().splitlines()[-1]


def test_each_advance_is_a_line_without_an_interval() -> None:
    stream = Stream()
    with Lines(stream, interval_s=0).task("read", 2048, "B") as task:
        task.advance(1024)
    assert [line.partition(",")[0] for line in stream.getvalue().splitlines()] == [
        "    read: 1.0 KiB/2.0 KiB",
        "    read: 1.0 KiB in 0.0 s",
    ]


def test_terminal_tasks_may_be_nested() -> None:
    terminal = Terminal()
    with terminal.task("outer"), terminal.task("inner", 4, "files") as task:
        task.advance(4)
        terminal.say("said in between")
    with terminal.task("another"):
        pass


def test_bytes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 2**40)] == ["0 B", "1023 B", "1.0 KiB", "1.0 TiB"]
