"""The CPU engine beside OpenVINO GenAI and llama.cpp: one model of random weights, the same shapes, lengths and bits.

    python benchmarks/cpu_peers.py [--rounds 3] [--only ours,genai:Q8_0] [--samples FILE [--within 150]] [--json]
    python benchmarks/cpu_peers.py --dry-run                     what would be made and measured

Streams have 64 tokens in and 96 out, greedy, and no token ends them; tokens/s are all answers by the time from the
prompts to the last token. The first token is that of a prompt of 1,024. Each sample is a process of its own, on as many
threads as there are cores, and the engines take turns, round by round. Peers are installed into environments of their
own (benchmarks/peers/requirements-*.txt; llama.cpp is compiled for this processor, some minutes), and read GGUF files
made of the checkpoint that ours are built from. With `--samples`, what FILE has is not measured again, so that a long
measurement can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ENVIRONMENTS, HERE, ROOT, markdown, peer_environment
from benchmarks.peers.random_llama import make

# Bits of a weight in the layers -> engines and forms. 32 bits are for reference: no peer computes so by default.
WAYS = {
    32: ("ours:f32",),
    16: ("ours:bf16", "genai:F16", "llamacpp:BF16", "llamacpp:F16"),
    8: ("ours:fp8", "ours:int8_sq", "genai:Q8_0", "llamacpp:Q8_0"),
    4: ("ours:int4_awq", "genai:Q4_0", "llamacpp:Q4_0"),
}
ALL = tuple(way for ways in WAYS.values() for way in ways)
RATES = ("tokens_per_s_1", "tokens_per_s_8", "tokens_per_s_16")
COSTS = ("first_token_s", "resident_mb")  # less is better
Sample = dict[str, Any]

RECIPE = """\
name: {name}
model: {{source: "local:{model}"}}
quantization: {{format: {format}{calibration}}}
runtime: {{kind: cpu, precision: {precision}}}
limits: {{max_input_tokens: 1024, max_output_tokens: 128, max_concurrency: 16}}
"""
CALIBRATION = ", calibration: {dataset: support, samples: 16, max_tokens: 64, allow_sample_count: true}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of our figures beside the better peer's of as many bits.

    Attributes:
        times: Median over the rounds of how many times as good ours is.
        least: The same in the round that was worst for us; `most` in the best one.
    """

    peer: str
    times: float
    least: float
    most: float

    @property
    def word(self) -> str:
        """Level where the rounds do not agree on who is ahead."""
        if self.least > 1:
            return "ahead"
        return "behind" if self.most < 1 else "level"


def verdict(ours: Sequence[float], peers: Mapping[str, Sequence[float]], *, less_is_better: bool) -> Verdict:
    """Compare samples of the same rounds with those of the peer that has the best median."""
    best = (min if less_is_better else max)(peers, key=lambda peer: statistics.median(peers[peer]))
    times = [
        theirs / own if less_is_better else own / theirs
        for own, theirs in zip(ours, peers[best], strict=False)
    ]
    return Verdict(best, statistics.median(times), min(times), max(times))


class Workshop:
    """Makes environments and models, each once."""

    def __init__(self, folder: Path, environments: Path) -> None:
        self.folder, self.environments = folder, environments
        self.checkpoint, self.store = folder / "checkpoint", folder / "store"
        self._models: dict[str, Path] = {}

    def python(self, kind: str) -> Path:
        if kind == "ours":
            return Path(sys.executable)
        return peer_environment(kind, self.environments) / "python"

    def model(self, way: str) -> Path:
        """Folder of the model for a way; made on the first run."""
        if way not in self._models:
            kind, _, form = way.partition(":")
            make(self.checkpoint)
            self._models[way] = self._engine(form) if kind == "ours" else self._gguf(form)
        return self._models[way]

    def recipe(self, form: str) -> Path:
        """Write the recipe of a form, whose package belongs into `store`."""
        make(self.checkpoint)
        plain = form in ("f32", "bf16")
        recipe = self.folder / f"{form}.yaml"
        text = RECIPE.format(
            name=f"random-llama-{form.replace('_', '-')}",
            model=self.checkpoint.resolve(),
            format="none" if plain else form,
            calibration="" if plain else CALIBRATION,
            precision="f32" if form == "f32" else "auto",
        )
        recipe.write_text(text, encoding="utf-8")
        return recipe

    def _gguf(self, form: str) -> Path:
        files = self.folder / "gguf"
        if not (files / f"{form}.gguf").is_file():
            say(f"writing GGUF files into {files}")
            command = [self.python("llamacpp"), HERE / "peers" / "gguf_files.py", self.checkpoint, files]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return files

    def _engine(self, form: str) -> Path:
        """Build a recipe for this form up to its engine."""
        from pipeline.prepare import prepare
        from pipeline.progress import Silent
        from pipeline.recipe import load_recipe
        from pipeline.stages import Builder
        from pipeline.store import Store

        store = Store.at(self.store)
        recipe = load_recipe(self.recipe(form))
        step = Builder(prepare(recipe, store), store, Silent()).run("build.target")
        store.close()
        return step.path


