"""A runner for searches that serves nothing: figures come from a function of the settings and the load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pipeline.bench.load_settings import Load
from pipeline.bench.result import BenchResult, Distribution, Generator, LevelResult, SloCheck
from pipeline.bench.tune.search import TrialJudgement
from pipeline.bench.tune.search_space import Settings

ITL_P95_MS = 50.0  # target of the SLO


@dataclass(frozen=True)
class Fake:
    """What one load does: tokens a second, and the p95 of ITL."""

    tokens_per_s: float
    itl_ms: float = 10.0
    acceptance: float | None = None


def single(value: float) -> Distribution:
    """All values are this one."""
    percentiles = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), value)
    return Distribution(count=1, **percentiles, intervals={}, histogram=((), ()))


def level(load: Load, fake: Fake) -> LevelResult:
    """Figures of one load, as far as searches look at them."""
    met = fake.itl_ms <= ITL_P95_MS
    return LevelResult(
        kind=load.kind,
        value=load.value,
        seconds=1.0,
        requests={"complete": 10, "left": 0, "refused": 0, "failed": 0, "abandoned": 0},
        errors={},
        input_tokens_mean=10.0,
        output_tokens_mean=10.0,
        requests_per_s=fake.tokens_per_s / 10,
        output_tokens_per_s=fake.tokens_per_s,
        input_tokens_per_s=fake.tokens_per_s,
        goodput_per_s=fake.tokens_per_s / 10 * met,
        good_share=float(met),
        latencies={"itl": single(fake.itl_ms), "total": single(1e5 / fake.tokens_per_s)},
        acceptance=fake.acceptance,
        cached_share=None,
        in_flight_max=1,
        generator=Generator(late_p99_ms=0.0, cpu_share=0.1, late_sent_p99_ms=0.0, limits=""),
        slo=(SloCheck(target="itl_p95_ms", wanted=ITL_P95_MS, measured=fake.itl_ms, met=met),),
    )


def result(name: str, levels: Sequence[LevelResult]) -> BenchResult:
    """A run of `pipeline bench` with these loads."""
    return BenchResult(
        name=name,
        made="2026-01-01T00:00:00+00:00",
        target={},
        machine={"system": "a test", "processors": 2},
        workload={"source": "a test"},
        seed=0,
        slo={"itl_p95_ms": ITL_P95_MS},
        levels=tuple(levels),
    )


@dataclass
class FakeServed:
    """A server with the settings of a trial. See `pipeline.bench.tune.search.RunningTrial`."""

    runner: FakeRunner
    settings: Settings
    seconds: dict[str, float] = field(default_factory=lambda: {"build": 1.0, "serve": 2.0})
    compiled: bool = False

    def bench(self, load: Load, *, first_seconds: bool = False) -> BenchResult:
        if not first_seconds:
            self.runner.measured.append((self.settings, load))
        return result("tiny-cpu", [level(load, self.runner.does(self.settings, load))])


@dataclass
class FakeRunner:
    """See `pipeline.bench.tune.search.Runner`.

    Attributes:
        does: What settings do under a load.
        refuses: Why the plan does not let settings pass.
        forecasts: Tokens a second that the plan expects; None as on `cpu`.
        dies_after: Trials after which the process is killed, from the outside.
    """

    does: Callable[[Settings, Load], Fake]
    refuses: Callable[[Settings], str] = lambda _: ""
    forecasts: Callable[[Settings], float | None] = lambda _: None
    dies_after: int | None = None
    served: list[Settings] = field(default_factory=list)
    measured: list[tuple[Settings, Load]] = field(default_factory=list)

    def judge(self, settings: Settings) -> TrialJudgement:
        return TrialJudgement(self.refuses(settings), self.forecasts(settings))

    @contextmanager
    def serve(self, settings: Settings) -> Iterator[FakeServed]:
        if self.dies_after is not None and len(self.served) >= self.dies_after:
            raise KeyboardInterrupt
        self.served.append(settings)
        yield FakeServed(self, settings)
