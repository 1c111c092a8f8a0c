"""Errors of forecasts by class: quantity, structure, format and generation, as scripts/fit_performance writes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.plan.performance.brackets import ClassErrors, Kin, bracket, coverage
from pipeline.plan.performance.estimates import MANY_SET_UPS, QUANTITIES, Quantity
from pipeline.plan.performance.published import PublishedFigure

FEWEST = 5  # measurements of a class

Values = npt.NDArray[np.float64]
Offs = dict[tuple[PublishedFigure, Quantity], float]  # logarithms of measured over computed
Key = tuple[int, str, str, str]


def summary(offs: Values) -> dict[str, float]:
    """Summarize errors of forecasts; `offs` are logarithms of measured over computed."""
    errors_ = np.exp(-offs) - 1
    return {
        "count": len(offs),
        "mean": np.abs(errors_).mean(),
        "median": np.median(np.abs(errors_)),
        "p90": np.quantile(np.abs(errors_), 0.9),
        "bias": np.median(errors_),
    }


def by_class(offs: Offs) -> dict[Key, list[tuple[PublishedFigure, Quantity]]]:
    """Sort measurements by class."""
    found: dict[Key, list[tuple[PublishedFigure, Quantity]]] = {}
    for figure, name in offs:
        found.setdefault((QUANTITIES.index(name), *figure.group), []).append((figure, name))
    return dict(sorted(found.items()))


def row(key: Key, figure: dict[str, Any]) -> dict[str, Any]:
    """Name the parts of a class, and round its figures to three digits."""
    names = ("quantity", "structure", "format", "generation")
    return dict(zip(names, (QUANTITIES[key[0]], *key[1:]), strict=True)) | _rounded(figure)


def _rounded(figure: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(float(value), 3) if isinstance(value, float) else value for name, value in figure.items()
    }


def classes(set_ups: Offs, unseen: Offs) -> list[dict[str, Any]]:
    """Summarize errors by class, with brackets and how many set-ups these hold that they were not set by."""
    sorted_ = {key: ones for key, ones in by_class(set_ups).items() if len(ones) >= FEWEST}
    errors_ = {
        key: ClassErrors.of([set_ups[one] for one in ones], [figure.set_up for figure, _ in ones])
        for key, ones in sorted_.items()
    }
    found = []
    for key, ones in sorted_.items():
        own, other = errors_[key], np.array([unseen[one] for one in ones])
        kin = Kin.of([one for near, one in errors_.items() if near != key and near[:2] == key[:2]])
        low, high = bracket(own, kin)
        held, held_unseen = coverage(own, kin), coverage(own, kin, other)
        figure = {
            **summary(own.offs),
            "set_ups": own.set_ups,
            "low": low,
            "high": high,
            "covered": held and held.share,
            "covered_error": held and held.error,
            "unseen": float(np.median(np.abs(np.exp(-other) - 1))),
            "unseen_covered": held_unseen and held_unseen.share,
        }
        found.append(row(key, figure))
    return found


def together(offs: Offs, classes_: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize classes together: dense and sparse models, and those of too few set-ups to be judged alone."""
    of = by_class(offs)
    found = []
    for number, quantity in enumerate(QUANTITIES):
        own = [one for one in classes_ if one["quantity"] == quantity and one["covered"] is not None]
        for members, chosen in {
            "dense": [one for one in own if one["structure"].startswith("dense")],
            "sparse": [one for one in own if one["structure"].startswith("sparse")],
            "small": [one for one in own if one["set_ups"] < MANY_SET_UPS],
        }.items():
            if not chosen:
                continue
            keys = [(number, one["structure"], one["format"], one["generation"]) for one in chosen]
            counts = np.array([one["set_ups"] for one in chosen])
            figure = {
                **summary(np.array([offs[one] for key in keys for one in of[key]])),
                "set_ups": int(counts.sum()),
                "covered": float(np.average([one["covered"] for one in chosen], weights=counts)),
                "covered_error": float(
                    np.linalg.norm(counts * [one["covered_error"] for one in chosen]) / counts.sum()
                ),
            }
            found.append(
                {"quantity": quantity, "members": members, "classes": len(chosen)} | _rounded(figure)
            )
    return found


def checks(offs: Offs, classes_: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Summarize the errors of measurements that are never fitted, by source and class, and how many brackets hold."""
    found = []
    for source in sorted({figure.source for figure, _ in offs}):
        own = {one: value for one, value in offs.items() if one[0].source == source}
        for key, ones in by_class(own).items():
            values, held = np.array([own[one] for one in ones]), None
            for same in (one for one in classes_ if row(key, {}).items() <= one.items()):
                low, high = np.log((same["low"], same["high"]))
                held = float(((values >= low) & (values <= high)).mean())
            found.append({"source": source} | row(key, {**summary(values), "covered": held}))
    return found
