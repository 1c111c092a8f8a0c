"""One page in headless Chromium, by the DevTools protocol over a pipe: no port, and no further package."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.downloads import Chromium

# The browser reads commands from descriptor 3 and writes to 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip
_ANSWER_S = 60.0


class Page:
    """What a person would do with it; every answer has a deadline."""

    def __init__(self, commands: int, answers: int) -> None:
        """Ends of the two pipes."""
        self._commands, self._answers, self._rest, self._count = commands, answers, b"", 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def load(self, url: str) -> None:
        """Open an address, and wait until it is there."""
        self._call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression."""
        told = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def text(self, selector: str) -> str:
        """Of an element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    def click(self, selector: str) -> None:
        """With the mouse's button, in the middle of an element."""
        box = self.value(
            f"(({{x, y, width, height}}) => ({{x: x + width / 2, y: y + height / 2}}))"
            f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **box)

    def type(self, text: str) -> None:
        """Into what has the focus, then Enter."""
        self._call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key="Enter",
                code="Enter",
                text="\r",
                windowsVirtualKeyCode=13,
            )

    def press(self, key: str) -> None:
        """A key that writes nothing, such as Escape."""
        for kind in ("rawKeyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def resize(self, width: int, height: int) -> None:
        """As on a screen of so many CSS pixels."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=0,
            mobile=False,
        )

    def wait_for(self, expression: str, timeout_s: float = _ANSWER_S) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline, (
                f"{expression} did not come true; the page says:\n{self.text('body')}"
            )
            time.sleep(0.02)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        command: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            message = self._read(deadline)
            if message.get("id") == self._count:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._answers, 65536) if ready else b""
            assert data, "the browser does not answer"
            self._rest += data
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message


@contextmanager
def opened(browser: Chromium) -> Iterator[Page]:
    """A browser with one page; ended at the end, with all that it wrote."""
    (their_commands, commands), (answers, their_answers) = os.pipe(), os.pipe()
    high = [
        fcntl.fcntl(command, fcntl.F_DUPFD, 10) for command in (their_commands, their_answers)
    ]  # not 3, not 4
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, tempfile.TemporaryFile() as log:
        command = [
            sys.executable, "-c", _LAUNCH, *map(str, high), str(browser.program), *_FLAGS, f"--user-data-dir={profile}",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env=browser.environment, pass_fds=high, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        for shown_command in (their_commands, their_answers, *high):
            os.close(shown_command)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            process.kill()
            process.wait(20)
