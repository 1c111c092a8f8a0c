"""Pictures of a run under load: latency, throughput, distributions and time lines, drawn by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pipeline.bench.result import BenchResult, Distribution, LevelResult
from pipeline.charts import inline_svg, svg_text

# Colors that people with any color vision tell apart; a dark page has lighter ones.
_P50, _P95, _P99 = "#0072b2", "#d55e00", "#a3407f"
_SLO, _FORECAST = "#c0392b", "#6b7785"
_THEMED = {
    _P50: "var(--p50)",
    _P95: "var(--p95)",
    _P99: "var(--p99)",
    _SLO: "var(--bad)",
    _FORECAST: "var(--soft)",
}
# From few requests at a time to many: legible on white and on black.
_LOADS = ("#3b8ee0", "#8d7ae6", "#d05ca8", "#e8603c")
_PERCENTILES = ((50, _P50, "o"), (95, _P95, "s"), (99, _P99, "^"))
LATENCY_NAMES = {
    "ttft": ("Time to first token", "TTFT"),
    "itl": ("Between chunks of an answer", "ITL"),
    "tpot": ("Per output token after the first", "TPOT"),
    "total": ("Whole request", "end to end"),
    "queue": ("Queue", "in the queue"),
    "prefill": ("Prefill", "prefill"),
}
_DRAWN = ("ttft", "itl", "tpot", "total")
_FORECASTS = {
    "ttft": ("ttft_p95_ms", "forecast, p95"),
    "itl": ("itl_p95_ms", "forecast, p95"),
    "tpot": ("tpot_mean_ms", "forecast, mean"),
}
_LINE: Mapping[str, Any] = {"markersize": 4, "linewidth": 1.6}
_LOOK: Mapping[str, Any] = {
    "font.size": 10, "axes.labelsize": 10, "axes.titlesize": 10.5, "legend.fontsize": 9, "legend.title_fontsize": 9,
    "legend.frameon": False, "legend.handlelength": 1.6, "axes.axisbelow": True,
}  # fmt: skip
_DECADES = 2.5  # of a logarithmic axis from which only powers of ten are written
_WIDE = 24.0  # largest value over the smallest from which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of the page."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """Loads of a run as places on an axis: their values, or their numbers where they are not of one kind."""

    places: tuple[float, ...]
    labels: tuple[str, ...]
    title: str
    even: bool

    @classmethod
    def of(cls, levels: Sequence[LevelResult]) -> _Axis:
        kinds = {level.kind for level in levels}
        if len(kinds) > 1:
            places = tuple(map(float, range(len(levels))))
            return cls(places, tuple(str(level.load) for level in levels), "load", True)
        titles = {
            "concurrency": "requests at a time",
            "rate": "requests a second",
            "trace": "times as fast as the trace",
        }
        values = tuple(level.value for level in levels)
        return cls(values, tuple(f"{value:g}" for value in values), titles[kinds.pop()], False)


def latency_pictures(result: BenchResult) -> Iterator[Picture]:
    """Draw percentiles of each latency against the load, with their intervals, the SLO and the forecast."""
    for name in _DRAWN:
        measured = _measured(result, name)
        if measured:
            title, short = LATENCY_NAMES[name]
            alt = f"{short} by load, in milliseconds: " + "; ".join(
                f"{level.load}: p50 {latency.p50:g}, p95 {latency.p95:g}, p99 {latency.p99:g}"
                for _, level, latency in measured
            )
            draw = _latency_figure(result, name, measured)
            yield _picture(f"{title} ({short})", f"latency-{name}", alt, draw)


_Measured = Sequence[tuple[float, LevelResult, Distribution]]


def _measured(result: BenchResult, name: str) -> _Measured:
    """List place on the axis, load and distribution of a latency, for the loads that have it."""
    return [
        (place, level, level.latencies[name])
        for place, level in zip(_Axis.of(result.levels).places, result.levels, strict=True)
        if name in level.latencies
    ]


def _latency_figure(result: BenchResult, name: str, measured: _Measured) -> Callable[[], Any]:
    def draw() -> Any:
        figure, axes = _axes()
        for percent, color, marker in _PERCENTILES:
            points = []
            for place, _, latency in measured:
                value = latency.at(percent)
                low, high = latency.intervals.get(f"p{percent}") or (value, value)
                points.append((place, value, max(0.0, value - low), max(0.0, high - value)))
            places, values, below, above = zip(*points, strict=True)
            axes.errorbar(
                places, values, yerr=(below, above), color=color, marker=marker, elinewidth=1, capsize=2.5,
                label=f"p{percent}", **_LINE,
            )  # fmt: skip
        shown = [value for _, _, latency in measured for value in (latency.p50, latency.p99)]
        for target, target_ms in _targets(result, name):
            _slo_line(axes, target_ms, f"SLO: {target.split('_')[1]} {target_ms:g} ms", across=True)
            shown.append(target_ms)
        if name in _FORECASTS:
            shown += _forecast_line(axes, result, *_FORECASTS[name])
        _load_axis(axes, result.levels)
        _value_axis(axes, shown, "ms")
        _legend(figure)
        return figure

    return draw


def throughput_pictures(result: BenchResult) -> Iterator[Picture]:
    """Draw output tokens and requests a second against the load."""
    axis, levels = _Axis.of(result.levels), result.levels

    def tokens() -> Any:
        figure, axes = _axes()
        values = [level.output_tokens_per_s for level in levels]
        axes.plot(axis.places, values, color=_P50, marker="o", label="measured", **_LINE)
        values += _forecast_line(axes, result, "output_tokens_per_s", "forecast")
        _load_axis(axes, levels)
        axes.set_ylim(0, 1.12 * max(*values, 1e-9))
        axes.set_ylabel("tokens/s")
        if result.forecast is not None and result.forecast.points:
            _legend(figure)
        return figure

    def requests() -> Any:
        figure, axes = _axes()
        values = [level.requests_per_s for level in levels]
        axes.plot(axis.places, values, color=_P50, marker="o", label="completed", **_LINE)
        good = [
            (place, level.goodput_per_s)
            for place, level in zip(axis.places, levels, strict=True)
            if level.goodput_per_s is not None
        ]
        if good:
            points = tuple(zip(*good, strict=True))
            label = "goodput: within the SLO each by itself"
            axes.plot(*points, color=_P95, marker="s", label=label, **_LINE)
            axes.fill_between(*points, color=_P95, alpha=0.12, linewidth=0)
        _load_axis(axes, levels)
        axes.set_ylim(0, 1.2 * max(*values, 1e-9))
        axes.set_ylabel("requests/s")
        _legend(figure)
        return figure

    listed = "; ".join(f"{level.load}: {level.output_tokens_per_s:g}" for level in levels)
    yield _picture("Output tokens a second", "tokens", f"Output tokens a second by load: {listed}", tokens)
    listed = "; ".join(
        f"{level.load}: {level.requests_per_s:g} completed"
        + (f", {level.goodput_per_s:g} within the SLO" if level.goodput_per_s is not None else "")
        for level in levels
    )
    yield _picture("Requests and goodput", "requests", f"Requests a second by load: {listed}", requests)


def distribution_pictures(result: BenchResult) -> Iterator[Picture]:
    """Draw the share of requests that had each latency or less, one line for each load."""
    for name in _DRAWN:
        measured = _measured(result, name)
        if measured:
            title, short = LATENCY_NAMES[name]
            medians = "; ".join(f"{level.load} {latency.p50:g} ms" for _, level, latency in measured)
            alt = (
                f"Cumulative distribution of {short} on a logarithmic axis, one line for each load; medians: "
                f"{medians}"
            )
            draw = _distribution_figure(result, name, measured)
            yield _picture(f"{title} ({short})", f"distribution-{name}", alt, draw)


def _distribution_figure(result: BenchResult, name: str, measured: _Measured) -> Callable[[], Any]:
    def draw() -> Any:
        figure, axes = _axes()
        for (_, level, latency), color in zip(measured, _load_colors(len(measured)), strict=True):
            edges, counts = latency.histogram
            reached = [0.0, *(100 * count / latency.count for count in accumulate(counts))]
            axes.plot(edges, reached, color=color, linewidth=1.5, label=f"{level.value:g}")
        for _, target_ms in _targets(result, name):
            _slo_line(axes, target_ms, f"SLO {target_ms:g} ms", across=False)
        ends = [
            edge for _, _, latency in measured for edge in latency.histogram[0][:: len(latency.histogram[1])]
        ]
        _value_axis(axes, ends, "ms", log=True, upright=False)
        axes.set_ylim(0, 102)
        axes.set_ylabel("% at or below")
        _legend(figure, 10, _Axis.of(result.levels).title)
        return figure

    return draw


def timeline_picture(level: LevelResult, number: int) -> Picture | None:
    """Draw TTFT, ITL and tokens a second over the time of one load."""
    windows = level.timeline
    if not windows:
        return None

    def draw() -> Any:
        from matplotlib.ticker import MaxNLocator

        figure, (first, between, tokens) = _axes(columns=3)
        times = [window.at_s for window in windows]
        targets = {check.target: check.wanted for check in level.slo}
        for axes, name in ((first, "ttft"), (between, "itl")):
            for percent, color in ((50, _P50), (95, _P95)):
                values = [getattr(window, f"{name}_p{percent}_ms") for window in windows]
                kept = [(at_s, value) for at_s, value in zip(times, values, strict=True) if value is not None]
                points, label = zip(*kept, strict=True), f"p{percent}"
                axes.plot(*points, color=color, linewidth=1.3, marker=".", markersize=3, label=label)
            target_ms = targets.get(f"{name}_p95_ms", targets.get(f"{name}_p99_ms"))
            if target_ms is not None:
                _slo_line(axes, target_ms, "SLO", across=True)
            axes.set_title(f"{name.upper()}, ms", loc="left")
        first.legend(loc="upper left", ncols=2)
        tokens.plot(times, [window.output_tokens_per_s for window in windows], color=_P50, linewidth=1.3)
        tokens.set_title("output tokens/s", loc="left")
        whole_s = times[-1] + times[0]
        for axes in (first, between, tokens):
            axes.set_ylim(0, None)
            axes.set_xlabel("seconds")
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.set_xlim(0, whole_s)
            if whole_s - level.seconds > 0.5 * times[0]:
                axes.axvspan(0, whole_s - level.seconds, color=_FORECAST, alpha=0.15, linewidth=0)
        return figure

    alt = f"TTFT, ITL and output tokens a second over {windows[-1].at_s:.0f} seconds with {level.load}"
    return _picture(f"With {level.load}", f"time-{number}", alt, draw)


def _targets(result: BenchResult, name: str) -> list[tuple[str, float]]:
    return [
        (target, target_value) for target, target_value in result.slo.items() if target.startswith(f"{name}_")
    ]


def _picture(title: str, name: str, alt: str, draw: Callable[[], Any]) -> Picture:
    return Picture(title, svg_text(inline_svg(draw, name, alt, colors=_THEMED, look=_LOOK)))


def _axes(columns: int = 1) -> Any:
    """Make a figure with one pair of axes, or several side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.3) if columns == 1 else (10.8, 2.7), layout="constrained")
    made = figure.subplots(1, columns)
    for axes in (made,) if columns == 1 else made:
        axes.grid(visible=True, alpha=0.18, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    return figure, made


def _legend(figure: Any, columns: int = 4, title: str = "") -> None:
    """Put a legend above the axes, where it covers nothing; a forecast comes last."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda place: labels[place].startswith("forecast"))
    figure.legend(
        [handles[place] for place in order], [labels[place] for place in order], loc="outside upper left",
        ncols=columns, columnspacing=1.2, borderaxespad=0, title=title or None, alignment="left",
    )  # fmt: skip


def _load_axis(axes: Any, levels: Sequence[LevelResult]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis = _Axis.of(levels)
    if not axis.even and max(axis.places) > 4 * min(axis.places) > 0:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(axis.places))
    axes.xaxis.set_major_formatter(FixedFormatter(axis.labels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(axis.title)
    axes.margins(x=0.06)


def _value_axis(
    axes: Any, values: Sequence[float], unit: str, *, log: bool = False, upright: bool = True
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.yaxis if upright else axes.xaxis
    positive = [value for value in values if value > 0]
    if log or (positive and max(positive) > _WIDE * min(positive)):
        (axes.set_yscale if upright else axes.set_xscale)("log")
        span = math.log10(max(positive) / min(positive))
        subs = (1,) if span > _DECADES else (1, 2, 5) if span > 1 else (1, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_minor_formatter(NullFormatter())
    elif upright:
        axes.set_ylim(0, 1.25 * max(positive, default=1.0))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    (axes.set_ylabel if upright else axes.set_xlabel)(unit)


def _slo_line(axes: Any, value: float, label: str, *, across: bool) -> None:
    (axes.axhline if across else axes.axvline)(value, color=_SLO, linestyle=(0, (5, 3)), linewidth=1.3)
    place, fractions = ((0, value), ("axes fraction", "data")) if across else (
        (value, 0.03), ("data", "axes fraction")
    )  # fmt: skip
    axes.annotate(
        label, place, xycoords=fractions, ha="left" if across else "right", va="bottom",
        rotation=0 if across else 90, fontsize=9, color=_SLO,
    )  # fmt: skip


def _forecast_line(axes: Any, result: BenchResult, field: str, label: str) -> list[float]:
    """Draw the forecast, and return its values."""
    points = result.forecast.points if result.forecast is not None else ()
    drawn = [
        (place, float(getattr(point, field)))
        for place, point in zip(_Axis.of(result.levels).places, points, strict=False)
        if point is not None
    ]
    if drawn:
        axes.plot(
            *zip(*drawn, strict=True), color=_FORECAST, linestyle=(0, (1, 1.5)), linewidth=1.8, marker="D",
            markersize=4, markerfacecolor="none", label=label,
        )  # fmt: skip
    return [value for _, value in drawn]


def _load_colors(count: int) -> list[str]:
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    ramp = LinearSegmentedColormap.from_list("loads", _LOADS)
    return [to_hex(ramp(index / max(count - 1, 1))) for index in range(count)]
