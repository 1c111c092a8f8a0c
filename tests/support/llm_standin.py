"""A stand-in for TensorRT-LLM, made from the signatures of a release (`data/llm_calls.yaml`).

It takes the calls that the release takes: another parameter is a TypeError, as it would be there. What its LLM says is
made up (`standin/tensorrt_llm`).
"""

from __future__ import annotations

import json
import shutil
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from pipeline.contracts import llmapi, read_facts
from pipeline.contracts.version_range import entries_in

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent / "standin" / "tensorrt_llm"


def signature(call: str, version: str) -> Signature:
    """Parameters of a call in a release, in their order: "SamplingParams", "LLM.generate_async"."""
    facts = _calls()[call]
    kind = Parameter.KEYWORD_ONLY if facts.get("keyword_only") else Parameter.POSITIONAL_OR_KEYWORD
    held = entries_in(facts["parameters"], version, llmapi.versions())
    return Signature(
        [
            Parameter(argument["name"], kind, default=argument.get("default", Parameter.empty))
            for argument in held
        ]
    )


def write_standin(folder: Path, version: str) -> None:
    """Write the package `tensorrt_llm` of a release into a folder."""
    package = folder / SOURCES.name
    shutil.copytree(SOURCES, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    calls = {name: _parameters(signature(name, version)) for name in _calls()}
    attributes = {name: facts["names"] for name, facts in read_facts("llm_calls.yaml")["attributes"].items()}
    # The stub would find the package that is installed.
    made = {"version": version, "calls": calls, "attributes": attributes, "root": str(ROOT)}
    (package / "release.json").write_text(json.dumps(made), encoding="utf-8")


def _parameters(made: Signature) -> list[dict[str, Any]]:
    return [
        {"name": parameter.name, "kind": int(parameter.kind)}
        | ({} if parameter.default is Parameter.empty else {"default": parameter.default})
        for parameter in made.parameters.values()
    ]


def _calls() -> dict[str, Any]:
    calls: dict[str, Any] = read_facts("llm_calls.yaml")["calls"]
    return calls
