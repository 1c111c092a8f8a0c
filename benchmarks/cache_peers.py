"""Our response cache beside its peers: the same questions and embeddings, one process after another, in one run.

    python benchmarks/cache_peers.py [--entries 10000] [--only ours,redis:RedisVL] [--environments FOLDER]

Peers are installed into environments of their own (benchmarks/peers/requirements-*.txt). Redis, with its query engine,
is the server that the tests install. Times are medians of single calls from one thread, the embedding not counted; ours
have the making of the key in them, as the peers' have. Bytes are those of an entry beside its answer.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.common import ENVIRONMENTS, HERE, peer_environment
from tests.support.servers import RedisServer

DIMENSIONS, TOPICS, QUERIES = 384, 2000, 1000
WAYS = (
    "ours:SQLite", "ours:Unchecked", "ours:Memory",
    "redis:RedisVL", "redis:LangChainSemantic", "gptcache:GPTCache",
    "redis:LangChainMemory", "redis:LangChainRedis", "redis:LiteLLMLocal", "redis:LiteLLMDisk", "redis:LiteLLMRedis",
)  # fmt: skip
FIGURES = ("hit", "near", "miss", "store", "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=10_000)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--environments", type=Path, default=ENVIRONMENTS)
    chosen = parser.parse_args()
    names = [name for name in WAYS if any(name.startswith(wanted) for wanted in chosen.only.split(","))]
    pythons = {kind: python(kind, chosen.environments) for kind in {name.partition(":")[0] for name in names}}
    print(f"{chosen.entries:,} entries; ms, but for bytes an entry and the recall of near questions")
    print(f"{'':24}" + "".join(f"{figure:>10}" for figure in (*FIGURES, "recall")))
    measured: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as folder, RedisServer(search=True) as server:
        write_questions(Path(folder), chosen.entries)
        for name in names:
            figures = run(pythons[name.partition(":")[0]], name, Path(folder), chosen.entries, server.url)
            if figures is not None:
                measured[name] = figures
                print(
                    f"{name:24}" + "".join(number(figures, figure) for figure in (*FIGURES, "recall")),
                    flush=True,
                )
    ratios(measured)


def python(kind: str, environments: Path) -> Path:
    """The interpreter with what a kind of peer needs; installed on the first run."""
    return Path(sys.executable) if kind == "ours" else peer_environment(kind, environments) / "python"


def write_questions(folder: Path, count: int) -> None:
    """Embeddings around topics; a near question is a stored one, moved a little."""
    rng = np.random.default_rng(0)
    topics = rng.standard_normal((TOPICS, DIMENSIONS)).astype(np.float32)
    stored = unit(topics[rng.integers(TOPICS, size=count)] + 0.7 * rng.standard_normal((count, DIMENSIONS)))
    targets = rng.permutation(count)[:QUERIES]
    near = unit(stored[targets] + 0.02 * rng.standard_normal((len(targets), DIMENSIONS)))
    far = unit(rng.standard_normal((QUERIES, DIMENSIONS)))
    for name, array in {"stored": stored, "targets": targets, "near": near, "far": far}.items():
        np.save(folder / f"{name}.npy", array)


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def run(python: Path, name: str, folder: Path, count: int, redis_url: str) -> dict[str, float | None] | None:
    command = [str(python), str(HERE / "peers" / "measuring.py"), name, str(folder), str(count), redis_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(
            f"{name:24} not measured: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True
        )
        return None
    figures: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return figures


def number(figures: dict[str, float | None], figure: str) -> str:
    value = figures[figure]
    if value is None or (figure == "near" and not figures["recall"]):  # finds equal questions only
        return f"{'-':>10}"
    return f"{value:10,.0f}" if figure == "bytes" else f"{value:10.4f}"


def ratios(measured: dict[str, dict[str, float | None]]) -> None:
    """How many times as long, or as large, as ours."""
    base = next((name for name in ("ours:SQLite", "ours:Unchecked") if name in measured), None)
    if base is None:
        return
    ours = measured[base]
    print(f"times {base}")
    for name, figures in measured.items():
        told = ""
        for figure in FIGURES:
            mine, theirs = ours[figure], figures[figure]
            useless = not mine or theirs is None or (figure == "near" and not figures["recall"])
            told += f"{'-':>10}" if useless else f"{theirs / mine:10.1f}"  # type: ignore[operator]
        print(f"{name:24}{told}")


if __name__ == "__main__":
    main()
