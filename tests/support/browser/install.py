"""Chromium's headless shell: $CHROMIUM, one on PATH, or Debian's package, unpacked beside the virtual environment.

    python -m tests.support.browser         called by scripts/test, so that tests need no network

The package and the libraries that this machine lacks (90 MB) come by apt-get download, which needs no root and installs
nothing. Chromium is not on PyPI.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "chromium-headless-shell"
_NAMES = (PACKAGE, "chrome-headless-shell", "chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 180


class Unavailable(Exception):
    """No browser can be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Chromium:
    """A browser that is there."""

    program: Path
    libraries: tuple[Path, ...] = ()  # folders of what this machine lacks

    @property
    def environment(self) -> dict[str, str]:
        """To run it in."""
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, self.libraries))}


@cache
def chromium() -> Chromium:
    """
    Raises:
        Unavailable: there is none, and Debian's cannot be fetched.
    """
    named = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if named:
        return Chromium(Path(named))
    folder = Path(sys.prefix) / "browsers" / PACKAGE
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            _fetch(Path(work))
            try:
                (Path(work) / "root").rename(folder)
            except OSError:
                if not folder.is_dir():  # else another test run was faster
                    raise
    program = next(folder.rglob(f"lib/chromium/{PACKAGE}"), None)
    if program is None:
        raise Unavailable(f"{folder} holds no {PACKAGE}: remove it to fetch it again")
    return Chromium(program, tuple({path.parent for path in folder.rglob("*.so*")}))


def _fetch(work: Path) -> None:
    """Unpack the package, and all that it needs and this machine has not, into `work`/root."""
    if shutil.which("apt-get") is None:
        raise Unavailable("no Chromium here, and no apt-get that could fetch it ($CHROMIUM names one)")
    listed = _run(work, "apt-get", "install", "--simulate", "--no-install-recommends", PACKAGE)
    packages = re.findall(r"^Inst (\S+) ", listed, re.MULTILINE)
    if not packages:
        raise Unavailable(f"apt-get knows no {PACKAGE} ($CHROMIUM names a browser)")
    _run(work, "apt-get", "download", "--quiet", *packages)
    for file in sorted(work.glob("*.deb")):
        _run(work, "dpkg", "-x", str(file), str(work / "root"))


def _run(work: Path, *command: str) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} takes longer than {_TIMEOUT_S} s") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:2])}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout
