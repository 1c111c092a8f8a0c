"""Cost of a batch for the requests that somebody waits for: streams alone, and beside a batch that never runs dry.

    python benchmarks/batches.py [--streams N] [--rounds N] [--batch-slots N] [--recipe NAME] [--json]

A real engine behind the gateway that `pipeline serve` starts. Streams alone and streams beside a batch take turns,
round by round; the load is that of `pipeline bench`: so many streams, each of which asks again when its answer has
ended. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.closed_loop import closed_loop
from benchmarks.common import in_turns, markdown, serving
from pipeline.bench.targets import OpenAITarget
from pipeline.bench.workload import ScriptedConversation, Turn
from pipeline.store import Store

CHAT = "/v1/chat/completions"
WAIT_S = 60
REQUESTS = 20_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one load."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tokens_per_s: float
    batch_per_s: float  # requests of the batch that were answered meanwhile


@contextmanager
def batch_running(client: httpx.Client, model: str) -> Iterator[str]:
    """Run a batch of more requests than a round can answer, until the block ends."""
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT, "body": {
            "model": model, "max_tokens": 64, "messages": [{"role": "user", "content": f"Where is parcel {number}?"}]
        }}
        for number in range(REQUESTS)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.post(
        "/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}
    ).raise_for_status()
    asked = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    id = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
    wait_until(client, id, lambda batch: answered(batch) > 0)
    try:
        yield id
    finally:
        client.post(f"/v1/batches/{id}/cancel", json={}).raise_for_status()
        wait_until(client, id, lambda batch: batch["status"] == "cancelled")


def answered(batch: dict[str, Any]) -> int:
    """Count the requests of a batch that are over."""
    return int(batch["request_counts"]["completed"] + batch["request_counts"]["failed"])


def wait_until(client: httpx.Client, id: str, holds: Any) -> None:
    """Wait for a state of a batch."""
    deadline = time.monotonic() + WAIT_S
    while not holds(batch := client.get(f"/v1/batches/{id}").raise_for_status().json()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the batch does not go on: {batch}")
        time.sleep(0.1)


def measure(client: httpx.Client, model: str, streams: int, beside: bool) -> Sample:
    """Put so many streams on the gateway, for a few answers of each."""
    if not beside:
        return asyncio.run(load(str(client.base_url), model, streams, lambda: 0))
    with batch_running(client, model) as id:
        return asyncio.run(
            load(
                str(client.base_url), model, streams, lambda: answered(client.get(f"/v1/batches/{id}").json())
            )
        )


async def load(url: str, model: str, streams: int, batch_answers: Any) -> Sample:
    """Run one load."""
    conversation = ScriptedConversation((Turn("Where is my parcel?"),))
    before, began = batch_answers(), time.monotonic()
    target = OpenAITarget(url.rstrip("/"), model, timeout_s=WAIT_S)
    _, level = await closed_loop(target, conversation, streams, 8 * streams, tokens=64)
    ttft, itl = level.latencies["ttft"], level.latencies["itl"]
    done = (batch_answers() - before) / (time.monotonic() - began)
    return Sample(ttft.p50, ttft.p99, itl.p50, itl.p99, level.output_tokens_per_s, done)


def median(taken: list[Sample], key: str) -> float:
    """Median of one figure over the rounds."""
    return round(statistics.median(getattr(run, key) for run in taken), 2)


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    head = (
        f"{result['streams']} streams",
        "TTFT p50",
        "p99",
        "ITL p50",
        "p99",
        "tokens/s",
        "batch requests/s",
    )
    latencies = ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
    rows = [
        (
            row["way"],
            *(f"{row[key]:.1f} ms" for key in latencies),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['batch_per_s']:.1f}",
        )
        for row in result["rows"]
    ]
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="tiny-cpu")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch-slots", type=int, help="slots of the gateway for batches")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    chosen = parser.parse_args()
    slots = [] if chosen.batch_slots is None else ["--set", f"gateway.batch_slots={chosen.batch_slots}"]
    with tempfile.TemporaryDirectory() as folder:
        words = (
            chosen.recipe,
            "--build",
            "--port",
            "0",
            "--set",
            f"gateway.batch_folder={folder}/batches",
            *slots,
        )
        with (
            serving(words, chosen.recipe, Store.at(None), Path(folder)) as served,
            httpx.Client(base_url=served.record.gateway_url, timeout=WAIT_S, trust_env=False) as client,
        ):
            ways = {"alone": False, "beside a batch": True}
            found = in_turns(
                ways,
                lambda beside: measure(client, chosen.recipe, chosen.streams, beside),
                chosen.rounds,
                warm_up=1,
            )
    rows = [
        {"way": name, **{key: median(taken, key) for key in asdict(taken[0])}}
        for name, taken in found.items()
    ]
    result = {"streams": chosen.streams, "rounds": chosen.rounds, "rows": rows}
    print(json.dumps(result, indent=1) if chosen.json else table(result))


if __name__ == "__main__":
    main()
