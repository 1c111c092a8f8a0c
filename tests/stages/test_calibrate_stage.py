"""The stage as a whole: what it says, what it keeps, that it repeats itself, and how it fails."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import CheckpointError, StageError, UserError
from pipeline.machine.host import Memory
from pipeline.models import Architecture, Format, TensorFiles
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent, Task
from pipeline.stages.calibrate import model
from pipeline.stages.calibrate.calibration import calibrate
from pipeline.stages.calibrate.measurement import check_scales
from pipeline.stages.calibrate.third_party import Notes, quietly
from tests.support.calibrated import Calibrations, facts, quantization
from tests.support.models import make_checkpoint

pytestmark = pytest.mark.models

AGAIN = """
import sys
from pathlib import Path
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Silent
from pipeline.stages.calibrate.calibration import calibrate
from tests.support.calibrated import answers_of, quantization
source, dataset, form, into = sys.argv[1:]
Path(into).mkdir()
with answers_of(4):
    calibrate(Path(source), Path(dataset), quantization(form), exports=[Parallelism(1), Parallelism(2)],
              into=Path(into), progress=Silent(), device="cpu")
"""


class Recorder(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[list[Any]] = []  # label, total, unit, done

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
        entry: list[Any] = [label, total, unit, 0]
        self.tasks.append(entry)

        class Counting:
            def advance(self, amount: float = 1) -> None:
                entry[3] += amount

        yield Counting()


def run(calibrations: Calibrations, into: Path, form: str, **changed: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "checkpoint_dir": calibrations.source(),
        "dataset_dir": calibrations.dataset(),
        "quantization": quantization(form),
        "exports": [Parallelism()],
        "into": into,
        "progress": Silent(),
        "device": "cpu",
    }
    return calibrate(**(arguments | changed))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "int4_awq"])
def test_another_process_writes_the_same_bytes(calibrations: Calibrations, tmp_path: Path, form: str) -> None:
    again = tmp_path / "again"
    arguments = [str(calibrations.source()), str(calibrations.dataset()), form, str(again)]
    subprocess.run([sys.executable, "-c", AGAIN, *arguments], check=True, timeout=200)
    here = calibrations.calibrated(form)
    files = [path.relative_to(here) for path in sorted(here.rglob("*")) if path.is_file()]
    assert len(files) > 10
    for file in files:
        digests = [hashlib.sha256((folder / file).read_bytes()).hexdigest() for folder in (here, again)]
        assert digests[0] == digests[1], file


def test_nothing_long_is_done_outside_a_task_and_nothing_is_printed(
    calibrations: Calibrations, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    progress = Recorder()
    told = run(calibrations, tmp_path, "w4a8_awq", progress=progress)
    assert [label for label, *_ in progress.tasks] == [
        "checking the checkpoint",
        "importing ModelOpt",
        "looking at the model",
        "loading the model",
        "comparing samples alone and in one row",
        "calibration",
        "calibrate w4a8_awq, pass 1 of 2",
        "calibrate w4a8_awq, pass 2 of 2",
        "the sample answer",
        "aligning what engines make one layer",
        "the TensorRT-LLM export for 1 ranks",
        "reading trtllm-tp1/ again",
        "the Hugging Face export",
        "reading hf/ again",
    ]
    assert [task[1:] for task in progress.tasks if task[1] is not None] == [[12, "samples", 12]] * 2
    assert len(told["pass_seconds"]) == 2
    assert any("answered:" in line for line in progress.lines)
    assert any("finite, positive" in line for line in progress.lines)
    assert told["warnings"] == []
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_calibration_json_holds_every_scale_and_the_answer(calibrations: Calibrations) -> None:
    kept = facts(calibrations.calibrated("w4a8_awq"))
    assert len(kept["scales"]) == 14 * 4  # two weight steps, the input, the smoothing
    assert all(0 < scale["min"] <= scale["max"] for scale in kept["scales"].values())
    assert kept["scales"]["model.layers.1.mlp.down_proj.weight_amax"]["count"] == 128 * 256 // 64
    assert kept["answer"]["prompt"]
    assert (kept["samples"], kept["format"], kept["group_size"]) == (12, "w4a8_awq", 64)
    assert set(kept["tools"]) == {"nvidia-modelopt", "torch", "transformers"}
    assert set(kept["exports"]) == {"hf", "trtllm-tp1", "trtllm-tp2"}


def test_a_trained_model_still_answers(calibrations: Calibrations) -> None:
    answer = facts(calibrations.trained("int4_awq"))["answer"]
    assert answer["expected"]
    common = set(answer["answer"].lower().split()) & set(answer["expected"].lower().split())
    assert len(common) >= 3, answer


def test_samples_are_needed(calibrations: Calibrations, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data set was given"):
        run(calibrations, tmp_path, "fp8", dataset_dir=None)
    run(calibrations, tmp_path, "none", dataset_dir=None)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        (lambda t: t.update({"extra.weight": t["model.norm.weight"]}), r"extra\.weight is not expected"),
        (
            lambda t: t["model.norm.weight"].__setitem__(3, np.inf),
            r"model\.norm\.weight holds values that are not finite",
        ),
    ],
)
def test_a_damaged_source_is_found_before_it_is_loaded(
    calibrations: Calibrations, tmp_path: Path, damage: Any, fault: str
) -> None:
    source = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    tensors = {name: np.array(value) for name, value in TensorFiles(source).items()}
    damage(tensors)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=fault):
        run(calibrations, tmp_path, "fp8", checkpoint_dir=source)


def test_a_source_that_is_quantized_already(calibrations: Calibrations, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is quantized already \(fp8\)"):
        run(calibrations, tmp_path, "int4_awq", checkpoint_dir=calibrations.calibrated("fp8") / "hf")


def test_a_layer_that_is_all_zero_has_no_scale(calibrations: Calibrations, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", hidden=128, heads=4, head_dim=32, intermediate=256)
    tensors = {name: np.array(value) for name, value in TensorFiles(source).items()}
    tensors["model.layers.1.self_attn.v_proj.weight"][:] = 0
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StageError) as caught:
        run(calibrations, tmp_path, "fp8", checkpoint_dir=source)
    assert "model.layers.1.self_attn.v_proj.weight_amax is not positive in 1 of 1 values" in str(caught.value)


def test_a_model_larger_than_memory_is_refused(
    calibrations: Calibrations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "read_memory", lambda: Memory(9 << 20, 1 << 20, 0, None))
    with pytest.raises(UserError, match=r"on a CPU needs .* GiB .* calibrate on a GPU"):
        run(calibrations, tmp_path, "fp8")


class Quantizer:
    """What `check_scales` looks at."""

    def __init__(self, amax: Any, smooth: Any = None) -> None:
        self.is_enabled, self.amax, self._pre_quant_scale = amax is not None, amax, smooth


def test_every_scale_that_is_wrong_is_listed(calibrations: Calibrations) -> None:
    import torch

    architecture = Architecture.read(calibrations.source())
    good, layers = torch.tensor(2.0), {}
    for linear in architecture.linears():
        layers[linear.name] = SimpleNamespace(
            weight_quantizer=Quantizer(torch.ones(4)), input_quantizer=Quantizer(good, torch.ones(8))
        )
    found = SimpleNamespace(get_submodule=layers.__getitem__)
    assert len(check_scales(found, architecture, Format.INT8_SQ, "auto")) == 14 * 3
    layers["model.layers.0.mlp.up_proj"].weight_quantizer = Quantizer(torch.tensor([1.0, 0.0, -1.0]))
    layers["model.layers.0.mlp.down_proj"].input_quantizer = Quantizer(None, torch.ones(8))
    layers["model.layers.1.mlp.down_proj"].input_quantizer = Quantizer(
        good, torch.tensor([float("nan"), 1.0])
    )
    layers["model.layers.1.self_attn.q_proj"] = SimpleNamespace()
    with pytest.raises(StageError) as caught:
        check_scales(found, architecture, Format.INT8_SQ, "auto")
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("6 scales are not usable")
    assert [line.strip() for line in lines[1:]] == [
        "model.layers.0.mlp.up_proj.weight_amax is not positive in 2 of 3 values",
        "model.layers.0.mlp.down_proj.input_amax was not measured",
        "model.layers.1.self_attn.q_proj.weight_amax was not measured",
        "model.layers.1.self_attn.q_proj.input_amax was not measured",
        "model.layers.1.self_attn.q_proj.pre_quant_scale was not measured",
        "model.layers.1.mlp.down_proj.pre_quant_scale is not finite in 1 of 2 values",
    ]


def test_warnings_become_notes_and_known_ones_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    notes = Notes()
    with quietly("testing", notes):
        print("chatter")
        warnings.warn("the sky\n  falls", stacklevel=1)
        warnings.warn("lm_head is not calibrated, skip smoothing", stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.getLogger("modelopt.torch.export").warning("Large KV activations detected.")
        logging.getLogger("modelopt.torch.export").warning("Tied weight (declared): dropping 1 alias key(s)")
    assert notes.warnings == ["testing: Large KV activations detected.", "testing: the sky falls"]
    assert capsys.readouterr().out == ""


def test_a_library_s_failure_says_what_was_done_and_what_it_printed_last() -> None:
    def fail() -> None:
        with quietly("the export", Notes()):
            print("packing layer 3")
            raise AssertionError("odd")

    with pytest.raises(StageError) as caught:
        fail()
    assert str(caught.value) == "the export failed: AssertionError: odd\n  packing layer 3"
    assert isinstance(caught.value.__cause__, AssertionError)


def test_our_own_errors_pass_through() -> None:
    with pytest.raises(UserError, match="ours"), quietly("the export", Notes()):
        raise UserError("ours")


def test_a_shared_checkpoint_of_several_files(calibrations: Calibrations, tmp_path: Path) -> None:
    """Sharded sources, as the hub has them, are calibrated like whole ones."""
    source = tmp_path / "source"
    source.mkdir()
    whole = calibrations.source()
    for file in whole.iterdir():
        if file.suffix != ".safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    tensors = {name: value.copy() for name, value in TensorFiles(whole).items()}
    names = sorted(tensors)
    placed: dict[str, str] = {}
    for part, chosen in enumerate((names[:9], names[9:]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, source / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(chosen, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (tmp_path / "into").mkdir()
    run(calibrations, tmp_path / "into", "fp8", checkpoint_dir=source)
    here = calibrations.calibrated("fp8")
    for file in ("hf/model.safetensors", "trtllm-tp1/rank0.safetensors"):
        assert (tmp_path / "into" / file).read_bytes() == (here / file).read_bytes()
