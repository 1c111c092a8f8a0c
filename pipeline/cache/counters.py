"""How often what happened, for people and for Prometheus."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Counters:
    """Named counts that only rise; safe to use from any number of threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        with self._lock:
            self._counts[name] += by

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> Mapping[str, int]:
        """All counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))

    def prometheus(self, prefix: str = "pipeline_cache") -> str:
        """The page that Prometheus reads (text format 0.0.4)."""
        lines = [f"# TYPE {prefix}_total counter"]
        lines += [f'{prefix}_total{{event="{name}"}} {count}' for name, count in self.as_dict().items()]
        return "\n".join(lines) + "\n"
