"""Packages of the `pytorch` runtime, and servers of them with a stand-in for TensorRT-LLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.progress import Silent
from pipeline.runtimes.pytorch.model_repository import Engines, LlmapiSettings, package_llmapi
from pipeline.serving.launch_embedded import embedded_launch
from pipeline.serving.ports import Ports
from pipeline.serving.server import TritonServer
from pipeline.triton.deployment import REPOSITORY, Deployment, DeploymentLimits, Requirements
from tests.support.adapters import make_adapter
from tests.support.llm_standin import write_standin
from tests.support.models import make_checkpoint

LIMITS = DeploymentLimits(max_input_tokens=256, max_output_tokens=700, max_concurrency=8)
ARGUMENTS: dict[str, Any] = {
    "model": "checkpoint",
    "backend": "pytorch",
    "max_batch_size": 8,
    "max_num_tokens": 8192,
    "max_seq_len": 956,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "enable_block_reuse": True, "dtype": "auto"},
}


def requirements(version: str = "1.2.1", gpus: int = 1) -> Requirements:
    return Requirements(
        tensorrt_llm=version, image="image:1", driver="590.44.01", gpu="h100-sxm-80g", sm=90, gpus=gpus
    )


def tiny(into: Path) -> Path:
    """The smallest checkpoint that is one."""
    return make_checkpoint(into, vocab=300, hidden=64, layers=1, heads=1, kv_heads=1, intermediate=64)


def package(
    into: Path,
    settings: LlmapiSettings | None = None,
    *,
    draft: bool = False,
    **arguments: Any,
) -> Path:
    """A package with a tiny checkpoint; `arguments` go to the LLM beside the usual ones."""
    settings = settings or LlmapiSettings("1.2.1", cancellation_check_period_ms=20)
    checkpoint = tiny(into / "source")
    adapters = {name: make_adapter(into / name, checkpoint, rank=8) for name in settings.adapters}
    sources = Engines(checkpoint, tiny(into / "draft-source") if draft else None, checkpoint, adapters)
    needs = requirements(settings.version, settings.ranks * settings.instances)
    package_llmapi(
        "tiny", settings, {**ARGUMENTS, **arguments}, LIMITS, needs, sources, into / "package", Silent()
    )
    return into / "package"


@contextmanager
def served(
    package: Path, status: Path, log: Path, version: str = "1.2.1", **environment: str
) -> Iterator[TritonServer]:
    """A server of a package, its LLM played by the stand-in for a release.

    It is put into the model's folder: Triton's Python stub does not heed PYTHONPATH.
    """
    status.mkdir(parents=True, exist_ok=True)
    write_standin(package / REPOSITORY / "tensorrt_llm" / "1", version)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STANDIN_STATUS", str(status))
        for name, value in environment.items():
            patch.setenv(name, value)
        launcher = partial(
            embedded_launch, (package / REPOSITORY).absolute(), Deployment.load(package).models
        )
        ports = Ports.free(http=True)
        with TritonServer.of_package(
            package, launcher=launcher, ports=ports, log_file=log, start_deadline_s=60
        ) as server:
            yield server


def statuses(status: Path) -> list[dict[str, Any]]:
    """What each LLM says that it has done."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(status.glob("*.json"))]


def tensors(**inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Python values as tensors of the model: one dimension, no batch."""
    made = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        if isinstance(value, np.ndarray):
            made[name] = value
            continue
        match values[0]:
            case str() | bytes():
                texts = [item.encode() if isinstance(item, str) else item for item in values]
                made[name] = np.array(texts, np.object_)
            case bool():
                made[name] = np.array(values)
            case float():
                made[name] = np.array(values, np.float32)
            case _:
                made[name] = np.array(values, np.uint64 if name.endswith("seed") else np.int32)
    return made
