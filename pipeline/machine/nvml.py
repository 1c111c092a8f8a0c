"""Program that prints NVML's list of GPUs as one JSON object, or the reason why there is none, with exit code 1.

Run by its path (see `gpus.ask_nvml`), so it imports nothing of this package. Written against nvidia-ml-py 13.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def survey(nvml: Any) -> dict[str, Any]:
    """List the GPUs by the module `pynvml` or one like it; memory in MiB, compute capability times 10."""
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return {
        "driver": nvml.nvmlSystemGetDriverVersion(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        "gpus": [_gpu(nvml, index, handle) for index, handle in enumerate(handles)],
    }


def _gpu(nvml: Any, index: int, handle: Any) -> dict[str, Any]:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {
        "index": index,
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "name": nvml.nvmlDeviceGetName(handle),
        "sm": 10 * major + minor,
        "memory_mib": memory.total >> 20,
        "free_mib": memory.free >> 20,
    }


def main() -> int:
    """Print; the exit code."""
    import pynvml

    try:
        pynvml.nvmlInit()
        print(json.dumps(survey(pynvml)))
    except pynvml.NVMLError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
