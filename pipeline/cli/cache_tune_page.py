"""What tuning a semantic cache found, for people and as JSON."""

from __future__ import annotations

import json
from typing import Any

from pipeline.cache.tuning.choosing import THRESHOLDS, Choice
from pipeline.cache.tuning.intervals import Share
from pipeline.cache.tuning.measuring import Measured, Outcome
from pipeline.cache.tuning.repeats import MIN_SIMILARITY, MOST, Repeats

_BAR = 24  # characters
_SHOWN = THRESHOLDS[::5]
_EXAMPLES = 5


def choice_page(measured: Measured, choice: Choice) -> str:
    """A table with a curve, what was chosen, and the lines of the recipe."""
    traps = choice.outcome.false.of
    lines = [
        f"{len(measured.pairs)} pairs: {choice.outcome.recall.of} that one answer serves, {traps} traps",
        "",
        f"  {'min_similarity':<16}{'served of the pairs that may be':<{_BAR + 24}}{'traps served':<23}without checks",
    ]
    shown = sorted({*_SHOWN, choice.outcome.min_similarity})
    for threshold in shown:
        outcome = measured.outcome(threshold, choice.skipped)
        bare = measured.outcome(threshold, measured.checks)
        mark = ">" if threshold == choice.outcome.min_similarity else " "
        lines.append(
            f"{mark} {threshold:<16.2f}{_bar(outcome.recall)} {_percent(outcome.recall, choice.confidence):<22} "
            f"{_percent(outcome.false, choice.confidence):<22} {bare.false.value:6.1%}"
        )
    lines += ["", *_verdict(choice)]
    wrong = measured.served(choice.outcome.min_similarity, choice.skipped, same=False)
    lines += [f"  served wrongly: {pair.a}  |  {pair.b}" for pair in wrong[:_EXAMPLES]]
    return "\n".join([*lines, "", *recipe_lines(choice)])


def recipe_lines(choice: Choice) -> list[str]:
    """What to write into a recipe."""
    lines = ["cache:", "  semantic:", f"    min_similarity: {choice.outcome.min_similarity:.2f}"]
    return [*lines, f"    skip_checks: [{', '.join(choice.skipped)}]"] if choice.skipped else lines


def choice_json(measured: Measured, choice: Choice) -> str:
    """The same, with every threshold."""
    document = {
        "pairs": len(measured.pairs),
        "budget": choice.budget,
        "confidence": choice.confidence,
        "meets_budget": choice.meets_budget,
        "traps_needed": choice.traps_needed,
        "chosen": {**_row(choice.outcome, choice.confidence), "skip_checks": list(choice.skipped)},
        "held_out": None if choice.held_out is None else _row(choice.held_out, choice.confidence),
        "thresholds": [
            _row(measured.outcome(threshold, choice.skipped), choice.confidence) for threshold in THRESHOLDS
        ],
    }
    return json.dumps(document, indent=2)


def repeats_page(found: Repeats) -> str:
    """How many near repeats there are; which of them may share an answer only a person can say."""
    lines = [
        f"{found.questions} questions, {found.different} different ones"
        + (f" among the last {MOST}" if found.questions > MOST else ""),
        "",
        f"  {'min_similarity':<16}{'pairs as near':<16}that pass every check",
    ]
    lines += [f"  {at:<16.2f}{found.near(at):<16}{found.served(at)}" for at in _SHOWN]
    examples = [near for near in found.sample(2 * _EXAMPLES) if near.objection is None]
    lines += (
        ["", "would be served the same answer:"]
        if examples
        else ["", f"no pair is nearer than {MIN_SIMILARITY} and passes every check"]
    )
    lines += [f"  {near.similarity:.2f}  {near.a}  |  {near.b}" for near in examples]
    return "\n".join(
        [
            *lines,
            "",
            "Without labels nobody knows which of these hits would be wrong: write pairs with --to-label, label them,",
            "and tune with that file.",
        ]
    )


def repeats_json(found: Repeats) -> str:
    """The same as JSON."""
    rows = [{"min_similarity": at, "near": found.near(at), "pass": found.served(at)} for at in THRESHOLDS]
    return json.dumps(
        {"questions": found.questions, "different": found.different, "thresholds": rows}, indent=2
    )


def _verdict(choice: Choice) -> list[str]:
    outcome, sure = choice.outcome, f"{choice.confidence:.0%} interval"
    budget = f"{100 * choice.budget:g} %"
    lines = [
        f"At {outcome.min_similarity:.2f}, {outcome.recall.value:.0%} of the pairs are served, and "
        f"{outcome.false.count} of {outcome.false.of} traps, at most "
        f"{outcome.false.high(choice.confidence):.2%} ({sure})."
    ]
    if choice.meets_budget:
        lines.append(f"That is within the budget of {budget}.")
    elif outcome.false.count == 0:
        lines.append(
            f"That does not show that the budget of {budget} is met: it takes {choice.traps_needed} traps, none of "
            f"them served; here are {outcome.false.of}."
        )
    else:
        lines.append(f"No setting meets the budget of {budget}; this one serves the fewest traps.")
    if choice.held_out is not None:
        held = choice.held_out
        lines.append(
            f"On fifths of the pairs that did not choose: recall {held.recall.value:.0%}, traps served "
            f"{held.false.count} of {held.false.of}, at most {held.false.high(choice.confidence):.2%}."
        )
    return lines


def _row(outcome: Outcome, confidence: float) -> dict[str, Any]:
    return {
        "min_similarity": round(outcome.min_similarity, 3),
        "recall": _share(outcome.recall, confidence),
        "false_hits": _share(outcome.false, confidence),
    }


def _share(share: Share, confidence: float) -> dict[str, float]:
    return {
        "count": share.count,
        "of": share.of,
        "share": round(share.value, 5),
        "low": round(share.low(confidence), 5),
        "high": round(share.high(confidence), 5),
    }


def _bar(share: Share) -> str:
    return ("#" * round(share.value * _BAR)).ljust(_BAR, ".")


def _percent(share: Share, confidence: float) -> str:
    return f"{share.value:6.1%} ({share.low(confidence):.1%} to {share.high(confidence):.1%})"
