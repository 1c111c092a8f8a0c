"""Names under which the metrics page shows what a gateway counts: its own, vLLM's, and OpenTelemetry's for GenAI.

A `View` shows one observation of `pipeline.gateway.metrics` under one name; nothing is counted twice. Written against

- vLLM 0.11 to 0.12, `vllm/v1/metrics/loggers.py` (class PrometheusStatLogger): names, label names `model_name` and
  `engine`, and the bounds of buckets, all of which are among ours up to 160 s;
- OpenTelemetry's semantic conventions 1.37 to 1.42, `docs/gen-ai/gen-ai-metrics.md` (status: development), with names
  and units as OpenTelemetry's Prometheus exporters write them: `_` for `.`, `_seconds` for the unit `s`, and no suffix
  for the unit `{token}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, Literal

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from pipeline.recipe.deployment import MetricNames
from pipeline.resources import parse_yaml


@dataclass(frozen=True, slots=True)
class View:
    """One family of the metrics page.

    Attributes:
        name: name of the family, without the `_total` of counters.
        help: one sentence for the page.
        kind: type of the family.
        source: name of the observation that it shows.
        labels: label of the page -> label of the observation. Samples that differ in others only are added up.
        constant: further labels, the same for every sample.
        where: label of the observation -> the value that is shown; samples with others are left out.
        sum_only: show the sum of a histogram as a counter.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge", "histogram"]
    source: str
    labels: Mapping[str, str]
    constant: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    sum_only: bool = False

    def without_tenants(self) -> View:
        """Return a view in which all tenants are one, whose label is empty."""
        if "tenant" not in self.labels:
            return self
        others = {shown: of for shown, of in self.labels.items() if shown != "tenant"}
        return replace(self, labels=others, constant={**self.constant, "tenant": ""})

    def show(self, samples: Iterable[Sample]) -> Metric:
        """Build the family from samples of the observation, whose names begin with its name."""
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in samples:
            suffix = sample.name.removeprefix(self.source)
            if self.sum_only:
                if suffix != "_sum":
                    continue
                suffix = "_total"
            if any(sample.labels[name] != value for name, value in self.where.items()):
                continue
            labels = {**{shown: sample.labels[name] for shown, name in self.labels.items()}, **self.constant}
            if "le" in sample.labels:
                labels["le"] = sample.labels["le"]
            key = (suffix, tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        metric = Metric(self.name, self.help, self.kind)
        for (suffix, labels_of), value in sums.items():
            metric.add_sample(self.name + suffix, dict(labels_of), value)
        return metric


_SCHEMES: Mapping[str, Any] = parse_yaml(
    (resources.files("pipeline.gateway") / "data" / "metric_names.yaml").read_text("utf-8")
)
# Upper bounds of the buckets of histograms, by what they observe.
BUCKETS: Mapping[str, Sequence[float]] = _SCHEMES["buckets"]
# Value of OpenTelemetry's label `gen_ai.provider.name`.
PROVIDER: str = _SCHEMES["gen_ai"]["constant"]["gen_ai_provider_name"]


def _views(scheme: str) -> tuple[View, ...]:
    names, views = _SCHEMES[scheme], []
    for name, row in names["views"].items():
        show = {"labels": names["labels"], "constant": names["constant"], **row["show"]}
        show["labels"] = show["labels"] | show.pop("extra", {})
        views.append(View(name, row["help"], **show))
    return tuple(views)


OWN_VIEWS = _views("own")
OTHER_VIEWS: Mapping[MetricNames, tuple[View, ...]] = {"vllm": _views("vllm"), "gen_ai": _views("gen_ai")}
