"""Families of decoders that differ from Llama, one file each: a class derived from `Decoder`, which is Llama itself."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.runtimes.cpu.ir.decoder import Decoder
from pipeline.runtimes.cpu.ir.families.gemma import Gemma
from pipeline.runtimes.cpu.ir.families.gpt_oss import GptOss
from pipeline.runtimes.cpu.ir.families.mixtral import Mixtral, Qwen3Moe
from pipeline.runtimes.cpu.ir.families.phi3 import Phi3

# By the family that `pipeline.models.architecture` reads of a class.
DECODERS: Mapping[str, type[Decoder]] = {
    "llama": Decoder,
    "mistral": Decoder,
    "qwen2": Decoder,
    "qwen3": Decoder,
    "phi3": Phi3,
    "gemma2": Gemma,
    "gemma3": Gemma,
    "mixtral": Mixtral,
    "qwen3_moe": Qwen3Moe,
    "gpt_oss": GptOss,
}
