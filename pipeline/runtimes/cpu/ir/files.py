"""The two files of an OpenVINO model, written so that 16-bit weights stay mapped when they are compiled."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import openvino as ov

from pipeline.errors import StageError

MODEL, WEIGHTS = "openvino_model.xml", "openvino_model.bin"


def save(model: ov.Model, into: Path) -> None:
    """Write `model` into the folder `into`.

    Raises:
        OSError: there is no room. StageError: OpenVINO cannot write it for another reason.
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
    8 bytes a weight instead of 4 (OpenVINO 2026.4). f8e4m3 matrices are folded, marked or not.
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
