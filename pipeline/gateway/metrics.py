"""What the gateway counts, as the page that Prometheus reads (text format 0.0.4)."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipeline.client import Stats
from pipeline.gateway.served import Served

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts by upper bound, in seconds."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """As Prometheus has it: cumulative."""
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """All figures of one gateway."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str, int], int] = defaultdict(int)
        self._ttft: dict[str, Histogram] = defaultdict(Histogram)
        self._itl: dict[str, Histogram] = defaultdict(Histogram)
        self._tokens: dict[tuple[str, str], int] = defaultdict(int)

    def request(self, endpoint: str, model: str, status: int) -> None:
        """A request was answered."""
        self._requests[endpoint, model, status] += 1

    def answer(self, model: str, prompt_tokens: int, stats: Iterable[Stats]) -> None:
        """The figures of one request, with those of each of its answers."""
        self._tokens[model, "prompt"] += prompt_tokens
        for one in stats:
            if one.ttft_ms is not None:
                self._ttft[model].observe(one.ttft_ms / 1e3)
            histogram = self._itl[model]
            for gap in one.itl_ms:
                histogram.observe(gap / 1e3)
            self._tokens[model, "completion"] += one.output_tokens or 0

    def page(self, models: Iterable[Served]) -> str:
        """The text."""
        lines = ["# TYPE pipeline_gateway_requests_total counter"]
        for (endpoint, model, status), count in self._requests.items():
            lines.append(
                f'pipeline_gateway_requests_total{{endpoint="{endpoint}",model="{model}",status="{status}"}} {count}'
            )
        lines.append("# TYPE pipeline_gateway_tokens_total counter")
        for (model, kind), count in self._tokens.items():
            lines.append(f'pipeline_gateway_tokens_total{{model="{model}",kind="{kind}"}} {count}')
        for name, histograms in (("ttft", self._ttft), ("itl", self._itl)):
            lines.append(f"# TYPE pipeline_gateway_{name}_seconds histogram")
            for model, histogram in histograms.items():
                lines += histogram.lines(f"pipeline_gateway_{name}_seconds", f'model="{model}"')
        lines.append("# TYPE pipeline_gateway_queue gauge")
        for served in models:
            for state, value in (
                ("running", served.admission.running),
                ("waiting", served.admission.waiting),
            ):
                lines.append(f'pipeline_gateway_queue{{model="{served.name}",state="{state}"}} {value}')
            if served.cache is not None:
                for event, count in served.cache.counters.as_dict().items():
                    lines.append(
                        f'pipeline_gateway_cache_total{{model="{served.name}",event="{event}"}} {count}'
                    )
        return "\n".join(lines) + "\n"
