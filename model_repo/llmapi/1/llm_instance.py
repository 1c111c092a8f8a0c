"""Which GPUs this instance of the model has, where there are several instances in one server.

`gpu_device_ids` of config.pbtxt lists them, `0,1;2,3`: semicolons between instances. The choice is made by environment
variables, which only help before CUDA is initialized.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import Any

# What mpirun and its launchers tell one process about itself. Workers that an instance spawns must not find it.
_OF_A_RANK = re.compile(
    r"OMPI_(COMM_WORLD_|UNIVERSE_|FIRST_RANKS$|APP_CTX_|MCA_orte_)|ORTE_|PMI_|PMIX_(?!MCA_)"
)


def gpus_of(config: Mapping[str, Any], instance: str) -> tuple[str, ...]:
    """The GPUs of an instance named like `tensorrt_llm_0_1`; none where there is one instance, which sees all.

    Raises:
        ValueError: there are several instances, and gpu_device_ids does not say one set for each.
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
