"""Fire every alert of `pipeline monitoring` once, for real, and run every query of its dashboard.

    python benchmarks/alerts.py [--prometheus PROGRAM] [--speedup 20] [--keep FOLDER]

A real Prometheus reads the rendered rules, with windows and waits divided by `--speedup`, and scrapes two gateways:

- one in front of scripted model servers (`pipeline.client.testing.FakeServer`), a model for each kind of trouble: slow
  tokens, stalled streams, failures, a queue that grows, a jump in tokens, a wrong hit of the cache that is reported;
- `pipeline serve` of the small pair on the `cpu` runtime, whose KV cache is filled, whose Triton is killed, and which
  is ended at last.

First all is calm, for as long as the medians need to be compared with; then all trouble begins at once. Printed are
the seconds until each alert fired, and how many panels of the dashboard got data. Exit code 1 says that an alert did
not fire or that a panel stayed empty. Prometheus is in Debian's package of that name; 2.42 or newer.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.common import serving
from pipeline.cache.response_cache import ResponseCache
from pipeline.cache.sqlite import SqliteBackend
from pipeline.client import AsyncClient, ChatTemplate, ClientError, PromptLimit
from pipeline.client.testing import Ending, FakeServer, Reply
from pipeline.deploy.alerts import TimeScale, alerts_of, target_down
from pipeline.deploy.monitoring import WatchedDeployment, monitoring_files
from pipeline.gateway.app import Gateway, GatewayServer
from pipeline.gateway.fair_queue import FairQueue
from pipeline.gateway.served_model import ServedModel
from pipeline.gateway.tenants import Tenants
from pipeline.recipe import Recipe, load_recipe
from pipeline.store import Store
from pipeline.triton.running import RunningServer

START_S, TROUBLE_S = 180.0, 240.0
# Of Prometheus' time, without the speed-up: what the medians of 30 minutes are made of.
CALM_S = 1200.0
# What becomes of the real deployment comes after all else.
OF_THE_DEPLOYMENT = {
    "PipelineKvCachePressure",
    "PipelineRestarted",
    "PipelineNotReady",
    "PipelineTargetDown",
}
TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.content }}\n{% endfor %}")


@dataclass
class Script:
    """A model of the scripted gateway: what it answers while all is calm, and what in trouble."""

    calm: Reply
    trouble: Reply
    requests_per_s: tuple[float, float]
    slo: dict[str, float] = field(default_factory=dict)
    places: int = 64
    cached: bool = False
    # s without a token, after which a stream counts as stalled.
    stall_s: float = 5.0


WORDS = tuple(f"token{n} " for n in range(40))
SCRIPTS = {
    "slow": Script(
        Reply(WORDS[:4], first_delay_s=0.02, delay_s=0.01),
        Reply(WORDS[:4], first_delay_s=1.5, delay_s=0.5),
        (2, 3),
        slo={"ttft_p95_ms": 500, "itl_p95_ms": 200},
    ),
    "spiky": Script(Reply(WORDS[:2]), Reply(WORDS), (1, 4)),
    "stalling": Script(Reply(WORDS[:2]), Reply(WORDS[:2], ending=Ending.HANG), (1, 0.5), stall_s=1.0),
    "queueing": Script(Reply(WORDS[:1]), Reply(WORDS[:1], first_delay_s=2.0), (0.5, 2), places=1),
    "failing": Script(Reply(WORDS[:2]), Reply(WORDS[:2], ending=Ending.ERROR), (1, 1)),
    "cached": Script(Reply(WORDS[:2]), Reply(WORDS[:2]), (1, 1), cached=True),
}


class Trouble:
    """Whether it has begun."""

    def __init__(self) -> None:
        self.began: float | None = None

    def reply(self, script: Script) -> Callable[[object], Reply]:
        return lambda _: script.calm if self.began is None else script.trouble


def recipe_of(name: str, script: Script) -> Recipe:
    return load_recipe(
        "tiny-cpu",
        (f"name={name}", f"slo={json.dumps(script.slo)}", f"cache.enabled={json.dumps(script.cached)}"),
    )


@contextmanager
def scripted_gateway(trouble: Trouble, folder: Path) -> Iterator[GatewayServer]:
    """A gateway of this process, in front of a fake server for each script."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with ExitStack() as stack:
        served = {}
        for name, script in SCRIPTS.items():
            upstream = stack.enter_context(FakeServer(trouble.reply(script)))
            cache = ResponseCache(SqliteBackend(folder / "cache.db")) if script.cached else None
            served[name] = ServedModel(
                name=name, created=0, deployment="drill", client=AsyncClient(upstream.url, template=TEMPLATE),
                template=TEMPLATE, prompt_limit=PromptLimit(tokenizer, 4096), max_output_tokens=4096,
                queue=FairQueue(script.places, max_waiting=1024), cache=cache, stall_s=script.stall_s,
            )  # fmt: skip
        server = GatewayServer(Gateway(served, Tenants()), "127.0.0.1", 0, drain_s=1)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started, START_S, "the scripted gateway")
        yield server
        server.should_exit = True
        thread.join(30)


