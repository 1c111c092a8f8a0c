"""A run as one HTML file that loads nothing: the workload, whether the SLO held, and pictures of every load.

    write_page(result, Path("bench.html"))

matplotlib draws the pictures (the extra `bench` brings it); without it the tables are all there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.bench.pictures import (
    LATENCY_NAMES,
    distribution_pictures,
    latency_pictures,
    throughput_pictures,
    timeline_picture,
)
from pipeline.bench.result import BenchResult, ForecastPoint, LevelResult
from pipeline.bench.verdict import verdict, warnings
from pipeline.charts import has_matplotlib
from pipeline.extras import install_line

_FOLDER = Path(__file__).parent


def write_page(result: BenchResult, path: Path) -> None:
    """Write a run as an HTML page; the file is replaced."""
    path.write_text(page(result), encoding="utf-8")


def page(result: BenchResult) -> str:
    """Render the page of a run."""
    tone, sentence = verdict(result)
    drawn = has_matplotlib()
    best = _shown(result)
    return render_page(
        "page.html.j2",
        result=result,
        tone=tone,
        verdict=sentence,
        warnings=list(warnings(result)),
        about=dict(_about(result)),
        levels=[(level, level.holds()) for level in result.levels],
        names=LATENCY_NAMES,
        measured=[name for name in LATENCY_NAMES if any(name in level.latencies for level in result.levels)],
        latency=list(latency_pictures(result)) if drawn else [],
        throughput=list(throughput_pictures(result)) if drawn else [],
        distributions=list(distribution_pictures(result)) if drawn else [],
        timelines=[
            (level, level is best, timeline_picture(level, number))
            for number, level in enumerate(result.levels)
        ]
        if drawn
        else [],
        forecast=list(_beside_forecast(result)),
        no_pictures="" if drawn else f"The pictures need matplotlib: {install_line('bench')}",
    )


def render_page(template: str, **values: Any) -> str:
    """Render a template of this room, which may include `page.css`; all values are escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([_FOLDER, _FOLDER / "compare", _FOLDER / "tune"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["figure"] = _figure
    return environment.get_template(template).render(**values)


def _shown(result: BenchResult) -> LevelResult | None:
    """Load whose time line is open: the largest that held, else the smallest."""
    within_slo = [level for level in result.levels if level.holds()]
    return max(within_slo, key=lambda level: level.value) if within_slo else next(iter(result.levels), None)


def _about(result: BenchResult) -> Iterator[tuple[str, str]]:
    """Yield the circumstances of the run as names and values."""
    target, work = result.target, result.workload
    yield "Asked", f"{target.get('model', '')} at {target.get('url', '')}, {_ways(target.get('way'))}"
    versions = ", ".join(f"{name} {version}" for name, version in (target.get("versions") or {}).items())
    if runtime := target.get("runtime"):
        yield "Runtime", f"{runtime}{versions and f' ({versions})'}"
    if gpu := target.get("gpu"):
        yield "GPU", f"{target.get('gpus', 1)} x {gpu}"
    if package := target.get("package"):
        yield "Package", str(package)[:16]
    lengths = [
        f"{label} of {work[key]} tokens"
        for key, label in (("prompt_tokens", "prompts"), ("answer_tokens", "answers"))
        if work.get(key)
    ]
    extra = [
        f"{work['turns']} turns" if work.get("turns", 1) > 1 else "",
        f"shared prefixes of {work['prefix_tokens']} tokens" if work.get("prefix_tokens") else "",
        f"{work['cancelled']:.0%} of clients leave" if work.get("cancelled") else "",
        f"temperature {work['temperature']:g}" if "temperature" in work else "",
        f"seed {result.seed}",
    ]
    yield "Workload", "; ".join(filter(None, (str(work.get("source", "")), *lengths, *extra)))
    if result.slo:
        yield "SLO", ", ".join(f"{name} {value:g}" for name, value in result.slo.items())
    yield "Load generator", ", ".join(f"{name} {value}" for name, value in result.machine.items())


def _ways(way: object) -> str:
    return {"gateway": "through the gateway", "triton": "straight to Triton"}.get(str(way), str(way))


def _beside_forecast(result: BenchResult) -> Iterator[tuple[LevelResult, list[tuple[str, float, float]]]]:
    """Yield loads with their figures: (name, measured, forecast)."""
    points = result.forecast.points if result.forecast is not None else ()
    for level, point in zip(result.levels, points, strict=False):
        if point is not None:
            yield level, list(_pairs(level, point))


def _pairs(level: LevelResult, point: ForecastPoint) -> Iterator[tuple[str, float, float]]:
    latencies = level.latencies
    if "ttft" in latencies:
        yield "TTFT p95, ms", latencies["ttft"].p95, point.ttft_p95_ms
    if "tpot" in latencies:
        yield "TPOT mean, ms", latencies["tpot"].mean, point.tpot_mean_ms
    if "itl" in latencies:
        yield "ITL p95, ms", latencies["itl"].p95, point.itl_p95_ms
    yield "output tokens/s", level.output_tokens_per_s, point.output_tokens_per_s


def _figure(value: float | None, unit: str = "") -> str:
    """A figure with three digits.

    >>> _figure(1843.2), _figure(4.823, "ms"), _figure(None)
    ('1,843', '4.82 ms', '–')
    """
    if value is None:
        return "–"
    return f"{f'{value:,.0f}' if abs(value) >= 1000 else f'{value:.3g}'} {unit}".rstrip()
