"""Record what every command prints and writes, what a deployment answers, and what a build leaves, as text files.

    scripts/record_behaviour FOLDER         record with the code of this checkout
    scripts/record_behaviour --compare A B  diff two recordings

`commands.txt` has the commands, in sections; `ask.py` sends the requests of `requests.yaml`. Paths, ports, ids, digests
and times are masked, so that two recordings of one commit are equal. Nothing but the command line and HTTP is used, so
that the folder can be copied into any checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PORTS = ("GATEWAY_PORT", "GRPC_PORT", "METRICS_PORT", "HTTP_PORT", "SECOND_PORT")
LARGEST_TEXT = 256 * 2**10
AT_ONCE = 6

# What differs from run to run, in every output.
MASKS = [
    (r"\x1b\[[0-9;]*[A-Za-z]", ""),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d)?", "TIME"),
    (r"\d{4}-\d\d-\d\d", "DATE"),
    (r"\b(?=[0-9a-f-]*\d)[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "UUID"),
    (r"(?<![0-9a-zA-Z])(?=[a-f]*\d)[0-9a-f]{12,64}(?![0-9a-zA-Z])", "DIGEST"),
    (r"\b(chatcmpl|cmpl|resp|msg|msgbatch|file|batch|batch_req|req|call|toolu|fc|rs|tr)[-_][0-9A-Za-z]{12,}", r"\1-ID"),
    (r'("(?:\w+_at|created|pid|uptime_s|mtime_ns|memory_bytes|started)": ?)\d+(?:\.\d+)?', r"\1N"),
    (r"\b(process|pid) \d+", r"\1 N"),
    (r"\b(127\.0\.0\.1|localhost):\d+", r"\1:PORT"),
    (r"pipeline-[\w.]{8}/", "pipeline-XXXXXXXX/"),
    # The sample answer of calibration ends after a minute, wherever it is.
    (r"(Your refund of \$26\.99 was sent).*", r"\1…"),
    (r'("bytes": \d{3,})\d\d\b', r"\1NN"),
    (r"^( +(?:pass_)?seconds): .*", r"\1: T"),
    (r"\bmade in +[\d.]+ s +", "made in T s  "),
    (r"\bwarm: [\d.]+ ms", "warm: T ms"),
    (r"\b(took|after|in) +\d+(?:\.\d+)? (s|ms|min)\b", r"\1 T \2"),
    (r"\b\d[\d,]* years? and|\b\d+(?:\.\d+)? (GiB|MiB|KiB) (?:free|available)", "N free"),
    (r'"(?:wall_s|seconds|duration_s|build_s|took_s|elapsed_s|samples_per_s)": ?\d+(?:\.\d+)?', '"seconds": N'),
]  # fmt: skip
# Lines of progress, of which a slow machine prints more; and warnings of libraries.
PROGRESS = re.compile(
    r"^ +[^:\n]+: (?:\d[\d.]*(?: [KMG]?i?B)?/.*|\d[\d.]* (?:\w+ )?in [\d.]+ s|\d[\d.]* s)\n"
    r"|^.*(?:Future|User)Warning.*\n",
    re.MULTILINE,
)
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?%?")


class Recorder:
    """Runs commands in a folder with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.work, self.store = folder / "work", folder / "store"
        shutil.copytree(HERE / "inputs", self.work)
        self.ports = dict(zip(PORTS, map(str, _free_ports(len(PORTS))), strict=True))
        python = Path(sys.prefix) / "bin"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIPELINE_")},
            **self.ports,
            "PATH": f"{self.work / 'bin'}:{python}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PIPELINE_STORE": str(self.store),
            "TREE": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "120",
            "NO_COLOR": "1",
            "TERM": "dumb",
            "HOME": str(folder / "home"),
        }
        self._masks = self._own_masks(folder)

    def _own_masks(self, folder: Path) -> list[tuple[str, str]]:
        names = {
            self.store: "STORE",
            self.work: "WORK",
            folder: "FOLDER",
            ROOT: "TREE",
            Path(sys.prefix): "PYTHON",
        }
        paths = [(re.escape(str(path)), name) for path, name in names.items()]
        return [*paths, *((rf"\b{port}\b", name) for name, port in self.ports.items())]

    def mask(self, text: str, *, measured: bool = False) -> str:
        """Replace what differs from run to run; where figures are measured, also all numbers and widths of columns."""
        text = PROGRESS.sub("", text)
        for pattern, replacement in [*self._masks, *MASKS]:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        if measured:
            text = re.sub(r"[─-▟⠀-⣿]+", "▁", NUMBER.sub("N", text))
            text = re.sub(r"[ -]{2,}", "  ", text)
        return text

    def run(self, command: str, *, measured: bool) -> str:
        """The command with its exit code, its output, and what it says on standard error."""
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", timeout=3600, check=False,
        )  # fmt: skip
        errors = "".join(f"2> {line}\n" for line in self.mask(done.stderr, measured=measured).splitlines())
        return f"$ {command}\n[{done.returncode}]\n{self.mask(done.stdout, measured=measured)}{errors}\n"

    def copy(self, source: Path, into: Path) -> None:
        """Write the files of a folder, masked; of binary files size and digest, of Python's only their names."""
        listed: list[str] = []
        names = _artifact_names(source)
        for path in sorted(source.rglob("*")):
            first, *rest = path.relative_to(source).parts
            name = self.mask("/".join((names.get(first, first), *rest)))
            if path.is_symlink():
                listed.append(f"{name} -> {self.mask(os.readlink(path))}")
            elif not path.is_file() or "__pycache__" in path.parts or path.suffix in (".sock", ".lock"):
                continue
            elif path.suffix == ".py":
                listed.append(name)
            elif (text := _text(path)) is None:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                listed.append(f"{name}  {path.stat().st_size}  {digest}")
            else:
                measured = "bench" in name or path.suffix in (".log", ".html")
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                (into / name).write_text(self.mask(text, measured=measured), encoding="utf-8")
        into.mkdir(parents=True, exist_ok=True)
        (into / "LISTING").write_text("\n".join(sorted(listed)) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/record_behaviour",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--compare", action="store_true", help="diff two recordings")
    parser.add_argument("--only", metavar="SECTION,…", help="run only these sections")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.compare:
        return subprocess.run(["diff", "-r", *options.folders], check=False).returncode
    (folder,) = options.folders
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="record-") as place:
        recorder = Recorder(Path(place).resolve())
        for section, commands in _sections(HERE / "commands.txt").items():
            if options.only is None or section in options.only.split(","):
                print(section, file=sys.stderr, flush=True)
                run = partial(recorder.run, measured="measured" in section)
                with ThreadPoolExecutor(AT_ONCE if "parallel" in section else 1) as pool:
                    outputs = list(pool.map(run, commands))
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{section}.txt").write_text("".join(outputs), encoding="utf-8")
        recorder.copy(recorder.work, folder / "written")
        recorder.copy(recorder.store / "artifacts", folder / "store")
        recorder.copy(recorder.store / "reports", folder / "reports")
    return 0


def _sections(file: Path) -> Mapping[str, list[str]]:
    """Name -> its commands, a line each."""
    sections: dict[str, list[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            sections[line[3:]] = []
        elif line and not line.startswith("#"):
            sections[list(sections)[-1]].append(line)
    return sections


def _artifact_names(folder: Path) -> Mapping[str, str]:
    """Folder of an artifact -> stage, recipe and number: digests change with the code, and order with them."""
    made: list[tuple[str, str, str]] = []
    for file in folder.glob("*/manifest.json"):
        manifest = json.loads(file.read_text(encoding="utf-8"))
        name = file.parent.name
        made.append(
            (manifest["provenance"]["created"], name, f"{name.partition('-')[0]}-{manifest['recipe']}")
        )
    names: dict[str, str] = {}
    for _, name, label in sorted(made):
        names[name] = f"{label}-{sum(other.startswith(f'{label}-') for other in names.values()) + 1}"
    return names


def _text(path: Path) -> str | None:
    if path.stat().st_size > LARGEST_TEXT:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


if __name__ == "__main__":
    sys.exit(main())
