"""The speed of a plan as lines for people, and how figures are written everywhere in `pipeline plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pipeline.plan.performance.accuracy import Estimate
from pipeline.plan.performance.calibration import FIGURE_NAMES, FIGURES, SpeedCalibration
from pipeline.plan.performance.forecast import Forecast
from pipeline.plan.performance.roofline import fitted_constants
from pipeline.plan.performance.service import LoadPoint

_ENDS = {
    "memory": "memory or the limits hold no more",
    "steps": "prompts of new requests leave no more room in a step",
    "ttft": "with more, first tokens are late",
    "itl": "with more, tokens are too slow",
}


def number(value: float) -> str:
    """Write a figure with three digits at most.

    >>> number(1843.2), number(4.823), number(0.02)
    ('1840', '4.82', '0.02')
    """
    return f"{float(f'{value:.3g}'):g}" if value < 1000 else f"{float(f'{value:.3g}'):.0f}"


def figure(estimate: Estimate, unit: str = "") -> str:
    """Write an estimate with its interval, `4.82 ms (4.06 to 6.06)`, or without one where it has none."""
    whole = f"{number(estimate.value)} {unit}".rstrip()
    if estimate.low is None or estimate.high is None:
        return whole
    return f"{whole} ({number(estimate.low)} to {number(estimate.high)})"


def forecast_lines(forecast: Forecast, width: int) -> Iterator[str]:
    """Yield the forecast of one request, of many, the gain of a draft, and how sure all of it is.

    Lines of more than `width` columns are cut and end with an ellipsis.
    """
    for line in _forecast_lines(forecast, width):
        yield line if len(line) <= width else f"{line[: width - 1]}…"


def _forecast_lines(forecast: Forecast, width: int) -> Iterator[str]:
    yield f"  first token, alone        {figure(forecast.ttft_ms, 'ms')}"
    yield f"  between tokens, alone     {figure(forecast.itl_ms, 'ms')}"
    whole, each = forecast.tokens_per_s, forecast.tokens_per_s_per_gpu
    load = forecast.within_slo
    if whole is not None and each is not None and load is not None:
        within = "within the SLO" if forecast.has_slo else "together"
        ends = _ENDS[forecast.ended_by]
        yield f"  most {within:<20} {load.batch} requests at a time of {forecast.wanted}; {ends}"
        share = f"; {number(each.value)} a GPU" if forecast.is_gpu else ""
        yield f"  output tokens a second    {figure(whole)}{share}"
        if forecast.cost is not None:
            money = figure(forecast.interval(forecast.cost.per_million_output))
            parts = f"{number(forecast.cost.input_part)} and {number(forecast.cost.output_part)}"
            yield f"  a million output tokens   {money}; or input and output apart, {parts}"
    else:
        yield "  within the SLO            not even one request at a time"
    yield ""
    yield "  requests   first token p95   between tokens   p95        tokens/s   tokens/s a user"
    yield from (_row(load, forecast) for load in forecast.curve)
    yield from _gain_lines(forecast)
    yield ""
    if forecast.calibration is not None:
        yield from _calibrated(forecast.calibration, width)
    else:
        yield from basis(width, throughput=not forecast.unchecked, first_token=not forecast.unchecked_first)
    for warning in forecast.warnings:
        yield from wrapped(f"warning: {warning}", width)


def basis(width: int, *, throughput: bool, first_token: bool) -> Iterator[str]:
    """Yield a paragraph on where figures come from, and how far they were off.

    Args:
        width: Columns of the text.
        throughput: Whether published figures cover the throughput that is shown.
        first_token: Whether they cover the first token that is shown.
    """
    held = fitted_constants()["errors"]["held-out"]
    met = [
        f"{held[kind]['count']} {what} to {held[kind]['median']:.0%}"
        for kind, what, applies in (
            ("throughput", "of throughput", throughput),
            ("first-token", "of first tokens on an idle engine", first_token),
        )
        if applies
    ]
    text = "a roofline, fitted to published figures"
    if met:
        text += f"; of those held aside it meets {' and '.join(met)} (median); brackets hold four of five"
        text += " (pipeline plan accuracy)"
    yield from wrapped(f"{text}. Not in it: network, tokenizer, prefixes that are reused.", width)


def _calibrated(calibration: SpeedCalibration, width: int) -> Iterator[str]:
    """Yield where figures come from, with constants that were measured."""
    off = [
        f"{FIGURE_NAMES[name]} {errors.left_out:.0%}"
        for name in FIGURES
        if (errors := calibration.errors.get(name)) is not None and errors.left_out is not None
    ]
    text = f"a roofline, fitted to {calibration.source}"
    if off:
        text += (
            f"; loads left out of the fit are met to: {', '.join(off)} (median); brackets hold all of them"
        )
    instead = (
        "leaves the speed out" if calibration.runtime == "cpu" else "takes constants of published figures"
    )
    yield from wrapped(f"{text}. --calibration none {instead}.", width)


def wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of an indented paragraph."""
    yield from textwrap.wrap(text, max(width, 40), initial_indent="  ", subsequent_indent="  ")


def _row(load: LoadPoint, forecast: Forecast) -> str:
    slo = forecast.slo
    late = slo.ttft_p95_ms is not None and load.ttft_ms > slo.ttft_p95_ms
    slow = slo.itl_p95_ms is not None and load.itl_p95_ms > slo.itl_p95_ms
    first = f"{number(load.ttft_ms)} ms{' !' if late else ''}"
    p95 = f"{number(load.itl_p95_ms)} ms{' !' if slow else ''}"
    return (
        f"  {load.batch:>8}   {first:<15}   {number(load.itl_ms) + ' ms':<14}   {p95:<9}"
        f"  {number(load.tokens_per_s):<10} {number(load.user_tokens_per_s)}"
    )


def _gain_lines(forecast: Forecast) -> Iterator[str]:
    if not forecast.gains:
        return
    yield ""
    with_it = "in the figures above" if forecast.acceptance is not None else "not in the figures above"
    yield f"  the draft, by the share of its tokens that is accepted ({with_it}):"
    for gain in forecast.gains:
        yield (
            f"    {gain.acceptance:.1f}   {gain.alone:.2f} times as fast alone, {gain.loaded:.2f} with"
            f" {forecast.concurrency} requests; best alone with {gain.best_length} tokens a round"
        )
