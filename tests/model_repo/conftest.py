"""The models' sources are not a package: Triton puts each model's folder on sys.path, and so do these tests.

A model's folder holds `shared` as packaging puts it there. The folder of all models must not be on sys.path itself:
it has one that is called `tensorrt_llm`, which other libraries would take for the library of that name.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).resolve().parents[2] / "model_repo"
_FOLDER = Path(tempfile.mkdtemp(prefix="pipeline-models-"))
atexit.register(shutil.rmtree, _FOLDER)
(_FOLDER / "shared").symlink_to(SOURCES / "shared")
sys.path.insert(0, str(_FOLDER))

_TRITON = ModuleType("triton_python_backend_utils")  # there inside of Triton only
_TRITON.TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1  # type: ignore[attr-defined]
sys.modules.setdefault("triton_python_backend_utils", _TRITON)
