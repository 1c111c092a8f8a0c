"""What labelled pairs tell of a semantic cache, for people and as JSON."""

from __future__ import annotations

import json
from typing import Any

from pipeline.cache.semantic.verification import CHECKS
from pipeline.cache.tuning.choosing import TunedSetting, by_category, weigh
from pipeline.cache.tuning.measuring import CountedShare, Measured, PairOutcome

_BAR = 24  # characters
_ROWS = 12
_EXAMPLES = 5
_NAME = 60  # characters of a category, at most


def choice_page(measured: Measured, choice: TunedSetting) -> str:
    """The curve, the rows around the choice, checks, categories, what was chosen, and the lines of the recipe."""
    outcome = choice.outcome
    head = f"{len(measured.pairs):,} pairs: {outcome.recall.of:,} that one answer serves, {outcome.false.of:,} traps"
    wrong = measured.served(outcome.threshold, choice.skipped, same=False)[:_EXAMPLES]
    parts = [
        [head],
        _curve(measured, choice),
        _table(measured, choice),
        _checks(measured, choice),
        _categories(measured, choice),
        [*_verdict(measured, choice), *(f"  served wrongly: {pair.a}  |  {pair.b}" for pair in wrong)],
        recipe_lines(measured, choice),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def recipe_lines(measured: Measured, choice: TunedSetting) -> list[str]:
    """What to write into a recipe."""
    lines = ["cache:", "  semantic:", f"    {measured.dial}: {_number(choice.outcome.threshold, measured)}"]
    if measured.dial == "min_score":
        lines.append(f"    min_similarity: {measured.min_similarity:.2f}")
    on = [name for name in CHECKS if name not in choice.skipped]
    return [*lines, f"    checks: [{', '.join(on)}]"] if choice.skipped else lines


def choice_json(measured: Measured, choice: TunedSetting) -> str:
    """The same, with every threshold."""
    at, skipped, sure = choice.outcome.threshold, choice.skipped, choice.confidence
    document = {
        "pairs": len(measured.pairs),
        "budget": choice.budget,
        "confidence": sure,
        "meets_budget": choice.meets_budget,
        "basis": choice.basis,
        "traps_needed": choice.traps_needed,
        "chosen": {
            **({"min_similarity": measured.min_similarity} if measured.dial == "min_score" else {}),
            **_row(choice.outcome, measured, sure),
            "checks": [name for name in CHECKS if name not in skipped],
            "scorer": measured.dial == "min_score",
            "left_out": list(skipped),
        },
        "held_out": None if choice.held_out is None else _row(choice.held_out, measured, sure),
        "thresholds": [_row(measured.outcome(step, skipped), measured, sure) for step in measured.steps],
        "checks": [
            {"check": weight.check, "stopped_alone": weight.stopped, "lost_alone": weight.lost}
            for weight in weigh(measured, at, skipped)
        ],
        "categories": {
            name: {"recall": _share(found.recall, sure), "false_hits": _share(found.false, sure)}
            for name, found in by_category(measured, at, skipped).items()
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _curve(measured: Measured, choice: TunedSetting) -> list[str]:
    alone = "cosine" if measured.dial == "min_similarity" else "score"
    lines = [f"  {'':<6}{'true pairs served':<{_BAR + 2}}{'traps served':<{_BAR + 2}}traps by {alone} alone"]
    for threshold in sorted({*measured.steps[::5], choice.outcome.threshold}):
        outcome = measured.outcome(threshold, choice.skipped)
        bare = measured.outcome(threshold, measured.checks)
        lines.append(
            f"{_mark(threshold, choice)} {_number(threshold, measured):<6}"
            f"{_bar(outcome.recall, '#')}  {_bar(outcome.false, '!')}  {_bar(bare.false, '!')}"
        )
    return lines


def _table(measured: Measured, choice: TunedSetting) -> list[str]:
    sure = choice.confidence
    lines = [f"  {measured.dial:<16}{f'recall ({sure:.0%} interval)':<26}false hits"]
    at = measured.steps.index(choice.outcome.threshold)
    first = max(0, min(at - _ROWS // 2, len(measured.steps) - _ROWS))
    for threshold in measured.steps[first : first + _ROWS]:
        outcome = measured.outcome(threshold, choice.skipped)
        lines.append(
            f"{_mark(threshold, choice)} {_number(threshold, measured):<16}{_interval(outcome.recall, sure, 1):<26}"
            f"{_interval(outcome.false, sure, 2)}"
        )
    return lines


def _checks(measured: Measured, choice: TunedSetting) -> list[str]:
    lines = [f"  {'check':<16}{'traps it alone stops':<26}true pairs it alone costs"]
    weights = weigh(measured, choice.outcome.threshold, choice.skipped)
    lines += [f"  {weight.check:<16}{weight.stopped:<26,}{weight.lost:,}" for weight in weights]
    return [*lines, *(f"  {name:<16}left out" for name in choice.skipped)]


def _categories(measured: Measured, choice: TunedSetting) -> list[str]:
    found = by_category(measured, choice.outcome.threshold, choice.skipped)
    if not found:
        return []
    width = min(max(16, *(len(name) + 2 for name in found)), _NAME)
    lines = [f"  {'category':<{width}}{'true pairs served':<26}traps served"]
    for name, outcome in found.items():
        lines.append(
            f"  {_short(name, width - 2):<{width}}{_count(outcome.recall):<26}{_count(outcome.false)}".rstrip()
        )
    return lines


def _verdict(measured: Measured, choice: TunedSetting) -> list[str]:
    outcome, sure, false = choice.outcome, choice.confidence, choice.outcome.false
    budget = f"{100 * choice.budget:g}%"
    lines = [
        f"At {_number(outcome.threshold, measured)}, {outcome.recall.value:.0%} of the true pairs are served, "
        f"and {false.count} of {false.of:,} traps: at most {false.high(sure):.2%} ({sure:.0%} interval)."
    ]
    if choice.basis == "interval":
        lines.append(f"That is within the budget of {budget}.")
    elif choice.basis == "rate":
        lines.append(
            f"Chosen by the rate that was observed: so few traps cannot show that the budget of {budget} is met. That "
            f"takes {choice.traps_needed:,} traps of which none is served."
        )
    else:
        lines.append(f"No setting meets the budget of {budget}; this one serves the fewest traps.")
    if choice.held_out is not None:
        held = choice.held_out
        lines.append(
            f"Chosen by four fifths of the pairs and tried on the other: recall {held.recall.value:.0%}, traps served "
            f"{held.false.count} of {held.false.of:,}, at most {held.false.high(sure):.2%}."
        )
    return lines


def _row(outcome: PairOutcome, measured: Measured, confidence: float) -> dict[str, Any]:
    return {
        measured.dial: round(outcome.threshold, 3),
        "recall": _share(outcome.recall, confidence),
        "false_hits": _share(outcome.false, confidence),
    }


def _share(share: CountedShare, confidence: float) -> dict[str, float]:
    return {
        "count": share.count,
        "of": share.of,
        "share": round(share.value, 5),
        "low": round(share.low(confidence), 5),
        "high": round(share.high(confidence), 5),
    }


def _mark(threshold: float, choice: TunedSetting) -> str:
    return ">" if threshold == choice.outcome.threshold else " "


def _bar(share: CountedShare, drawn: str) -> str:
    return (drawn * round(share.value * _BAR)).ljust(_BAR, ".")


def _number(threshold: float, measured: Measured) -> str:
    return f"{threshold:.2f}" if measured.dial == "min_similarity" else f"{threshold:+.1f}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _count(share: CountedShare) -> str:
    return f"{share.count:,} of {share.of:,}" if share.of else ""


def _interval(share: CountedShare, confidence: float, digits: int) -> str:
    return f"{share.value:.{digits}%} ({share.low(confidence):.{digits}%} to {share.high(confidence):.{digits}%})"
