"""Steps that run while an image is built: which pins pip may change, and what ends the build."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import pytriton

from pipeline.contracts.images import image_facts
from pipeline.machine.image_build import (
    CONSTRAINTS,
    REQUIREMENTS,
    failed_import,
    missing_libraries,
    new_conflicts,
    pip_files,
)
from pipeline.serving.dry_run import modules_of
from pipeline.triton.deployment import REPOSITORY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("trtllm", "openai", "freed"),
    [
        ("1.2.1", "1.107.3", True), ("1.1.0", "1.107.3", False), ("1.2.1", "1.109.1", False),
        ("1.3.0rc29", "2.30.0", False),
    ],
)  # fmt: skip
def test_a_pin_is_let_go_only_where_it_is_in_the_way(trtllm: str, openai: str, freed: bool) -> None:
    made = pip_files(
        f"openai=={openai}\ntensorrt_llm=={trtllm}\ntorch==2.10.0a0+b4e4ee81d3.nv25.12\n-e git+x\n"
    )
    kept, wanted = made[CONSTRAINTS].splitlines(), made[REQUIREMENTS].splitlines()
    assert "torch==2.10.0a0+b4e4ee81d3.nv25.12" in kept
    assert (f"openai=={openai}" in kept) is not freed
    assert ("openai>=1.108.1,<2" in wanted) is freed
    assert set(image_facts()["installs"]) <= set(wanted)


# What the models import, what that imports, and pip: it looks through every package that is installed.
INSTALLED = (
    "annotated-types", "grpcio", "jinja2", "markupsafe", "ml-dtypes", "numpy", "packaging", "pip",
    "protobuf", "pydantic", "pydantic-core", "python-rapidjson", "pyyaml", "tokenizers", "tritonclient",
    "typing-extensions", "typing-inspection", "urllib3",
)  # fmt: skip


def small_environment(folder: Path) -> Path:
    """The Python of a virtual environment that has a few of the packages that are installed here."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in INSTALLED:
        distribution = metadata.distribution(name)
        for entry in {
            file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")
        }:
            if not (site / entry).exists():
                (site / entry).symlink_to(Path(str(distribution.locate_file(entry))))
    return folder / "bin" / "python"


def test_the_steps_run_out_of_the_wheel_and_name_everything_that_is_wrong(tmp_path: Path) -> None:
    """The environment is no image: packages of NVIDIA's are files that fail as those do without a driver."""
    wheel, folder, site = (
        tmp_path / "trtllm_pipeline-0-py3-none-any.whl",
        tmp_path / "image",
        tmp_path / "site",
    )
    own = [
        *ROOT.glob("pipeline/*.py"),
        *ROOT.glob("pipeline/machine/*.py"),
        *ROOT.glob("pipeline/contracts/**/*"),
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in own:
            archive.write(file, file.relative_to(ROOT))
    no_driver = "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')"
    for module, text in {
        "torch": no_driver,
        "tensorrt_llm": no_driver,
        "mpi4py": "",
        "mpi4py/MPI": "",
    }.items():
        place = site / (f"{module}.py" if "/" in module else f"{module}/__init__.py")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (wheel, site)))}
    command = [small_environment(tmp_path / "environment"), "-m", "pipeline.machine.image_build"]
    subprocess.run([*command, "prepare", folder], env=environment, cwd=tmp_path, check=True, timeout=120)
    assert "numpy==" in (folder / CONSTRAINTS).read_text("utf-8")
    done = subprocess.run(
        [*command, "check", folder], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    # TensorRT-LLM may wait for a GPU, torch may not.
    assert done.stderr.splitlines() == [
        "does not load: torch: ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
        *(f"is not there: {file}" for file in image_facts()["libraries"]),
    ]
    assert "needs a GPU: tensorrt_llm.llmapi" in done.stdout.splitlines()


def test_without_a_gpu_only_what_the_driver_brings_may_be_missing() -> None:
    (entry,) = (
        imported for imported in image_facts()["imports"] if imported["module"] == "tensorrt_llm.llmapi"
    )
    assert entry["gpu"]
    assert failed_import(entry, "x\nImportError: libcuda.so.1: cannot open shared object file\n") is None
    said = failed_import(entry, "ImportError: cannot import name 'PartReasoningText' from 'openai.types'\n")
    assert said is not None
    assert "PartReasoningText" in said
    assert failed_import({"module": "numpy"}, "ImportError: libcuda.so.1: cannot open") is not None
    found = "\tlibdcgm.so.4 => not found\n\tlibc.so.6 => /lib/libc.so.6\n\tlibcuda.so.1 => not found\n"
    assert missing_libraries(found) == ["libdcgm.so.4"]


def test_a_real_server_lacks_nothing_where_it_runs() -> None:
    server = Path(pytriton.__file__).parent / "tritonserver" / "bin" / "tritonserver"
    done = subprocess.run(["ldd", server], capture_output=True, text=True, check=True, timeout=60)
    assert "libdcgm" in done.stdout
    assert missing_libraries(done.stdout) == []


def test_conflicts_that_nvidia_left_are_nvidias() -> None:
    before = "a 1 has requirement b<2, but you have b 3.\nx 1 requires y, which is not installed.\n"
    after = before + "c 1 has requirement openai<1.108, but you have openai 1.109.1.\n"
    assert new_conflicts(before, before) == []
    assert new_conflicts(before, after) == ["c 1 has requirement openai<1.108, but you have openai 1.109.1."]


def test_all_that_the_model_imports_is_tried(tmp_path: Path) -> None:
    version = tmp_path / REPOSITORY / "tensorrt_llm" / "1"
    shutil.copytree(ROOT / "model_repo" / "llmapi" / "1", version)
    shutil.copytree(ROOT / "model_repo" / "shared", version / "shared")
    tried = {entry["module"].partition(".")[0] for entry in image_facts()["imports"]}
    assert set(modules_of(tmp_path)) <= tried
