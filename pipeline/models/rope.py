"""Rotary position embedding: its settings in both layouts of config.json, and the frequencies that they mean.

Formulas: transformers 5.14, modeling_rope_utils.py. What depends on the length of the text, or scales
attention too (`dynamic`, `yarn`, `longrope`), is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import Fault

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROPE_KINDS = ("default", "linear", "llama3")
DEFAULT_THETA = 10_000.0  # of every family here


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding. `scaling` holds the parameters of `kind` other than theta."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, float] | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Rope:
        """Read either layout of config.json, which must be one in which `rope_faults` finds no fault."""
        settings = rope_settings(config)
        kind = settings.pop("rope_type")
        theta = float(settings.pop("rope_theta", DEFAULT_THETA))
        return cls(theta, kind, {key: float(value) for key, value in settings.items()} or None)

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """[head_dim / 2] float32: the radians by which one position turns each pair of channels."""
        import numpy as np

        exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        inverse = (1.0 / np.float32(self.theta) ** exponents).astype(np.float32)
        scaling = self.scaling or {}
        if self.kind == "linear":
            return (inverse / np.float32(scaling["factor"])).astype(np.float32)
        if self.kind == "llama3":
            return _llama3(inverse, scaling)
        return inverse


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read theta, kind and parameters from either layout, under the names of transformers 5."""
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if config.get("rope_theta") is not None:
        settings.setdefault("rope_theta", config["rope_theta"])
    settings["rope_type"] = settings.get("rope_type") or settings.pop("type", None) or "default"
    settings.pop("type", None)
    if settings.get("partial_rotary_factor") in (None, 1.0):  # all channels turn, which need not be said
        settings.pop("partial_rotary_factor", None)
    return settings


def _llama3(inverse: NDArray[np.float32], scaling: Mapping[str, float]) -> NDArray[np.float32]:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    import numpy as np

    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * np.pi / inverse
    share = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return ((1 - share) * inverse / factor + share * inverse).astype(np.float32)


def rope_faults(config: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what cannot be built of the rotary settings of a config.json."""
    settings = rope_settings(config)
    kind = settings["rope_type"]
    share = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        yield Fault("is not supported", key="partial_rotary_factor", value=share, fix="1.0")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        yield Fault("is not supported", key="rope_type", value=kind, fix=f"one of {', '.join(ROPE_KINDS)}")
        return
    for key in needed[kind]:
        if not isinstance(settings.get(key), int | float):
            yield Fault(f"is missing, and rope_type {kind} needs it", key=f"rope_parameters.{key}")
    if settings.get("mrope_section"):
        yield Fault("is not supported", key="rope_parameters.mrope_section", value=settings["mrope_section"])
