"""Results of `pipeline cache tune`, for people and as JSON: of labelled pairs, and of a log of questions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from pipeline.cache.tuning.choosing import TunedSetting, by_category, weigh
from pipeline.cache.tuning.measuring import (
    BUILT_IN,
    FLOORS,
    SCORES,
    CountedShare,
    PairMeasurements,
    PairOutcome,
    Setting,
)
from pipeline.cache.tuning.pairs import MIN_SIMILARITY, MOST, Repeats
from pipeline.cli.output import cut

# Characters of a bar.
_BAR = 24
# Rows of the table of thresholds; every eighth threshold has a bar.
_ROWS, _STEP = 12, 8
_EXAMPLES = 5
# Longest name of a category.
_NAME = 60
_FLOORS = [floor for floor in FLOORS if floor >= MIN_SIMILARITY]


def choice_page(measured: PairMeasurements, choice: TunedSetting) -> str:
    """Write the curve, the rows around the choice, guards, categories, the evidence, and the lines of the recipe."""
    outcome = choice.outcome
    head = f"{len(measured.pairs):,} pairs: {outcome.recall.of:,} that one answer serves, {outcome.false.of:,} traps"
    wrong = measured.served(choice.setting, same=False)[:_EXAMPLES]
    judges = [f"judged by: {', '.join(measured.scores)}"] if len(measured.scores) > 1 else []
    parts = [
        [head, *judges],
        _curve(measured, choice),
        _table(measured, choice),
        _guards(measured, choice),
        _categories(measured, choice),
        [*_verdict(choice), *(f"  served wrongly: {pair.a}  |  {pair.b}" for pair in wrong)],
        recipe_lines(measured, choice.setting) if choice.meets_budget else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def recipe_lines(measured: PairMeasurements, setting: Setting) -> list[str]:
    """Return the lines for a recipe."""
    lines = [
        "cache:",
        "  semantic:",
        "    mode: serve",
        f"    min_score: {setting.min_score:g}",
        f"    min_similarity: {setting.min_similarity:g}",
    ]
    if len(measured.scores) > 1:
        lines.append(
            f"    verifier: {'null' if setting.verifier == BUILT_IN else json.dumps(setting.verifier)}"
        )
    if set(setting.guards) != set(measured.guards):
        lines.append(f"    guards: [{', '.join(setting.guards)}]")
    return lines


def choice_json(measured: PairMeasurements, choice: TunedSetting) -> str:
    """Return the same as JSON, with every threshold."""
    setting, sure = choice.setting, choice.confidence
    document = {
        "pairs": len(measured.pairs),
        "budget": choice.budget,
        "confidence": sure,
        "meets_budget": choice.meets_budget,
        "basis": choice.basis,
        "traps_needed": choice.traps_needed,
        "can_show": None if choice.can_show is None else round(choice.can_show, 5),
        "chosen": {
            "verifier": setting.verifier,
            "min_similarity": setting.min_similarity,
            **_row(choice.outcome, sure),
            "guards": list(setting.guards),
            "left_out": [name for name in measured.guards if name not in setting.guards],
        },
        "default": {"min_similarity": choice.default.setting.min_similarity, **_row(choice.default, sure)},
        "candidates": choice.candidates,
        "shown": {**_row(choice.shown, sure), "bound": round(choice.bound, 5)},
        "held_out": _row(choice.shown, sure) if choice.halved else None,
        "thresholds": [_row(measured.outcome(replace(setting, min_score=score)), sure) for score in SCORES],
        "guards": [
            {"guard": weight.guard, "stopped_alone": weight.stopped, "lost_alone": weight.lost}
            for weight in weigh(measured, setting)
        ],
        "categories": {
            name: {"recall": _share(counted.recall, sure), "false_hits": _share(counted.false, sure)}
            for name, counted in by_category(measured, setting).items()
        },
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _curve(measured: PairMeasurements, choice: TunedSetting) -> list[str]:
    setting = choice.setting
    lines = [
        f"  {'':<7}{'true pairs served':<{_BAR + 2}}{'traps served':<{_BAR + 2}}traps served without guards"
    ]
    for score in sorted({*SCORES[::_STEP], setting.min_score}):
        outcome = measured.outcome(replace(setting, min_score=score))
        bare = measured.outcome(replace(setting, min_score=score, guards=()))
        lines.append(
            f"{_mark(score, setting)} {score:<7g}"
            f"{_bar(outcome.recall, '#')}  {_bar(outcome.false, '!')}  {_bar(bare.false, '!')}"
        )
    return lines


def _table(measured: PairMeasurements, choice: TunedSetting) -> list[str]:
    sure, setting = choice.confidence, choice.setting
    lines = [f"  {'min_score':<11}{f'recall ({sure:.0%} interval)':<26}false hits"]
    at = SCORES.index(setting.min_score)
    first = max(0, min(at - _ROWS // 2, len(SCORES) - _ROWS))
    for score in SCORES[first : first + _ROWS]:
        outcome = measured.outcome(replace(setting, min_score=score))
        lines.append(
            f"{_mark(score, setting)} {score:<11g}{_interval(outcome.recall, sure, 1):<26}"
            f"{_interval(outcome.false, sure, 2)}"
        )
    return lines


def _guards(measured: PairMeasurements, choice: TunedSetting) -> list[str]:
    lines = [f"  {'guard':<16}{'traps it alone stops':<26}true pairs it alone costs"]
    lines += [
        f"  {weight.guard:<16}{weight.stopped:<26,}{weight.lost:,}"
        for weight in weigh(measured, choice.setting)
    ]
    left_out = [name for name in measured.guards if name not in choice.setting.guards]
    return [*lines, *(f"  {name:<16}left out" for name in left_out)]


def _categories(measured: PairMeasurements, choice: TunedSetting) -> list[str]:
    outcomes = by_category(measured, choice.setting)
    if not outcomes:
        return []
    width = min(max(16, *(len(name) + 2 for name in outcomes)), _NAME)
    lines = [f"  {'category':<{width}}{'true pairs served':<26}traps served"]
    for name, outcome in outcomes.items():
        lines.append(
            f"  {cut(name, width - 2):<{width}}{_count(outcome.recall):<26}{_count(outcome.false)}".rstrip()
        )
    return lines


def _verdict(choice: TunedSetting) -> list[str]:
    outcome, sure, shown = choice.outcome, choice.confidence, choice.shown
    budget = f"{100 * choice.budget:g}%"
    lines = [f"At {_served(outcome)}.", f"By default, at {_served(choice.default)}."]
    if choice.basis == "interval":
        how = (
            "One half of the pairs chose verifier, guards and floor, and the other shows it"
            if choice.halved
            else "Only the score was chosen, and all pairs show it"
        )
        lines += [
            f"Shown: at most {choice.bound:.2%} of traps are served, with {sure:.0%} confidence, which is "
            f"within the budget of {budget}.",
            f"{how}: {shown.false.count} of {shown.false.of:,} traps, {shown.recall.value:.0%} of the true pairs. It "
            "holds for questions like those of the pairs.",
        ]
        if choice.candidates > 1:
            lines.append(f"It serves most of {choice.candidates} settings whose bounds hold together.")
        return lines
    lines.append(
        f"Nothing is promised: these pairs cannot show that the budget of {budget} is kept. That takes "
        f"{choice.traps_needed:,} traps of which none is served"
        + (
            ", twice as many to choose more than the score."
            if outcome.false.of < 2 * choice.traps_needed
            else "."
        )
    )
    if choice.can_show is not None:
        lines.append(f"The smallest budget that they could show is {choice.can_show:.2%}.")
    if choice.basis == "fewest":
        lines.append(
            "No threshold keeps the budget even by the rate that was observed; this one serves the fewest traps."
        )
    return lines


def _served(outcome: PairOutcome) -> str:
    setting, recall, false = outcome.setting, outcome.recall, outcome.false
    return (
        f"a score of {setting.min_score:g} and a cosine of {setting.min_similarity:g}, {recall.value:.1%} of the true "
        f"pairs are served, and {false.count} of {false.of:,} traps"
    )


def _row(outcome: PairOutcome, confidence: float) -> dict[str, Any]:
    return {
        "min_score": outcome.setting.min_score,
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


def _mark(score: float, setting: Setting) -> str:
    return ">" if score == setting.min_score else " "


def _bar(share: CountedShare, drawn: str) -> str:
    return (drawn * round(share.value * _BAR)).ljust(_BAR, ".")


def _count(share: CountedShare) -> str:
    return f"{share.count:,} of {share.of:,}" if share.of else ""


def _interval(share: CountedShare, confidence: float, digits: int) -> str:
    return f"{share.value:.{digits}%} ({share.low(confidence):.{digits}%} to {share.high(confidence):.{digits}%})"


def repeats_page(repeats: Repeats) -> str:
    """Write how many near repeats there are; which of them may share an answer only a person can say."""
    last = f" among the last {MOST:,}" if repeats.questions > MOST else ""
    lines = [
        f"{repeats.questions:,} questions, {repeats.different:,} different ones{last}",
        "",
        f"  {'min_similarity':<16}{'pairs as near':<16}that would share an answer",
    ]
    lines += [f"  {at:<16.2f}{repeats.near(at):<16,}{repeats.served(at):,}" for at in _FLOORS]
    merged = repeats.merged()
    examples = merged[:: max(1, len(merged) // _EXAMPLES)][:_EXAMPLES]
    none = f"no pair is nearer than {MIN_SIMILARITY} and would share an answer"
    lines += ["", "would share an answer:" if examples else none]
    lines += [f"  {near.similarity:.2f}  {near.a}  |  {near.b}" for near in examples]
    return "\n".join(
        [
            *lines,
            "",
            "Which of them may share one, only a person can say: --output, label them, and give them as --pairs.",
        ]
    )


def repeats_json(repeats: Repeats) -> str:
    """Return the same as JSON."""
    rows = [{"min_similarity": at, "near": repeats.near(at), "pass": repeats.served(at)} for at in _FLOORS]
    return json.dumps(
        {"questions": repeats.questions, "different": repeats.different, "thresholds": rows}, indent=2
    )
