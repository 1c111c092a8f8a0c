"""The speed of a plan as lines for people, and how figures are written everywhere in `pipeline plan`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pipeline.cli.output import cut
from pipeline.plan.performance.calibration import FIGURE_NAMES, FIGURES, SpeedCalibration
from pipeline.plan.performance.estimates import QUANTITY_NAMES, Estimate, Trust
from pipeline.plan.performance.forecast import Forecast, RatePlan
from pipeline.plan.performance.queueing import Percentiles
from pipeline.plan.performance.service import LoadPoint
from pipeline.plan.performance.splitting import ServerGroup

_ENDS = {
    "memory": "memory holds no more",
    "limits": "the limits let no more in",
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
    yield from (cut(line, width) for line in _forecast_lines(forecast, width))


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
        if forecast.kwh_per_million is not None:
            watts = f"{forecast.gpus} x {forecast.gpu_w:g} W, the most that the GPUs may take"
            yield f"  energy of a million       {number(forecast.kwh_per_million)} kWh ({watts})"
        if forecast.lifted is not None and forecast.lifted.batch > load.batch:
            more = (
                f"{forecast.lifted.batch} requests at a time, {number(forecast.lifted.tokens_per_s)} tokens/s"
            )
            yield f"  with limits lifted        {more} (--set limits.max_concurrency={forecast.lifted.batch})"
    else:
        yield "  within the SLO            not even one request at a time"
    if forecast.rate is not None:
        yield from _rate_lines(forecast, forecast.rate)
    yield ""
    yield "             first token                 between tokens"
    yield "  requests   mean          p95           mean       p95         tokens/s   tokens/s a user"
    yield from (_row(load, forecast) for load in forecast.curve)
    yield from _gain_lines(forecast)
    yield ""
    yield from wrapped(
        "mean: of ten requests a client, from a start of all at once; p95: of those after the start, which the SLO is "
        "held to. Lengths lie within a fifth of their mean.",
        width,
    )
    if forecast.calibration is not None:
        yield from _calibrated(forecast.calibration, width)
    elif forecast.trust is not None:
        yield from basis(width, forecast.trust)
    for warning in forecast.warnings:
        yield from wrapped(f"warning: {warning}", width)


def _rate_lines(forecast: Forecast, plan: RatePlan) -> Iterator[str]:
    """Yield the replicas that requests at the day's peak need, with what they take and cost."""
    rate = f"{plan.requests_per_s:g} requests/s"
    if plan.replicas is None or plan.load is None:
        yield f"  for {rate:<21} no number of replicas: one request alone misses the SLO"
        return
    gpus = plan.replicas * forecast.gpus
    several = "s" if plan.replicas > 1 else ""
    parts = [f"{plan.replicas} replica{several}, {gpus} GPUs; one takes {number(plan.each)} requests/s"]
    if forecast.gpu_hour is not None:
        parts.append(f"{number(gpus * forecast.gpu_hour)} an hour")
    if forecast.gpu_w is not None:
        parts.append(f"at most {number(gpus * forecast.gpu_w / 1e3)} kW")
    yield f"  for {rate:<21} {'; '.join(parts)}"
    yield f"  ... first token           {_percentiles(plan.load.settled_ttft)}"
    yield f"  ... between tokens        {_percentiles(plan.load.itl)}"
    if plan.split is None:
        return
    context, generation = plan.split.context, plan.split.generation
    if (whole := plan.aggregated) is not None:
        yield f"  fewest GPUs, aggregated   {whole.gpus} GPUs: {_servers(whole, 'server')}, {whole.slots} requests each"
    yield f"  disaggregated, instead    {plan.split.gpus} GPUs: {_servers(context, 'context server')},"
    yield f"  ...                       {_servers(generation, 'generation server')}, {generation.slots} requests each"
    yield f"  ... first token           {_percentiles(plan.split.load.settled_ttft)}"
    yield f"  ... between tokens        {_percentiles(plan.split.load.itl)}"


def _servers(group: ServerGroup, kind: str) -> str:
    split = group.split
    ways = (
        f"TP{split.tensor}" + f" EP{split.expert}" * (split.expert > 1) + " attention DP" * split.attention_dp
    )
    return f"{group.servers} {kind}{'s' if group.servers > 1 else ''} ({ways})"


def _percentiles(percentiles: Percentiles) -> str:
    return f"mean {number(percentiles.mean)}, p95 {number(percentiles.p95)}, p99 {number(percentiles.p99)} ms"


def basis(width: int, trust: Trust | None = None) -> Iterator[str]:
    """Yield a paragraph on where figures come from, and how far those of their classes were off."""
    text = "simulated on a roofline that is fitted to published figures"
    if trust is not None and trust.classes and not trust.doubts:
        met = [
            f"{QUANTITY_NAMES[name]} to {errors.median:.0%} ({errors.count})"
            for name, errors in trust.classes.items()
        ]
        text += f"; {trust.name} were left out of a fit and met: {', '.join(met)}, median"
    text += "; brackets hold four of five measurements of their class (pipeline plan accuracy)"
    yield from wrapped(f"{text}. Not in it: prefixes that are reused.", width)


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
        f"  {load.batch:>8}   {number(load.ttft.mean) + ' ms':<11}   {first:<11}   {number(load.itl_ms) + ' ms':<8}"
        f"   {p95:<9}   {number(load.tokens_per_s):<8}   {number(load.user_tokens_per_s)}"
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
