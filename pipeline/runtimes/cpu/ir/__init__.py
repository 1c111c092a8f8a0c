"""Checkpoints as OpenVINO models: from a unified Hugging Face one to openvino_model.xml and .bin, and engine.json.

The same checkpoint and OpenVINO give the same bytes. Neither torch nor transformers is used.
"""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import openvino as ov

from pipeline.contracts import engine_memory
from pipeline.errors import StageError
from pipeline.models import Architecture, CheckpointReader
from pipeline.progress import Progress
from pipeline.runtimes.cpu.ir.families import DECODERS
from pipeline.runtimes.cpu.ir.weights import Weights

FACTS = "engine.json"
# By default OpenVINO rounds the inputs of packed layers to 8 bits, by scales that it finds itself.
OPTIONS = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}


def build_ir(
    checkpoint_dir: Path,
    into: Path,
    *,
    simulate_activations: bool = False,
    adapters: bool = False,
    progress: Progress,
) -> dict[str, Any]:
    """Write the model into `into`; return its facts, which engine.json holds too.

    Args:
        into: Made if it is not there.
        simulate_activations: Round inputs of quantized layers, keys and values by the checkpoint's scales;
            without it only the weights are quantized.
        adapters: Name input and output of each linear layer in engine.json, between which the engine adds adapters.

    Raises:
        CheckpointError: All faults of the files.
        UserError: This runtime lacks the format.
        StageError: The model leaves tensors out, or OpenVINO cannot write it.
        OSError: There is no room.
    """
    checkpoint = CheckpointReader(checkpoint_dir)
    weights = Weights(checkpoint, simulate=simulate_activations)
    checkpoint.check()
    with progress.task("Graph", total=checkpoint.architecture.layers, unit="layers") as task:
        architecture = checkpoint.architecture
        model = DECODERS[architecture.family](architecture, weights).build(task)
    unread = weights.unread()
    if unread:
        raise StageError("\n".join([f"{checkpoint_dir}: tensors that the model leaves out", *unread]))
    for name, value in OPTIONS.items():
        model.set_rt_info(value, ["runtime_options", name])
    save(model, into)
    facts = {
        **_facts(checkpoint),
        "simulate_activations": simulate_activations,
        "rounds_short_steps": weights.rounds,
        "compile_options": OPTIONS,
        "weights": weights.constants.census(),
        "bytes": {name: (into / name).stat().st_size for name in (MODEL, WEIGHTS)},
        "openvino": ov.get_version(),
    }
    if weights.padded:
        facts["padded"] = weights.padded
    if adapters:
        named = weights.linears.items()
        facts["linears"] = {name: [node.get_friendly_name() for node in ends] for name, ends in named}
    (into / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def _facts(checkpoint: CheckpointReader) -> dict[str, Any]:
    arch, quantization = checkpoint.architecture, checkpoint.quantization
    windows = {window for window in arch.windows if window is not None}
    return {
        "schema": 1,
        "architecture": arch.class_name,
        "layers": arch.layers,
        "hidden": arch.hidden,
        "intermediate": arch.intermediate,
        "heads": arch.heads,
        "kv_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab,
        "max_position_embeddings": arch.rope.positions(arch.max_positions),
        "long_from": _long_from(arch),
        "attention_cap": arch.attention_cap,
        "sliding_window": max(windows, default=None),
        "tied": arch.tied,
        "bf16_pays": engine_memory.cpu_bf16_pays(arch.hidden),
        "quantization": {
            "format": str(quantization.format),
            "group_size": quantization.group_size,
            "kv_cache": quantization.kv_cache,
            "producer": quantization.producer,
        },
    }


def _long_from(arch: Architecture) -> int | None:
    """Tokens of a sequence beyond which the long factors of longrope hold; None where there are none."""
    if arch.rope.kind != "longrope" or arch.rope.scaling is None:
        return None
    return int(arch.rope.scaling["original_max_position_embeddings"])


MODEL, WEIGHTS = "openvino_model.xml", "openvino_model.bin"


def save(model: ov.Model, into: Path) -> None:
    """Write `model` into the folder `into`.

    Raises:
        OSError: There is no room. StageError: OpenVINO cannot write it for another reason.
    """
    into.mkdir(parents=True, exist_ok=True)
    try:
        ov.save_model(model, into / MODEL, compress_to_fp16=False)
    except RuntimeError as error:
        # Its C++ streams do not say why they fail; asking the system for the same room does.
        with (into / WEIGHTS).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 + _constant_bytes(model))
        raise StageError(f"{into}: OpenVINO cannot write the model: {error}") from error
    _mark_decompressions(into / MODEL)


def _constant_bytes(model: ov.Model) -> int:
    return sum(node.get_byte_size() for node in model.get_ops() if node.get_type_name() == "Constant")


def _mark_decompressions(path: Path) -> None:
    """Mark the conversions of 16-bit matrices to f32, for which the Python API has no call.

    Unmarked, they are folded on load, and the folded matrix stays beside the one that the kernel packs from it:
    8 bytes a weight instead of 4 (OpenVINO 2026.4).
    """
    tree = ET.parse(path)
    for layer in tree.iter("layer"):
        port = layer.find("input/port")
        if layer.get("type") != "Convert" or port is None or port.get("precision") not in ("BF16", "FP16"):
            continue
        if len(port.findall("dim")) == 2:
            runtime_info = ET.Element("rt_info")
            ET.SubElement(runtime_info, "attribute", name="decompression", version="0")
            layer.insert(1, runtime_info)  # after <data>
    tree.write(path, encoding="utf-8", xml_declaration=True)
