"""Formats of the layers of a checkpoint whose weights are read: `quantization_config` and hf_quant_config.json.

ModelOpt's (0.37 to 0.47), with one format or one for each layer, and compressed-tensors. config.json lacks the group
size for AWQ as ModelOpt writes it, so the two files are read together, and must agree where both speak. Published
checkpoints are quantized in many more ways, which are planned and not read (`pipeline.models.published`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.models.published import PublishedQuantization, StoredFormat, read_published
from pipeline.reading import optional_json, read_json


class Format(StrEnum):
    """How the weights of the linear layers are held, and how their inputs are rounded."""

    NONE = "none"
    FP8 = "fp8"  # weights and inputs e4m3, one scale a tensor
    INT4_AWQ = "int4_awq"  # weights 4-bit in groups; inputs as they are
    W4A8_AWQ = "w4a8_awq"  # weights 4-bit in groups, then e4m3; inputs e4m3
    INT8_SQ = "int8_sq"  # weights 8-bit, one scale a row; inputs 8-bit, one scale a tensor
    NVFP4 = "nvfp4"  # weights and inputs e2m1 in groups of 16 with e4m3 scales
    W4A16_NVFP4 = "w4a16_nvfp4"  # weights as in nvfp4; inputs as they are
    # Weights e2m1 in groups of 32 with scales that are powers of two: gpt-oss' experts, and compressed-tensors.
    MXFP4 = "mxfp4"
    # Of compressed-tensors alone.
    FP8_ROW = "fp8_row"  # weights e4m3, one scale a row
    INT8_ROW = "int8_row"  # weights 8-bit, one scale a row
    INT8_GROUP = "int8_group"  # weights 8-bit in groups
    INT4 = "int4"  # weights 4-bit in groups
    INT4_ZEROS = "int4_zeros"  # weights 4-bit in groups, each with a zero point
    AUTO = "auto"  # layers differ


ALGORITHMS: Mapping[str, Format] = {
    "FP8": Format.FP8,
    "W4A16_AWQ": Format.INT4_AWQ,
    "W4A8_AWQ": Format.W4A8_AWQ,
    "W8A8_SQ_PER_CHANNEL": Format.INT8_SQ,
    "NVFP4": Format.NVFP4,
    "W4A16_NVFP4": Format.W4A16_NVFP4,
}
AWQ = (Format.INT4_AWQ, Format.W4A8_AWQ)
FP4 = (Format.NVFP4, Format.W4A16_NVFP4, Format.MXFP4)
GROUPED = (*AWQ, *FP4)
# Weights that are whole numbers of 8 bits or fewer.
INTEGERS = (*AWQ, Format.INT8_SQ, Format.INT8_ROW, Format.INT8_GROUP, Format.INT4, Format.INT4_ZEROS)


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint is quantized, by its files."""

    format: Format = Format.NONE
    group_size: int | None = None  # columns that share a scale; None where layers differ, too
    kv_cache: str | None = None  # "FP8": keys and values are rounded to e4m3, one scale each a layer
    excluded: tuple[str, ...] = ()  # patterns of layers that keep their precision
    producer: str = ""  # "modelopt 0.47.0"
    rules: PublishedQuantization | None = None  # layer by layer, where `format` does not say it
    compressed: bool = False  # tensors are named and packed as compressed-tensors does it

    def stored(self, layer: str) -> StoredFormat:
        """Return format and group of a layer; "none" if it was left out.

        Args:
            layer: "model.layers.0.self_attn.q_proj", or a tensor of all experts ("layers.0.mlp.experts.down_proj").
        """
        if self.rules is not None:
            return self.rules.of(layer)
        if self.format is Format.MXFP4:  # of gpt-oss as it is published: experts alone
            left_alone = ".experts." not in layer
        else:
            left_alone = any(fnmatchcase(layer, pattern) for pattern in self.excluded)
        return StoredFormat() if left_alone else StoredFormat(str(self.format), self.group_size or 0)

    def format_of(self, layer: str) -> Format:
        """Return the format of a linear layer, `Format.NONE` if it was left out."""
        return Format(self.stored(layer).name)

    def kv_scale_names(self, layer: int) -> tuple[str, str]:
        """Return the names of the scales of a layer's keys and values."""
        block = f"model.layers.{layer}.self_attn."
        if self.compressed:
            return block + "k_scale", block + "v_scale"
        return block + "k_proj.k_scale", block + "v_proj.v_scale"

    @classmethod
    def read(cls, directory: Path) -> CheckpointQuantization:
        """Read a folder's config.json and hf_quant_config.json; `Format.NONE` if neither says that it is quantized.

        Raises:
            CheckpointError: they disagree, or are not ModelOpt's.
            UnreadableFile: one of them cannot be read.
        """
        inside = read_json(directory / "config.json").get("quantization_config")
        beside = directory / "hf_quant_config.json"
        whole = optional_json(beside)
        outside = whole.get("quantization")
        if not all(isinstance(part, dict | None) for part in (inside, outside, whole.get("producer"))):
            raise CheckpointError(
                f"{directory}: quantization_config or {beside.name} is not an object of settings"
            )
        if inside is None and outside is None:
            return cls()
        method = (inside or {}).get("quant_method", "modelopt")
        if outside is None and method == "mxfp4":
            return cls(format=Format.MXFP4, producer="openai")
        if outside is None and method not in ("modelopt", "compressed-tensors"):
            raise CheckpointError(
                f"{directory} is quantized by {method!r}; ModelOpt's layout, compressed-tensors' and MXFP4 are read"
            )
        if method == "compressed-tensors" or "MIXED_PRECISION" in (
            (part or {}).get("quant_algo") for part in (inside, outside)
        ):
            return cls._by_layer(directory, inside, whole, compressed=method == "compressed-tensors")
        _check_agreement(directory, inside, outside)
        return cls.of(directory, {**(inside or {}), **(outside or {})}, whole.get("producer"))

    @classmethod
    def _by_layer(
        cls, directory: Path, inside: Any, beside: Mapping[str, Any], *, compressed: bool
    ) -> CheckpointQuantization:
        rules, faults = read_published({"quantization_config": inside}, beside)
        forms = set(rules.formats)
        unread = sorted(form.name for form in forms if form.name not in tuple(Format))
        if faults or unread:
            reasons = [str(fault) for fault in faults] + [
                f"weights in {name} are not read" for name in unread
            ]
            raise CheckpointError(f"{directory}: {'; '.join(reasons)}")
        only = next(iter(forms)) if len(forms) == 1 else None
        maker = beside.get("producer") or (inside or {}).get("producer") or {}
        if compressed:
            maker = {"name": "compressed-tensors", "version": (inside or {}).get("version", "")}
        return cls(
            format=Format(only.name) if only is not None else Format.AUTO if forms else Format.NONE,
            group_size=(only.group or None) if only is not None else None,
            kv_cache=rules.kv_cache.upper() if rules.kv_cache else None,
            producer=f"{maker.get('name', '')} {maker.get('version', '')}".strip(),
            rules=rules,
            compressed=compressed,
        )

    @classmethod
    def of(
        cls, directory: Path, settings: Mapping[str, Any], producer: Mapping[str, str] | None = None
    ) -> CheckpointQuantization:
        """Read `quant_algo` and the keys beside it.

        Args:
            directory: folder of the checkpoint, named in errors; nothing is read from it.
            settings: `quantization_config`, or `quantization` of hf_quant_config.json, or both merged.
            producer: name and version of the program that quantized; None: as `settings` say.

        Raises:
            CheckpointError: the algorithm is not known, or a key is missing or of the wrong kind.
        """
        algorithm = settings.get("quant_algo")
        if algorithm is not None and algorithm not in tuple(ALGORITHMS):
            known = ", ".join(ALGORITHMS)
            raise CheckpointError(f"{directory} uses quant_algo {algorithm!r}; known are {known}")
        form = ALGORITHMS[algorithm] if algorithm else Format.NONE
        group = settings.get("group_size")
        excluded = settings.get("exclude_modules") or settings.get("ignore") or []
        if not isinstance(group, int | None) or not isinstance(excluded, list):
            raise CheckpointError(
                f"{directory}: group_size is not a number, or the layers left out are not a list"
            )
        if form in GROUPED and not group:
            raise CheckpointError(f"{directory} does not say the group_size of its {algorithm} weights")
        maker = producer or settings.get("producer") or {}
        return cls(
            format=form,
            group_size=int(group) if group and form in GROUPED else None,
            kv_cache=settings.get("kv_cache_quant_algo"),
            excluded=tuple(map(str, excluded)),
            producer=f"{maker.get('name', '')} {maker.get('version', '')}".strip(),
        )


def _check_agreement(
    directory: Path, inside: Mapping[str, Any] | None, outside: Mapping[str, Any] | None
) -> None:
    if inside is None or outside is None:
        return
    for key in ("quant_algo", "group_size"):
        own, other = inside.get(key), outside.get(key)
        if own is not None and other is not None and own != other:
            raise CheckpointError(
                f"{directory}: config.json says {key} {own!r}, hf_quant_config.json says {other!r}"
            )