def sample(workshop: Workshop, way: str, threads: int) -> Sample:
    """Measure one way once, in a process of its own."""
    command = [workshop.python(way.partition(":")[0]), HERE / "peers" / "decoding.py", way]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, command), str(workshop.model(way)), str(threads)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr}")
    found: Sample = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    workshop: Workshop, ways: Sequence[str], rounds: int, threads: int, file: Path | None, within_s: float
) -> dict[str, list[Sample]]:
    """Samples of each way, one a round; those that `file` has are taken from there."""
    have: dict[str, list[Sample]] = {}
    if file and file.is_file():
        for line in file.read_text(encoding="utf-8").splitlines():
            kept = json.loads(line)
            have.setdefault(kept.pop("way"), []).append(kept)
    for way in ways:  # so that none of it is in the time that is left
        workshop.python(way.partition(":")[0])
        workshop.model(way)
    began, slowest = time.monotonic(), 0.0
    for number in range(rounds):
        # Forwards and backwards, so that no way always follows the same one.
        for way in ways if number % 2 == 0 else reversed(ways):
            if len(have.get(way, ())) > number:
                continue
            if time.monotonic() - began + slowest > within_s:
                raise SystemExit(f"--within is over; round {number + 1} goes on at {way}")
            started = time.monotonic()
            taken = sample(workshop, way, threads)
            slowest = max(slowest, time.monotonic() - started)
            have.setdefault(way, []).append(taken)
            figures = ", ".join(f"{taken[name]:.4g}" for name in (*RATES, *COSTS))
            say(f"round {number + 1} of {rounds}, {way}: {figures}")
            if file:
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"way": way, **taken}) + "\n")
    return {way: have[way][:rounds] for way in ways}


def summary(samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Medians, verdicts, and how many of 16 answers begin as ours in f32 do."""
    exact = samples["ours:f32"][0]["first_tokens"] if "ours:f32" in samples else None
    rows, goals = [], []
    for way, taken in samples.items():
        names = (*RATES, *COSTS, "of_files_mb")
        row = {"way": way, **{name: statistics.median(run[name] for run in taken) for name in names}}
        if exact:
            row["as_f32"] = sum(a == b for a, b in zip(taken[0]["first_tokens"], exact, strict=True))
        rows.append({**row, "about": taken[0]["about"]})
    for bits, ways in WAYS.items():
        there = [way for way in ways if way in samples]
        peers = [way for way in there if not way.startswith("ours:")]
        for way in (way for way in there if way.startswith("ours:") and peers):
            goal: dict[str, Any] = {"way": way, "bits": bits}
            for name in (*RATES, *COSTS):
                line = verdict(
                    [taken[name] for taken in samples[way]],
                    {peer: [taken[name] for taken in samples[peer]] for peer in peers},
                    less_is_better=name in COSTS,
                )
                goal[name] = {"word": line.word, "peer": line.peer, "times": line.times,
                              "least": line.least, "most": line.most}  # fmt: skip
            goals.append(goal)
    rounds = max((len(taken) for taken in samples.values()), default=0)
    return {"rounds": rounds, "rows": rows, "goals": goals}


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    head = (
        "engine, weights",
        "1 stream",
        "8",
        "16",
        "first token",
        "resident",
        "of it files",
        "begin as f32",
    )
    rows = [
        (
            row["way"],
            *(f"{row[name]:,.0f}" for name in RATES),
            f"{row['first_token_s']:.2f} s",
            f"{row['resident_mb']:,.0f} MB",
            f"{row['of_files_mb']:,.0f} MB",
            f"{row['as_f32']} of 16" if "as_f32" in row else "",
        )
        for row in result["rows"]
    ]
    goal_head = ("ours beside the better peer", "1 stream", "8", "16", "first token", "resident")
    goals = [(goal["way"], *(cell(goal[name]) for name in (*RATES, *COSTS))) for goal in result["goals"]]
    about = {row["way"].partition(":")[0]: row["about"] for row in result["rows"]}
    lines = [f"Tokens/s, medians of {result['rounds']} rounds.", "", markdown(head, rows), ""]
    if goals:
        lines += [markdown(goal_head, goals), ""]
    return "\n".join([*lines, *(f"- {kind}: {text}" for kind, text in about.items())])


def cell(goal: Mapping[str, Any]) -> str:
    return f"{goal['word']} {goal['times']:.2f} ({goal['least']:.2f} to {goal['most']:.2f}), {goal['peer']}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen_ways(wanted: Iterable[str]) -> list[str]:
    return [way for way in ALL if any(way.startswith(start) for start in wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="samples of each; default: %(default)s")
    parser.add_argument("--only", default=",".join(ALL), help="engines, or forms of them, by how they begin")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: one a core")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="keep each sample, and go on from those")
    parser.add_argument(
        "--within", type=float, default=float("inf"), metavar="S", help="stop before this time"
    )
    parser.add_argument(
        "--folder", type=Path, default=ENVIRONMENTS / "cpu_peers", help="models, GGUF, packages"
    )
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS, help="where peers are installed")
    parser.add_argument("--dry-run", action="store_true", help="print what would be made and measured")
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    ways = chosen_ways(chosen.only.split(","))
    if not ways:
        parser.error(f"--only {chosen.only} names none of {', '.join(ALL)}")
    if chosen.dry_run:
        kinds = {way.partition(":")[0] for way in ways} - {"ours"}
        kinds = sorted({*kinds, "llamacpp"}) if kinds else []  # it writes the GGUF files of both
        print(f"{chosen.rounds} rounds of {', '.join(ways)}, on {chosen.threads} threads")
        print(f"environments: {', '.join(str(chosen.environments / kind) for kind in kinds) or 'none'}")
        print(f"models: {chosen.folder}")
        return
    workshop = Workshop(chosen.folder, chosen.environments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    result = summary(measure(workshop, ways, chosen.rounds, chosen.threads, chosen.samples, chosen.within))
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
