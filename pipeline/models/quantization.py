"""Which layers of a checkpoint of ours are quantized, and how: `quantization_config` and hf_quant_config.json.

The names are ModelOpt's (0.37 to 0.47). config.json lacks the group size for AWQ as ModelOpt writes it, so
the two files are read together, and must agree where both speak. Published checkpoints are quantized in many more ways
(`pipeline.models.published`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.reading import read_json


class Format(StrEnum):
    """How the weights of the linear layers are held, and how their inputs are rounded."""

    NONE = "none"
    FP8 = "fp8"  # weights and inputs e4m3, one scale a tensor
    INT4_AWQ = "int4_awq"  # weights 4-bit in groups; inputs as they are
    W4A8_AWQ = "w4a8_awq"  # weights 4-bit in groups, then e4m3; inputs e4m3
    INT8_SQ = "int8_sq"  # weights 8-bit, one scale a row; inputs 8-bit, one scale a tensor
    MXFP4 = "mxfp4"  # experts alone: weights e2m1 in groups of 32 with powers of two; as gpt-oss is published
    NVFP4 = "nvfp4"  # weights and inputs e2m1 in groups of 16 with e4m3 scales


ALGORITHMS: Mapping[str, Format] = {
    "FP8": Format.FP8,
    "W4A16_AWQ": Format.INT4_AWQ,
    "W4A8_AWQ": Format.W4A8_AWQ,
    "W8A8_SQ_PER_CHANNEL": Format.INT8_SQ,
    "NVFP4": Format.NVFP4,
}
GROUPED = (Format.INT4_AWQ, Format.W4A8_AWQ, Format.NVFP4)


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """How a checkpoint is quantized, by its files."""

    format: Format = Format.NONE
    group_size: int | None = None  # columns that share a scale
    kv_cache: str | None = None  # "FP8": keys and values are rounded to e4m3, one scale each a layer
    excluded: tuple[str, ...] = ()  # patterns of layers that keep their precision
    producer: str = ""  # "modelopt 0.47.0"

    def format_of(self, layer: str) -> Format:
        """Return the format of a linear layer ("model.layers.0.self_attn.q_proj"), `Format.NONE` if it was left out.

        Experts in MXFP4 are stored in one tensor, and are no linear layers here.
        """
        left_alone = self.format is Format.MXFP4 or any(
            fnmatchcase(layer, pattern) for pattern in self.excluded
        )
        return Format.NONE if left_alone else self.format

    @classmethod
    def read(cls, directory: Path) -> CheckpointQuantization:
        """Read a folder's config.json and hf_quant_config.json; `Format.NONE` if neither says that it is quantized.

        Raises:
            CheckpointError: they disagree, or are not ModelOpt's.
            UnreadableFile: one of them cannot be read.
        """
        inside = read_json(directory / "config.json").get("quantization_config")
        beside = directory / "hf_quant_config.json"
        whole = read_json(beside) if beside.exists() else {}
        outside = whole.get("quantization")
        if not all(isinstance(part, dict | None) for part in (inside, outside, whole.get("producer"))):
            raise CheckpointError(
                f"{directory}: quantization_config or {beside.name} is not an object of settings"
            )
        if inside is None and outside is None:
            return cls()
        if outside is None and inside is not None and inside.get("quant_method") == "mxfp4":
            return cls(format=Format.MXFP4, producer="openai")
        if inside is not None and outside is None and inside.get("quant_method") != "modelopt":
            raise CheckpointError(
                f"{directory} is quantized by {inside.get('quant_method')!r}; ModelOpt's layout and MXFP4 are read"
            )
        _check_agreement(directory, inside, outside)
        return cls.of(directory, {**(inside or {}), **(outside or {})}, whole.get("producer"))

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
            raise CheckpointError(f"{directory}: group_size is no number, or the layers left out are no list")
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
        ours, theirs = inside.get(key), outside.get(key)
        if ours is not None and theirs is not None and ours != theirs:
            raise CheckpointError(
                f"{directory}: config.json says {key} {ours!r}, hf_quant_config.json says {theirs!r}"
            )
