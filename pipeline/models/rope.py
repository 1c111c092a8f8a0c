"""Rotary position embedding: its settings in both layouts of config.json, and the frequencies that they mean.

Formulas: transformers 5.14, modeling_rope_utils.py. What stretches with each text (`dynamic`), or takes positions of
several dimensions, is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import Fault

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_THETA = 10_000.0
# By `model_type`, where it is another one (configuration_*.py of transformers 5.14); not of Gemma's windowed layers.
_THETAS: Mapping[str, float] = {"mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150_000.0}
# Kinds, and the parameters that each needs.
ROPE_KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}
FULL, WINDOWED = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `scaling` holds the parameters of `kind` other than theta."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] | None = None
    share: float = 1.0  # of each head's channels, the first ones, that turn

    @classmethod
    def from_config(cls, config: Mapping[str, Any], layers: str = FULL) -> Rope:
        """Read either layout of config.json, which must be one in which `rope_faults` finds no fault.

        Args:
            layers: Kind of layers that it is for, where each kind has settings of its own.
        """
        settings = rope_settings(config, layers)
        kind = settings.pop("rope_type")
        theta = float(settings.pop("rope_theta", DEFAULT_THETA))
        share = float(settings.pop("partial_rotary_factor", 1.0))
        return cls(theta, kind, {key: _number(value) for key, value in settings.items()} or None, share)

    def channels(self, head_dim: int) -> int:
        """Count the channels of a head that turn."""
        return int(head_dim * self.share)

    @property
    def attention_factor(self) -> float:
        """Number by which cosines and sines are multiplied."""
        scaling = self.scaling or {}
        if (declared := scaling.get("attention_factor")) is not None:
            return float(declared)
        if self.kind == "yarn":
            factor, first, all_dims = (scaling.get(key) for key in ("factor", "mscale", "mscale_all_dim"))
            if first and all_dims:
                return _stretched(factor, first) / _stretched(factor, all_dims)
            return _stretched(factor)
        if self.kind == "longrope" and scaling["factor"] > 1:
            original = scaling["original_max_position_embeddings"]
            return math.sqrt(1 + math.log(scaling["factor"]) / math.log(original))
        return 1.0

    def positions(self, longest: int) -> int:
        """Positions that a model knows whose `max_position_embeddings` are `said`."""
        scaling = self.scaling or {}
        if self.kind == "yarn":
            return max(longest, int(scaling["original_max_position_embeddings"] * scaling["factor"]))
        return int(longest * scaling["factor"]) if self.kind == "linear" else longest

    def inverse_frequencies(self, head_dim: int, *, long: bool = False) -> NDArray[np.float32]:
        """[channels / 2] float32: the radians by which one position turns each pair of channels.

        Args:
            long: By the long factors of `longrope`.
        """
        import numpy as np

        channels = self.channels(head_dim)
        exponents = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
        inverse = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        scaling = self.scaling or {}
        if self.kind == "linear":
            return (inverse / np.float32(scaling["factor"])).astype(np.float32)
        if self.kind == "llama3":
            return _llama3(inverse, scaling)
        if self.kind == "yarn":
            return _yarn(inverse, scaling, self.theta)
        if self.kind == "longrope":
            factors = np.asarray(scaling["long_factor" if long else "short_factor"], np.float32)
            return (1.0 / (factors * np.float32(self.theta) ** exponents)).astype(np.float32)
        return inverse


def _stretched(factor: Any, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(float(factor) for factor in value)
    return value if isinstance(value, bool) else float(value)


def rope_settings(config: Mapping[str, Any], layers: str = FULL) -> dict[str, Any]:
    """Read theta, kind and parameters from either layout, under the names of transformers 5.

    Args:
        layers: Kind of layers that they are for, where each kind has settings of its own.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if isinstance(settings.get(layers), Mapping):
        settings = dict(settings[layers])
    elif layers == WINDOWED:
        settings = {"rope_theta": config.get("rope_local_base_freq") or DEFAULT_THETA}
    elif (theta := config.get("rope_theta") or _THETAS.get(str(config.get("model_type")))) is not None:
        settings.setdefault("rope_theta", theta)
    kind = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings.pop("type", None)
    is_phi3 = config.get("model_type") == "phi3"
    settings["rope_type"] = kind = "longrope" if kind == "su" or (is_phi3 and kind == "yarn") else kind
    if config.get("partial_rotary_factor") is not None:
        settings["partial_rotary_factor"] = config["partial_rotary_factor"]
    if settings.get("partial_rotary_factor") in (None, 1.0):  # all channels turn, which need not be said
        settings.pop("partial_rotary_factor", None)
    original = "original_max_position_embeddings"
    if original in ROPE_KINDS.get(kind, ()):
        # Phi-3 says it beside the settings.
        positions = config.get(original) or settings.get(original) or config.get("max_position_embeddings")
        settings[original] = positions
        longest = config.get("max_position_embeddings")
        if (
            settings.get("factor") is None
            and isinstance(positions, int | float)
            and isinstance(longest, int | float)
        ):
            settings["factor"] = longest / positions
    return {key: value for key, value in settings.items() if value is not None}


def _llama3(inverse: NDArray[np.float32], scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    import numpy as np

    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * np.pi / inverse
    share = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    frequencies: NDArray[np.float32] = ((1 - share) * inverse / factor + share * inverse).astype(np.float32)
    return frequencies


def _yarn(inverse: NDArray[np.float32], scaling: Mapping[str, Any], theta: float) -> NDArray[np.float32]:
    """Channels that turn often are kept, those that turn rarely are stretched, those between interpolated."""
    import numpy as np

    channels, context = 2 * len(inverse), scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        return channels * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = np.arange(len(inverse), dtype=np.float32) - np.float32(low)
    share = 1 - np.clip(ramp / np.float32(high - low or 0.001), 0.0, 1.0)
    return (inverse / np.float32(scaling["factor"]) * (1 - share) + inverse * share).astype(np.float32)


def rope_faults(
    config: Mapping[str, Any], head_dim: int, *, is_partial: bool = False, layers: str = FULL
) -> Iterator[Fault]:
    """Yield what cannot be built of the rotary settings of a config.json.

    Args:
        head_dim: Size of a head.
        is_partial: Whether the model can turn a part of each head.
        layers: Kind of layers that they are for.
    """
    settings = rope_settings(config, layers)
    kind, share = settings["rope_type"], settings.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1 or (share != 1 and not is_partial):
        yield Fault("is not supported", key="partial_rotary_factor", value=share, fix="1.0")
        return
    if kind not in ROPE_KINDS:
        yield Fault("is not supported", key="rope_type", value=kind, fix=f"one of {', '.join(ROPE_KINDS)}")
        return
    pairs = int(head_dim * share) // 2
    for key in ROPE_KINDS[kind]:
        place, value = f"rope_parameters.{key}", settings.get(key)
        if key in ("short_factor", "long_factor"):
            if not _is_numbers(value, pairs):
                yield Fault(f"must be {pairs} numbers, one for each pair of channels that turn", key=place)
        elif value is None:
            yield Fault(f"is missing, and rope_type {kind} needs it", key=place)
        elif not isinstance(value, int | float) or not value > 0:
            yield Fault("must be a positive number", key=place, value=value)
    if settings.get("mrope_section"):
        yield Fault("is not supported", key="rope_parameters.mrope_section", value=settings["mrope_section"])


def _is_numbers(value: object, count: int) -> bool:
    """Whether it is a list of so many positive numbers."""
    if not isinstance(value, list) or len(value) != count:
        return False
    return all(isinstance(factor, int | float) and factor > 0 for factor in value)
