"""Architectures of published decoders, one description a family: the blocks of each layer, by its config.json.

A class is added by an entry in a table (`transformers`, `hybrids`, `latent`), where it is built of the same parts as
others; a family with parts of its own is a file. Structures are those of transformers 5.14, with which tests compare
every weight's shape; of models that the library does not know they follow the code that is published with them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.models.families.base import Family
from pipeline.models.families.deepseek_v4 import FAMILIES as DEEPSEEK_V4
from pipeline.models.families.gemma4 import FAMILIES as GEMMA4
from pipeline.models.families.hybrids import FAMILIES as HYBRIDS
from pipeline.models.families.latent import FAMILIES as LATENT
from pipeline.models.families.nemotron_h import FAMILIES as NEMOTRON_H
from pipeline.models.families.transformers import FAMILIES as TRANSFORMERS

__all__ = ["FAMILIES", "Family"]

# Class ("LlamaForCausalLM") -> family.
FAMILIES: Mapping[str, Family] = {
    **TRANSFORMERS, **LATENT, **HYBRIDS, **NEMOTRON_H, **GEMMA4, **DEEPSEEK_V4,
}  # fmt: skip
