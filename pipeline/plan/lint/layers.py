"""Each weight of a checkpoint: what config.json and hf_quant_config.json say, beside what the files hold."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.models.blocks import WeightTensor
from pipeline.models.header import BITS, HeaderEntry
from pipeline.models.layer_names import bare_name, fused_names
from pipeline.models.sizes import ModelSizes
from pipeline.plan.lint.findings import Finding, Severity
from pipeline.plan.lint.layouts import (
    BESIDE,
    SCALES,
    Layout,
    StoredTensors,
    kind_of,
    kinds_of,
    layouts_of,
    room_of,
    served,
    split_name,
)

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass
class LayerCheck:
    """Walks through the weights of a description and gathers names by what is wrong with them."""

    sizes: ModelSizes
    stored: StoredTensors
    dynamic_inputs: bool

    # Severity, problem, what is expected and what is served -> names.
    wrong: dict[tuple[Severity, str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    # Format -> layers that have a scale of their inputs, and names of scales that are absent.
    with_inputs: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    without_inputs: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def findings(self) -> Iterator[Finding]:
        """Yield what is wrong with layers, and what could not be judged."""
        joined: dict[str, list[WeightTensor]] = defaultdict(list)
        absent: list[WeightTensor] = []
        for weight, formats in _single((*self.sizes.weights(), *self.sizes.draft)):
            if (place := self._place(weight)) is None:
                absent.append(weight)
            elif place != weight.name:
                joined[place].append(weight)
            else:
                self._judge(place, [weight], formats)
        for place, weights in joined.items():
            self._judge(place, weights, {part.stored for part in weights})
        self._judge_inputs()
        self._judge_absent(absent)
        if self.sizes.tied and "lm_head.weight" in self.stored.plain:
            self.stored.used.add(self.stored.plain["lm_head.weight"].name)
        unused = self.stored.unused()
        self._judge_peers(unused)
        for (severity, problem, expected, meaning), names in self.wrong.items():
            yield Finding(severity, problem, tuple(dict.fromkeys(names)), expected, meaning)
        if unused:
            yield Finding(
                "not judged", "tensors of names that are not known for this model", tuple(kinds_of(unused))
            )

    def _add(
        self, severity: Severity, problem: str, name: str, expected: str = "", meaning: str = ""
    ) -> None:
        self.wrong[severity, problem, expected, meaning].append(name)

    def _place(self, weight: WeightTensor) -> str | None:
        """Name under which the files hold a weight: its own, or that of what it is joined with."""
        if weight.name in self.stored.plain or weight.name in self.stored.layers:
            return weight.name
        if weight.name.endswith(".bias") and not weight.quantizable:
            owner = next(
                (
                    name
                    for name in fused_names(weight.name[:-5])
                    if "bias" in self.stored.layers.get(name, {})
                ),
                None,
            )
            return None if owner is None else f"{owner}.bias"
        return next((name for name in fused_names(weight.name) if name in self.stored.layers), None)

    def _judge(self, place: str, weights: Sequence[WeightTensor], formats: Iterable[str]) -> None:
        if place.endswith(".bias") and place not in self.stored.plain:
            entry = self.stored.layers[place[:-5]]["bias"]
            self._judge_plain(entry, weights)
            return
        if place in self.stored.plain and place not in self.stored.layers:
            self._judge_plain(self.stored.plain[place], weights)
            return
        parts = self.stored.layers[place]
        wanted = [layout for form in formats for layout in layouts_of(form)]
        layout = next(
            (
                layout
                for layout in wanted
                if layout.carrier in parts and parts[layout.carrier].dtype in layout.types
            ),
            None,
        )
        if layout is not None:
            self._judge_quantized(parts, layout, weights)
        elif "none" in formats and "weight" in parts and parts["weight"].dtype in FLOATS:
            self._judge_plain(parts["weight"], weights)
            self._judge_orphans(parts)
        else:
            self._judge_wrong_format(place, parts, formats, wanted)

    def _judge_plain(self, entry: HeaderEntry, weights: Sequence[WeightTensor]) -> None:
        self.stored.used.add(entry.name)
        count = sum(weight.parameters for weight in weights)
        if math.prod(entry.shape) != count and any(weight.kind == "vision" for weight in weights):
            self._add("not judged", "a tower for images of other shapes", entry.name)
        elif math.prod(entry.shape) != count:
            sizes = " + ".join(_shape(weight) for weight in weights)
            problem = f"has the shape {list(entry.shape)}"
            self._add(
                "error", problem, entry.name, f"{sizes}, by config.json", "servers refuse it, or read past it"
            )

    def _judge_orphans(self, parts: Mapping[str, HeaderEntry]) -> None:
        for part, entry in parts.items():
            if part in SCALES and part not in BESIDE:
                self.stored.used.add(entry.name)
                self._add(
                    "error", "is the scale of a weight that is not quantized", entry.name,
                    "a quantized weight beside it", "servers drop it: the weight is not what it stood for",
                )  # fmt: skip

    def _judge_wrong_format(
        self, place: str, parts: Mapping[str, HeaderEntry], formats: Iterable[str], wanted: Sequence[Layout]
    ) -> None:
        self.stored.used |= {entry.name for entry in parts.values()}
        carriers = sorted({"weight", *(layout.carrier for layout in wanted)} & parts.keys())
        carried = [parts[part] for part in carriers] or [
            parts[part] for part in ("qweight", "weight_packed", "blocks") if part in parts
        ]
        expected = (
            " or ".join(f"{layout.carrier} of {'/'.join(layout.types)}" for layout in wanted)
            or "weight of a float type"
        )
        form = " or ".join(sorted(formats))
        reason = (
            f"{expected}, since the settings say {form}"
            if wanted
            else f"{expected}, since the settings leave it out"
        )
        if carried:
            for entry in carried:
                self._add(
                    "error",
                    f"is {entry.dtype}",
                    entry.name,
                    reason,
                    "its bytes are taken for numbers of another format",
                )
        else:
            first = next(iter(parts.values())).name
            self._add(
                "error", "is missing, its scales are there", f"{_owner(first, place)}.weight", reason,
                "servers refuse it or leave random numbers",
            )  # fmt: skip

    def _judge_quantized(
        self, parts: Mapping[str, HeaderEntry], layout: Layout, weights: Sequence[WeightTensor]
    ) -> None:
        carrier = parts[layout.carrier]
        joint = carrier.name.removesuffix(layout.carrier)
        if joint == carrier.name:  # stacked experts whose weight has no part of its own
            joint = f"{carrier.name}_"
        known = {layout.carrier, "bias", *layout.names}
        self.stored.used |= {entry.name for part, entry in parts.items() if part in known}
        bits, stored_bits = (
            sum(weight.parameters for weight in weights) * layout.bits,
            math.prod(carrier.shape) * BITS[carrier.dtype],
        )
        if bits != stored_bits:
            sizes = " + ".join(_shape(weight) for weight in weights)
            problem = f"is {carrier.dtype} {list(carrier.shape)}, {stored_bits // layout.bits} weights"
            self._add(
                "error",
                problem,
                carrier.name,
                f"{sizes} in {layout.format}",
                "servers refuse it, or read past it",
            )
        unknown = parts.keys() - known - BESIDE - {"weight"}
        for names, kind in layout.scales.items():
            name = next((part for part in names if part in parts), None)
            if name is None and unknown:
                problem = f"{layout.format} with parts that are not known ({', '.join(sorted(unknown))})"
                self._add("not judged", problem, carrier.name)
            elif name is None:
                self._add(
                    "error",
                    "is missing",
                    joint + names[0],
                    f"a scale of {layout.format}",
                    served("weight_scale"),
                )
            elif (counts := layout.counts(kind, weights)) and math.prod(parts[name].shape) not in counts:
                entry, count = parts[name], math.prod(parts[name].shape)
                wanted = " or ".join(map(str, sorted(counts)))
                problem = f"has the shape {list(entry.shape)}, {count} scales"
                self._add(
                    "error",
                    problem,
                    entry.name,
                    f"{wanted}, one a {kind} of {layout.format}",
                    "scales are misread",
                )
        if layout.inputs:
            if layout.inputs in parts:
                self.with_inputs[layout.format] += 1
            else:
                self.without_inputs[layout.format].append(joint + layout.inputs)

    def _judge_inputs(self) -> None:
        """Where a layer of a format has the scale of its inputs, all have; unless none has and the settings say so."""
        for form, lacking in self.without_inputs.items():
            have = self.with_inputs[form]
            expected = f"a number, as {have} others of {form} have" if have else f"a number, as {form} has"
            if have or not self.dynamic_inputs:
                for name in lacking:
                    self._add(
                        "error" if have else "warning", "is missing", name, expected, served("input_scale")
                    )

    def _judge_absent(self, absent: Sequence[WeightTensor]) -> None:
        unused = [self.stored.plain[bare_name(name)] for name in self.stored.unused()]
        places = {room_of(bare_name(entry.name)) for entry in unused}
        counts = {(room_of(bare_name(entry.name)), math.prod(entry.shape)) for entry in unused}
        kinds = {kind_of(name) for name in (*self.stored.plain, *self.stored.layers)}
        draft = {weight.name for weight in self.sizes.draft}
        no_draft = bool(draft) and draft <= {weight.name for weight in absent}
        prefix = next(
            (e.name.removesuffix(b) for b, e in self.stored.plain.items() if b.startswith("layers.")), ""
        )
        for weight in absent:
            name = ("" if weight.kind == "lm_head" else prefix) + weight.name
            name += "" if _is_whole(weight) else ".weight"
            is_like = kind_of(weight.name) in kinds
            if weight.kind == "mtp" and no_draft:
                self._add("warning", "layers that predict further tokens (MTP) are missing", kind_of(name),
                          "as config.json says",
                          "speculation by MTP cannot be had")  # fmt: skip
            elif weight.kind == "vision" and not is_like:
                self._add("not judged", "a tower for images under other names, or none", kind_of(name))
            elif not is_like and (
                (room_of(weight.name), weight.parameters) in counts
                or (weight.kind not in ("embedding", "lm_head") and room_of(weight.name) in places)
            ):
                self._add("not judged", "weights under other names, or none", kind_of(name))
            else:
                self._add(
                    "error", "is missing", name, _shape(weight), "servers refuse it or leave random numbers"
                )

    def _judge_peers(self, unused: Iterable[str]) -> None:
        """Layers of names that are not known: a scale that one of a kind has, the others have."""
        kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for layer in dict.fromkeys(split_name(bare_name(name))[0] for name in unused):
            # Layers that are left out have another type, and no scales.
            types = {entry.dtype for part, entry in self.stored.layers[layer].items() if part not in SCALES}
            kinds[kind_of(layer), *sorted(types)].append(layer)
        for layers in kinds.values():
            parts = {part for layer in layers for part in self.stored.layers[layer] if part in SCALES}
            for layer in layers:
                first = next(iter(self.stored.layers[layer].values())).name
                for part in sorted(parts - self.stored.layers[layer].keys()):
                    name = f"{_owner(first, layer)}.{part}"
                    self._add(
                        "error",
                        "is missing",
                        name,
                        "a scale, as others of its kind have",
                        served("weight_scale"),
                    )


def _single(weights: Iterable[WeightTensor]) -> Iterator[tuple[WeightTensor, set[str]]]:
    """Yield each weight by itself, with the formats that it may have: experts that differ are not told apart."""
    together: dict[str, list[WeightTensor]] = defaultdict(list)
    for weight in weights:
        together[weight.name].append(weight)
    for name, same in together.items():
        copies, formats = sum(weight.copies for weight in same), {weight.stored for weight in same}
        if ".experts.0." not in name or copies == 1:
            yield same[0], formats
            continue
        for index in range(copies):
            yield replace(same[0], name=name.replace(".experts.0.", f".experts.{index}."), copies=1), formats


def _is_whole(weight: WeightTensor) -> bool:
    """Whether its name is that of a tensor and not of a layer."""
    last = weight.name.rsplit(".", 1)[-1]
    return not weight.quantizable and last.endswith(("bias", "A_log", "D", "sinks", "attn_sink", "ape"))


def _shape(weight: WeightTensor) -> str:
    size = f"[{weight.rows}]" if weight.columns == 1 else f"[{weight.rows}, {weight.columns}]"
    return size if weight.copies == 1 else f"{weight.copies} of {size}"


def _owner(name: str, layer: str) -> str:
    """A layer's name as the checkpoint spells it, by that of one of its tensors."""
    return name[: name.index(layer) + len(layer)]