class Prometheus:
    """A Prometheus of its own, with the files of a folder."""

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        self._command = [program, "--config.file", str(folder / "prometheus.yml"), "--log.level", "warn"]
        self._command += ["--storage.tsdb.path", str(folder / "data")]
        self._port = free_port()

    @contextmanager
    def running(self) -> Iterator[None]:
        address = f"127.0.0.1:{self._port}"
        with subprocess.Popen(
            [*self._command, "--web.listen-address", address], stdout=sys.stderr
        ) as process:
            try:
                wait_until(lambda: self._answers(), START_S, "Prometheus")
                yield
            finally:
                process.terminate()

    def ask(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def firing(self) -> set[tuple[str, str]]:
        """Names of alerts that fire, with the model."""
        return {
            (alert["labels"]["alertname"], alert["labels"].get("model", ""))
            for alert in self.ask("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def has_data(self, query: str) -> bool:
        return any(
            value not in ("NaN", "+Inf")
            for series in self.ask("/api/v1/query", query=query)["result"]
            for value in series["value"][1:]
        )

    def _answers(self) -> bool:
        with suppress(OSError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5).status == 200
        return False


@asynccontextmanager
async def scripted_load(url: str, record: RunningServer, trouble: Trouble) -> AsyncIterator[None]:
    """Requests at the rate of each script, and one a second to the real deployment, until the block ends."""
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(120), trust_env=False) as http,
        asyncio.TaskGroup() as tasks,
    ):

        async def ask(to: str, model: str, text: str) -> None:
            messages = [{"role": "user", "content": text}]
            body = {"model": model, "messages": messages, "stream": True, "max_tokens": 16, "temperature": 0}
            with suppress(httpx.HTTPError):
                async with http.stream("POST", f"{to}/v1/chat/completions", json=body) as answer:
                    async for _ in answer.aiter_bytes():
                        pass

        async def send(to: str, name: str, script: Script) -> None:
            for count in itertools.count():
                # Every third question of the cached model is one that was asked before.
                asked.append(
                    tasks.create_task(ask(to, name, f"question {count // 3 if script.cached else count}"))
                )
                await asyncio.sleep(1 / script.requests_per_s[trouble.began is not None])

        asked: list[asyncio.Task[None]] = []
        asked += [tasks.create_task(send(url, name, script)) for name, script in SCRIPTS.items()]
        asked.append(
            tasks.create_task(send(record.gateway_url, "deployed", Script(Reply(), Reply(), (1, 1))))
        )
        yield
        for task in asked:
            task.cancel()


@asynccontextmanager
async def full_engine(record: RunningServer, streams: int = 24) -> AsyncIterator[None]:
    """Long prompts, past the gateway, so that the engine always has some waiting, until the block ends."""
    async with AsyncClient(record.grpc_url) as client, asyncio.TaskGroup() as tasks:

        async def fill(number: int) -> None:
            for count in itertools.count():
                # No two begin alike, else they would share blocks.
                with suppress(ClientError):
                    async with client.stream(f"{number} {count}" + " parcel" * 500, max_tokens=16) as stream:
                        async for _ in stream:
                            pass

        asking = [tasks.create_task(fill(number)) for number in range(streams)]
        yield
        for task in asking:
            task.cancel()


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.1)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def report_false_hit(url: str) -> None:
    """Ask one question twice, and report the second answer, which is the first one again, as wrong."""
    question = {
        "model": "cached",
        "messages": [{"role": "user", "content": "a question of a user"}],
        "temperature": 0,
    }
    with httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(2):
            answer = client.post("/v1/chat/completions", json=question).raise_for_status()
        report = {"request_id": answer.headers["x-request-id"]}
        client.post("/v1/cache/false_hits", json=report).raise_for_status()


def kill_triton(record: RunningServer) -> None:
    """As the kernel does when memory runs out."""
    for process in psutil.Process(record.pid).children(recursive=True):
        if process.name() == "tritonserver":
            process.kill()


def empty_panels(
    board: Any, prometheus: Prometheus, names: list[str], scale: TimeScale
) -> tuple[int, list[str]]:
    """Run every query of the dashboard, for each model until one has data.

    Returns:
        Number of panels, and those of them with a query that has no data for any model.
    """
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    empty = []
    for panel in panels:
        for target in panel["targets"]:
            query = (
                target["expr"].replace("$__rate_interval", scale.duration(300)).replace("$namespace", ".*")
            )
            if not any(prometheus.has_data(query.replace("$model", name)) for name in names):
                empty.append(f"{panel['title']}: {query}")
    return len(panels), empty


