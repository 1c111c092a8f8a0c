"""The two files of an OpenVINO model, written so that 16-bit weights stay mapped when they are compiled."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import openvino as ov

MODEL, WEIGHTS = "openvino_model.xml", "openvino_model.bin"


def save(model: ov.Model, into: Path) -> None:
    """Write `model` into the folder `into`."""
    into.mkdir(parents=True, exist_ok=True)
    ov.save_model(model, into / MODEL, compress_to_fp16=False)
    _mark_decompressions(into / MODEL)


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
