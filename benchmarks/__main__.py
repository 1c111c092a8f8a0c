"""Run the measurements, keep their figures in benchmarks/results.json, and renew the pages that show them.

    python -m benchmarks                    all, one after the other (hours), then the pages
    python -m benchmarks client gateway     these
    python -m benchmarks --list             what there is, and how long each takes
    python -m benchmarks --small            each as small as it can be: whether all still work; nothing is kept
    python -m benchmarks soak --from FILE   keep what the command printed into FILE when somebody ran it
    python -m benchmarks --page             only the pages, from what is kept
    python -m benchmarks --check            whether the pages are what is kept; exit code 1 if they are not

Nothing else should run on the machine. In the pages, what stands between `<!-- measured: NAME -->` and `<!-- end -->`
is written here, or one table of it with `NAME/PART`; a measurement that has not been kept leaves its place as it is.
Exit code 1 says that a command failed, or that a bound which it holds is broken: its figures are kept all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, markdown
from benchmarks.measurements import MEASUREMENTS, Measurement
from pipeline.machine.host import processor_name

RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "measurements.md"
PAGES = (PAGE, ROOT / "docs" / "explanation" / "fleet.md")
BLOCK = re.compile(r"(<!-- measured: (?P<name>\S+) -->\n)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def measure(name: str, measurement: Measurement, *, small: bool) -> dict[str, Any] | None:
    """Run one command, and make its record; None if it gave no figures."""
    line = f"{measurement.line} {measurement.small}".strip() if small else measurement.line
    load = round(os.getloadavg()[0], 1)
    print(f"{name}: {line} (about {measurement.minutes:g} minutes)", file=sys.stderr, flush=True)
    # The programs of this interpreter's environment first, whatever is called `python` here.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    done = subprocess.run(
        shlex.split(line), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, stdin=subprocess.DEVNULL,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"},
    )  # fmt: skip
    seconds = round(time.monotonic() - began)
    print(f"{name}: exit code {done.returncode} after {seconds} s", file=sys.stderr, flush=True)
    return kept_of(measurement, line, done.stdout, datetime.now(UTC), load, done.returncode)


def kept_of(
    measurement: Measurement, line: str, printed: str, made: datetime, load: float | None, exit_code: int
) -> dict[str, Any] | None:
    """Make the record of a command that has run; None if it gave no figures."""
    kept = {
        "command": line.replace(" --json", ""),
        "made": made.isoformat(timespec="minutes"),
        "machine": {
            "processors": os.cpu_count(),
            "processor": processor_name(),
            "system": platform.system(),
            "load_before": load,
        },
        "exit_code": exit_code,
    }
    if not measurement.has_table:
        return {**kept, "output": printed} if printed.strip() else None
    try:
        return {**kept, "result": json.loads(printed)}
    except ValueError:
        return None


def rendered(name: str, kept: dict[str, Any]) -> str:
    """Render one measurement for the page."""
    machine = kept["machine"]
    where = f"{machine['processors']} processors"
    if processor := machine.get("processor"):
        where += f" ({processor})"
    if machine["load_before"] is not None:
        where += f", load {machine['load_before']:g} before it"
    head = f"`{kept['command']}`, {kept['made'][:10]}, {where}:"
    if MEASUREMENTS[name].has_table:
        return f"{head}\n\n{MEASUREMENTS[name].table(kept['result'])}\n"
    lines = (line.rstrip() for line in kept["output"].strip("\n").splitlines())
    return "\n".join([head, "", "```text", *lines, "```", ""])


def listed() -> str:
    """Make the table of all commands."""
    rows = [
        (f"`{measurement.command}`", measurement.what, f"{measurement.minutes:g}")
        for measurement in MEASUREMENTS.values()
    ]
    return markdown(("command", "what it measures", "minutes"), rows) + "\n"


def page_of(text: str, results: dict[str, Any]) -> str:
    """Fill the kept figures into a page.

    Raises:
        KeyError: It has a place for something that is no measurement.
    """

    def block(found: re.Match[str]) -> str:
        name, _, part = found["name"].partition("/")
        if name == "list":
            return f"{found[1]}\n{listed()}\n{found[4]}"
        if name not in MEASUREMENTS:
            raise KeyError(f"there is no measurement {name}")
        if name not in results:
            return found[0]
        measurement = MEASUREMENTS[name]
        text = (
            f"{measurement.table(results[name]['result'], part)}\n" if part else rendered(name, results[name])
        )
        return f"{found[1]}\n{text}\n{found[4]}"

    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--list", action="store_true", help="what there is")
    ways.add_argument("--small", action="store_true", help="as small as can be; nothing is kept")
    ways.add_argument("--from", dest="file", type=Path, metavar="FILE", help="what a command has printed")
    ways.add_argument("--page", action="store_true", help="only write the pages")
    ways.add_argument("--check", action="store_true", help="only compare the pages")
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.names if name not in MEASUREMENTS]:
        parser.error(f"no measurement: {', '.join(unknown)}; there are {', '.join(MEASUREMENTS)}")
    if chosen.list:
        for name, measurement in MEASUREMENTS.items():
            print(f"{name:<18}{measurement.minutes:>5g} min   {measurement.line}")
        return 0
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    if chosen.file and len(chosen.names) != 1:
        parser.error("--from takes the name of one measurement")
    failed = []
    if not (chosen.page or chosen.check):
        for name in chosen.names or MEASUREMENTS:
            measurement = MEASUREMENTS[name]
            if chosen.file:
                made = datetime.fromtimestamp(chosen.file.stat().st_mtime, UTC)
                kept = kept_of(
                    measurement, measurement.line, chosen.file.read_text(encoding="utf-8"), made, None, 0
                )
            else:
                kept = measure(name, measurement, small=chosen.small)
            if kept is None or kept["exit_code"]:
                failed.append(name)
            if kept is not None and chosen.small:
                print(rendered(name, kept))
            elif kept is not None:
                # After each, so that hours are not lost with the last one.
                results[name] = kept
                RESULTS.write_text(
                    json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
                )
    pages = {page: page.read_text(encoding="utf-8") for page in PAGES}
    changed = {page: new for page, old in pages.items() if (new := page_of(old, results)) != old}
    names = ", ".join(str(page.relative_to(ROOT)) for page in changed)
    if chosen.check:
        print(f"python -m benchmarks --page changes {names}" if changed else "the pages are what is kept")
        return int(bool(changed))
    if changed and not chosen.small:
        for page, text in changed.items():
            page.write_text(text, encoding="utf-8")
        print(f"renewed: {names}", file=sys.stderr)
    if failed:
        print(f"failed, or a bound is broken: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
