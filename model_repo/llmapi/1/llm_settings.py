"""model.yaml: the arguments of the LLM, and `triton_config`, which is this model's own; and the GPUs of an instance.

Paths in it may be relative to its folder, so that a repository can be moved; upstream's model hands them on as they
are, and the LLM would look for them in the working directory, or on a hub.

Where one server has several instances, `gpu_device_ids` of config.pbtxt lists their GPUs, `0,1;2,3`: semicolons between
instances. They are chosen by environment variables, which only help before CUDA is initialized.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_OWN, _PROCESSORS = "triton_config", "logits_post_processors"
_PATHS = ("model", "tokenizer")
_DRAFT_PATHS = ("speculative_model", "speculative_model_dir")
# What mpirun and its launchers tell one process about itself. Workers that an instance spawns must not find it.
_OF_A_RANK = re.compile(
    r"OMPI_(COMM_WORLD_|UNIVERSE_|FIRST_RANKS$|APP_CTX_|MCA_orte_)|ORTE_|PMI_|PMIX_(?!MCA_)"
)


@dataclass(frozen=True, slots=True)
class LlmSettings:
    """Settings in model.yaml."""

    arguments: Mapping[str, Any]  # of the LLM, paths absolute
    cancellation_check_period_s: float = 0.1
    max_open_requests: int | None = None  # running and waiting; None: no limit
    ignored_sampling: tuple[str, ...] = ()  # arguments of SamplingParams without any effect in this release
    vocab_size: int | None = None  # of the checkpoint; None: it is on a hub
    decoupled: bool = False  # as model.yaml says it; config.pbtxt decides
    adapters: tuple[str, ...] = ()  # paths of the package's LoRA adapters, whose folders have their names

    @property
    def has_lora(self) -> bool:
        """Whether requests may bring LoRA adapters of their own."""
        return bool(self.arguments.get("enable_lora") or self.arguments.get("lora_config"))

    @classmethod
    def read(cls, path: Path) -> LlmSettings:
        """The settings of a file.

        Raises:
            ValueError: It is no file of settings, or says something that this model cannot do.
        """
        if not path.is_file():
            raise ValueError(f"{path} is missing: it holds the arguments of the LLM")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "model" not in content:
            raise ValueError(f"{path} names no model")
        own = content.pop(_OWN, None) or {}
        if own.get("max_batch_size", 0) != 0:
            raise ValueError(f"{path}: {_OWN}.max_batch_size must be 0: there are no batches")
        if own.get("multimodal"):
            raise ValueError(f"{path}: {_OWN}.multimodal: this model takes text alone")
        if _PROCESSORS in content:
            raise ValueError(f"{path}: {_PROCESSORS}: this model runs none")
        folder = path.parent.resolve()
        arguments = _absolute(content, folder)
        return cls(
            arguments=arguments,
            cancellation_check_period_s=own.get("cancellation_check_period_ms", 100) / 1000,
            max_open_requests=own.get("max_open_requests"),
            ignored_sampling=tuple(own.get("ignored_sampling", ())),
            vocab_size=_vocab_size(Path(arguments["model"]) / "config.json"),
            decoupled=bool(own.get("decoupled", False)),
            adapters=tuple(_path(one, folder) for one in own.get("adapters", ())),
        )


def gpus_of(config: Mapping[str, Any], instance: str) -> tuple[str, ...]:
    """The GPUs of an instance named like `tensorrt_llm_0_1`; none where there is one instance, which sees all.

    Raises:
        ValueError: There are several instances, and gpu_device_ids does not say one set for each.
    """
    count = sum(int(group.get("count", 1)) for group in config.get("instance_group", ()))
    if count <= 1:
        return ()
    given = config.get("parameters", {}).get("gpu_device_ids", {}).get("string_value", "")
    sets = [tuple(gpu.strip() for gpu in part.split(",") if gpu.strip()) for part in given.split(";")]
    if len(sets) != count or not all(sets):
        raise ValueError(f"gpu_device_ids = {given!r}: must name GPUs for each of {count} instances")
    number = re.search(r"_(\d+)$", instance)
    if number is None or int(number[1]) >= count:
        raise ValueError(f"{instance}: its name does not end in a number below {count}")
    return sets[int(number[1])]


def choose_gpus(gpus: tuple[str, ...], environment: MutableMapping[str, str] = os.environ) -> None:
    """Let CUDA, and the workers that the LLM spawns, see these GPUs only."""
    for name in [name for name in environment if _OF_A_RANK.match(name)]:
        del environment[name]
    environment["CUDA_VISIBLE_DEVICES"] = environment["TRTLLM_VISIBLE_DEVICES"] = ",".join(gpus)


def _vocab_size(config: Path) -> int | None:
    return json.loads(config.read_text(encoding="utf-8")).get("vocab_size") if config.is_file() else None


def _absolute(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    arguments = {name: _path(value, folder) if name in _PATHS else value for name, value in content.items()}
    speculation = arguments.get("speculative_config")
    if speculation is not None:
        arguments["speculative_config"] = {
            name: _path(value, folder) if name in _DRAFT_PATHS else value
            for name, value in speculation.items()
        }
    return arguments


def _path(value: Any, folder: Path) -> Any:
    """A folder beside model.yaml as an absolute path; anything else (a path already, a hub's name) as it is."""
    return str(folder / value) if isinstance(value, str) and (folder / value).is_dir() else value
