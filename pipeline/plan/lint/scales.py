"""Values of a checkpoint's scales: small reads, the smallest tensors first, up to a limit for each file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.models.header import HeaderEntry
from pipeline.models.tensors import DTYPES
from pipeline.plan.lint.findings import Finding, Severity

# Gives bytes of a file, by its name, first byte and end.
ReadPart = Callable[[str, int, int], bytes]
MOST_BYTES = 1 << 20  # of scales that are read of a file
_GAP = 1 << 12  # bytes between two tensors that are read at once

_NOISE = "what it scales is served as nothing, or as no number"


def scale_values(
    files: Mapping[str, Sequence[HeaderEntry]], is_scale: Callable[[str], bool], read: ReadPart | None
) -> Iterator[Finding]:
    """Yield what is wrong with the values of scales."""
    wrong: dict[tuple[Severity, str], list[str]] = defaultdict(list)
    unread: list[str] = []
    for file, entries in files.items():
        scales = [entry for entry in entries if is_scale(entry.name) and entry.dtype in DTYPES]
        if read is None:
            unread += [scale.name for scale in scales]
            continue
        places = _neighbours(_chosen(scales))
        chosen = {scale.name for together in places for scale in together}
        unread += [scale.name for scale in scales if scale.name not in chosen]
        for together in places:
            begin, end = together[0].begin, together[-1].end
            content = read(file, begin, end)
            for entry in together:
                part = content[entry.begin - begin : entry.end - begin]
                if len(part) < entry.end - entry.begin:
                    unread.append(entry.name)
                elif fault := _fault(np.frombuffer(part, DTYPES[entry.dtype])):
                    wrong[fault].append(entry.name)
    for (severity, problem), names in wrong.items():
        yield Finding(severity, problem, tuple(names), "positive numbers", _NOISE)
    if unread:
        yield Finding("not judged", "values of scales, which were not read", tuple(unread))


def _chosen(scales: Sequence[HeaderEntry]) -> list[HeaderEntry]:
    smallest, total = [], 0
    for entry in sorted(scales, key=lambda scale: scale.end - scale.begin):
        total += entry.end - entry.begin
        if total > MOST_BYTES:
            break
        if entry.end > entry.begin:
            smallest.append(entry)
    return smallest


def _neighbours(entries: Sequence[HeaderEntry]) -> list[list[HeaderEntry]]:
    groups: list[list[HeaderEntry]] = []
    for entry in sorted(entries, key=lambda entry: entry.begin):
        if groups and entry.begin - groups[-1][-1].end <= _GAP:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups


def _fault(values: NDArray[Any]) -> tuple[Severity, str] | None:
    if values.dtype.kind in "iub":  # exponents of 8 bits (E8M0): all are powers of two, but the last
        return ("error", "holds scales that are no numbers") if (values == 255).any() else None
    numbers = values.astype(np.float32)
    if np.isnan(numbers).any():
        return "error", "holds scales that are no numbers"
    if np.isinf(numbers).any():
        return "error", "holds scales that are infinite"
    if not numbers.any():
        return "error", "is zero" if numbers.size == 1 else "holds nothing but zeros"
    if (numbers < 0).any():
        return "error", "holds scales that are negative"
    return ("warning", "holds zeros") if (numbers == 0).any() else None