class Firings:
    """The alerts that have fired, each with the model it fired for first, and when."""

    def __init__(self, prometheus: Prometheus, trouble: Trouble) -> None:
        self._prometheus, self._trouble = prometheus, trouble
        # These fired while all was calm, which proves nothing: a busy machine is slow, too.
        self.too_early: set[tuple[str, str]] = set()
        self.first: dict[str, tuple[str, float]] = {}

    async def wait_for(self, names: set[str]) -> None:
        """Return when all of them have fired, or after `TROUBLE_S`."""
        assert self._trouble.began is not None
        end = time.monotonic() + TROUBLE_S
        while names - set(self.first) and time.monotonic() < end:
            for name, model in sorted(await asyncio.to_thread(self._prometheus.firing) - self.too_early):
                if name not in self.first:
                    self.first[name] = (model, time.monotonic() - self._trouble.began)
                    print(f"{self.first[name][1]:6.1f} s  {name} of {model}", file=sys.stderr)
            await asyncio.sleep(0.2)


async def drill(chosen: argparse.Namespace, folder: Path) -> int:
    scale, trouble = TimeScale(chosen.speedup), Trouble()
    limits = {"max_concurrency": 4, "max_input_tokens": 512, "max_output_tokens": 16}
    own = ("name=deployed", "golden=null", *(f"limits.{key}={value}" for key, value in limits.items()))
    words = ("tiny-cpu", "--build", *(word for override in own for word in ("--set", override)))
    with (
        scripted_gateway(trouble, folder) as server,
        serving(words, "deployed", Store.at(None), folder / "logs") as served,
    ):
        record = served.record
        watched = [
            WatchedDeployment(recipe_of(name, script), (urlsplit(server.url).netloc,), ())
            for name, script in SCRIPTS.items()
        ]
        pages = (urlsplit(record.gateway_url).netloc,), (urlsplit(record.metrics_url).netloc,)
        watched.append(WatchedDeployment(load_recipe("tiny-cpu", own), *pages))
        files = monitoring_files(watched, scale=scale)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        kinds = {target_down(scale).name}
        kinds |= {alert.name for deployment in watched for alert in alerts_of(deployment.recipe, scale)}
        prometheus = Prometheus(chosen.prometheus, folder)
        fired = Firings(prometheus, trouble)
        with prometheus.running():
            async with scripted_load(server.url, record, trouble):
                print(f"calm for {CALM_S / scale.speedup:.0f} s", file=sys.stderr)
                await asyncio.sleep(CALM_S / scale.speedup)
                fired.too_early = prometheus.firing()
                trouble.began = time.monotonic()
                await asyncio.to_thread(report_false_hit, server.url)
                await fired.wait_for(kinds - OF_THE_DEPLOYMENT)
                board = json.loads(files["dashboard.json"])
                panels, empty = empty_panels(board, prometheus, [*SCRIPTS, "deployed"], scale)
                for name, url in (("gateway", f"{server.url}/metrics"), ("triton", record.metrics_url)):
                    with urllib.request.urlopen(url, timeout=30) as answer:
                        (folder / f"{name}.txt").write_bytes(answer.read())
            async with full_engine(record):
                await fired.wait_for({"PipelineKvCachePressure"})
            kill_triton(record)
            await fired.wait_for({"PipelineRestarted"})
            os.kill(record.pid, signal.SIGINT)
            await fired.wait_for(kinds)
    print(f"{'alert':<38}{'model':<12}seconds after the trouble began, at {scale.speedup:g} times the pace")
    for name in sorted(kinds, key=lambda name: fired.first.get(name, ("", inf))[1]):
        model, seconds = fired.first.get(name, ("-", inf))
        print(f"  {name:<36}{model:<12}{'did not fire' if seconds == inf else f'{seconds:.1f}'}")
    for name, model in sorted(fired.too_early):
        print(f"  fired while all was calm, and is not counted: {name} of {model}")
    for line in empty:
        print(f"  no data: {line}")
    filled = panels - len({line.partition(":")[0] for line in empty})
    counted = f"{len(kinds & set(fired.first))} of {len(kinds)} kinds of alerts fired"
    print(f"{counted}; {filled} of {panels} panels have data")
    return 1 if empty or kinds - set(fired.first) else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", metavar="PROGRAM", default=shutil.which("prometheus"))
    parser.add_argument("--speedup", type=float, default=20.0)
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep the files, and the pages that were scraped"
    )
    chosen = parser.parse_args()
    if not chosen.prometheus:
        raise SystemExit("prometheus is not in $PATH: apt-get install prometheus, or --prometheus PROGRAM")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        status = asyncio.run(drill(chosen, folder))
    sys.exit(status)


if __name__ == "__main__":
    main()
