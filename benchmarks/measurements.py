"""The commands whose figures the page of measurements has."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any


@dataclass(frozen=True, slots=True)
class Measurement:
    """One command.

    Attributes:
        line: Command line; with `--json` where its program has a `table` that makes Markdown of that.
        small: Arguments that make it as small as it can be.
        what: Subject, for the list.
        minutes: Approximate duration.
    """

    line: str
    small: str
    what: str
    minutes: float

    @property
    def command(self) -> str:
        """Command line as the page names it."""
        return self.line.removesuffix(" --json")

    @property
    def has_table(self) -> bool:
        """Whether it prints JSON; else the page shows what it prints."""
        return self.command != self.line

    def table(self, result: Any, part: str = "") -> str:
        """Render its JSON as Markdown, by its own program; one part of it, where that has several."""
        program = importlib.import_module(f"benchmarks.{PurePath(self.line.split()[1]).stem}")
        made: str = program.table(result, part) if part else program.table(result)
        return made


MEASUREMENTS = {
    "agreement": Measurement(
        "python benchmarks/agreement.py --json",
        "--rounds 1 --requests 16 --within 10",
        "`pipeline bench` beside AIPerf, on a stand-in whose own clock is a third witness; exit code 1 beyond 5 %",
        9,
    ),
    "agreement-gateway": Measurement(
        "python benchmarks/agreement.py --gateway --json",
        "--rounds 1 --requests 16 --within 10",
        "the same on our gateway, in front of scripted answers",
        9,
    ),
    "client": Measurement(
        "python benchmarks/client.py --rounds 60 --json",
        "--rounds 1 --tokens 20",
        "our client beside tritonclient, in one run",
        1,
    ),
    "gateway": Measurement(
        "python benchmarks/gateway.py --peers --json",
        "--rounds 1 --tokens 20 --streams 1 4",
        "the gateway, with one worker and two, beside the server behind it, LiteLLM's proxy and vLLM's API server",
        8,
    ),
    "tuning": Measurement(
        "python benchmarks/tuning.py",
        "--seeds 1",
        "searches in the time of 12 trials in made-up spaces, beside Optuna's samplers",
        8,
    ),
    "replicas": Measurement(
        "python benchmarks/replicas.py --json",
        "--rounds 1 --requests 16 --servers 2",
        "two and four servers behind a gateway: KV reuse and TTFT of conversations by `gateway.spread`; "
        "exit code 1 if a request fails",
        8,
    ),
    "batches": Measurement(
        "python benchmarks/batches.py --json",
        "--rounds 1",
        "what a batch that never runs dry costs the streams beside it, on `tiny-cpu`",
        2,
    ),
    "storages": Measurement(
        "python benchmarks/storages.py --json",
        "--rounds 1 --requests 50",
        "how fast gateways answer a batch that lies in a folder or in PostgreSQL, before a model that takes no time",
        3,
    ),
    "rollouts": Measurement(
        "python benchmarks/rollouts.py --json",
        "--exchanges 1 --streams 4",
        "exchanges of a package under 16 streams: failed and wrong requests, TTFT; exit code 1 if there are any",
        6,
    ),
    "drill": Measurement(
        "python benchmarks/drill.py --times 5 --json",
        "--times 1 --streams 4 --kind tritonserver --signal KILL",
        "every kind of process killed and stopped under 16 streams: time until all is well again, and what clients "
        "got; exit code 1 if anything hung or was wrong",
        15,
    ),
    "soak": Measurement(
        "python benchmarks/soak.py --exchange --json",
        "--minutes 0.3 --warm-up-s 2 --allow-mib 1e9 --allow-ttft 1e9",
        "an hour of mixed load through gateway, cache and Triton, with an exchange: faults, memory of each process, "
        "TTFT; exit code 1 if a bound is broken",
        63,
    ),
    "departures": Measurement(
        "python benchmarks/departures.py --json",
        "--seconds 3 --streams 4",
        "clients that leave just as their answer ends: how often Triton has to be started again, beside tritonclient; "
        "exit code 1 if it has under ours",
        7,
    ),
    "alerts": Measurement(
        "python benchmarks/alerts.py",
        "",
        "every alert fired once for real, and every panel of the dashboard; needs Prometheus",
        6,
    ),
    "cache": Measurement(
        "python benchmarks/cache.py",
        "--entries 200 --vectors 2000",
        "the response cache: exact hits, stores, nearest neighbours",
        2,
    ),
    "cache_peers": Measurement(
        "python benchmarks/cache_peers.py",
        "--entries 100 --only ours",
        "the cache beside RedisVL, LangChain, LiteLLM and GPTCache, in one run",
        10,
    ),
    "cache_backends": Measurement(
        "python benchmarks/cache_backends.py",
        "--entries 100 --vectors 500 --only sqlite",
        "the same on every backend, with the servers that the tests install",
        5,
    ),
    "guided": Measurement(
        "python benchmarks/guided.py --json",
        "--rounds 1",
        "what a form costs: the mask of each token, and the engine with a form and without",
        1,
    ),
    "cpu_engine": Measurement(
        "python benchmarks/cpu_engine.py --json",
        "--rounds 1 --questions 1",
        "the engine alone: tokens/s and TTFT for 1, 8, 16 streams, with and without draft",
        2,
    ),
    "served": Measurement(
        "python benchmarks/served.py --json",
        "--rounds 1 --tokens 16 --streams 1 2",
        "what Triton and its entry models take from the cpu engine, at 1, 8 and 16 streams",
        2,
    ),
    "served-191m": Measurement(
        "python benchmarks/served.py --weights int4_awq --json",
        "--rounds 1 --tokens 16 --streams 1 2",
        "the same for a model of 191 million weights, whose steps take longer than what hands their tokens out",
        13,
    ),
    "cpu_peers": Measurement(
        "python benchmarks/cpu_peers.py --json",
        "--rounds 1 --only ours:bf16",
        "the CPU engine on a model of 191 million weights beside OpenVINO GenAI and llama.cpp, in one run",
        20,
    ),
    "auto_front": Measurement(
        "python benchmarks/auto_front.py --json",
        "--formats fp8 --bits",
        "format `auto` over budgets of bits, beside every uniform format",
        3,
    ),
    "forecasts": Measurement(
        "python benchmarks/forecasts.py --json",
        "--every 60",
        "forecasts of `pipeline plan` beside AIConfigurator's, on published measurements of servers",
        4,
    ),
    "fleet": Measurement(
        "python benchmarks/fleet.py --json",
        "--small",
        "simulated: 1 to 500 replicas, affinity, queue limits and scaling rules through a day; exit code 1 if a queue "
        "of it does not agree with its formula",
        5,
    ),
    "calibration": Measurement(
        "scripts/benchmark_calibration",
        "--samples 8 --max-tokens 32 --formats int8_sq",
        "our calibration loop beside ModelOpt's",
        5,
    ),
}
