"""The stage from beginning to end: load, measure, check, answer, export, judge.

Whether the format, its groups and the ranks suit the model is judged before, by the rules of preflight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.contracts.checkpoint import CheckpointLayout, check_files
from pipeline.contracts.rules import rule
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.progress import Progress
from pipeline.recipe import Quantization
from pipeline.runtimes.tensorrt.checkpoint import MODEL_TYPES
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.torch_device import torch_device, torch_threads_for
from pipeline.store import Json

_TOOLS = ("nvidia-modelopt", "torch", "transformers")
_BATCH_SAMPLES = 8  # where the recipe does not say


def calibrate(
    checkpoint_dir: Path,
    dataset_dir: Path | None,
    quantization: Quantization,
    *,
    exports: Sequence[Parallelism],
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Quantize a checkpoint and write its exports into the folder `into`; returns the facts.

    Args:
        dataset_dir: Folder of frozen samples; may be None for format `none`, which measures nothing.
        exports: Sizes of each TensorRT-LLM checkpoint to write; may be empty.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        UserError: the model, the format or the parallelism cannot be done; found before the model is loaded.
        StageError: ModelOpt failed, or a scale or a file is not as it must be; everything that is wrong is listed.
    """
    began, notes = time.monotonic(), Notes()
    architecture = Architecture.read(checkpoint_dir)
    if device is None:
        with progress.task("importing torch"):
            device = torch_device()
    form = Format(quantization.format)
    if form is Format.NVFP4 and device != "cuda":
        fault = Fault(
            "needs a CUDA GPU to calibrate: ModelOpt simulates it nowhere else",
            key="quantization.format",
            value="nvfp4",
            fix="calibrate on a GPU, or use fp8 or int4_awq",
        )
        raise InvalidInput(f"{architecture.class_name} cannot be calibrated like this", [fault])
    if (form is not Format.NONE or exports) and architecture.family not in MODEL_TYPES:
        raise UserError(f"{architecture.class_name} cannot be calibrated; {', '.join(MODEL_TYPES)} can")
    source = CheckpointReader(checkpoint_dir)
    if form is not Format.NONE and source.quantization.format is not Format.NONE:
        raise UserError(
            f"{checkpoint_dir} is quantized already ({source.quantization.format}): format: none keeps it"
        )
    with progress.task("checking the checkpoint"):
        source.check()
    if form is not Format.NONE and dataset_dir is None:
        raise UserError(f"format {form} is calibrated on samples, and no data set was given")
    work = _Calibration(checkpoint_dir, architecture, form, quantization, device, into, progress, notes)
    facts: dict[str, Json] = {
        "format": str(form),
        "kv_cache": quantization.kv_cache,
        "group_size": work.group_size,
        "device": device,
        "tools": {name: metadata.version(name) for name in _TOOLS},
    }
    if form is not Format.NONE or exports:
        work.import_libraries()
    with torch_threads_for(source.tensors.elements):
        model = work.load() if form is not Format.NONE or exports else None
        if form is not Format.NONE and dataset_dir is not None:
            facts |= work.measure(model, dataset_dir)
        facts["exports"] = work.export(model, exports)
    facts["warnings"] = list(dict.fromkeys(notes.warnings))
    for warning in dict.fromkeys(notes.warnings):
        progress.say(f"    note: {warning}")
    from pipeline.stages.calibrate.unified import write_json

    # The file is the same for the same inputs; what took how long is a fact of this one run.
    write_json(into / "calibration.json", {k: v for k, v in facts.items() if k != "pass_seconds"})
    facts["seconds"] = round(time.monotonic() - began, 1)
    return {key: value for key, value in facts.items() if key != "scales"}


def _group_size(form: Format, quantization: Quantization) -> int | None:
    """Weights that share one scale; None where a row or the whole tensor does."""
    if form in (Format.INT4_AWQ, Format.W4A8_AWQ):
        return quantization.awq_block_size
    sizes: dict[str, int] = rule("quantization.groups").facts["sizes"]
    return sizes.get(form)


class _Calibration:
    """The steps, and what they share.

    ModelOpt exports the ranks of dense models whose projections are separate. Those of experts it divides only in one
    way, and those of Phi-3 not at all; theirs are divided here, from the Hugging Face export.
    """

    def __init__(
        self,
        source: Path,
        architecture: Architecture,
        form: Format,
        quantization: Quantization,
        device: str,
        into: Path,
        progress: Progress,
        notes: Notes,
    ) -> None:
        self._source, self._architecture, self._form = source, architecture, form
        self._quantization, self._device, self._into = quantization, device, into
        self._progress, self._notes = progress, notes
        self.group_size = _group_size(form, quantization)

    @contextlib.contextmanager
    def _phase(self, doing: str) -> Iterator[None]:
        """Work of libraries, as a task of its own: most of it takes long, and says nothing."""
        with self._progress.task(doing), quietly(doing, self._notes):
            yield

    def import_libraries(self) -> None:
        """Torch, transformers and ModelOpt: half a minute on a slow disk."""
        with self._phase("importing ModelOpt"):
            import modelopt.torch.export  # noqa: F401

    def load(self) -> Any:
        """The model; known to ModelOpt, or refused in seconds."""
        from pipeline.stages.calibrate.model import check_known, load

        with self._phase("looking at the model"):
            check_known(self._source, self._architecture)
        with self._phase("loading the model"):
            return load(self._source, self._architecture, self._device)

    def measure(self, model: Any, dataset_dir: Path) -> dict[str, Json]:
        """Scales, checked; and a sample answer."""
        from pipeline.stages.calibrate.measurement import check_packing, check_scales, make_batches, measure
        from pipeline.stages.calibrate.model import generate_sample

        samples = read_samples(dataset_dir / "calibration.jsonl", self._architecture.vocab)
        calibration = self._quantization.calibration
        at_once = calibration.batch_size if calibration else _BATCH_SAMPLES
        longest = calibration.max_tokens if calibration else max(map(len, samples))
        batches = make_batches(samples, at_once * longest)
        with self._phase("comparing samples alone and in one row"):
            check_packing(model, samples)
        kv_cache = self._quantization.kv_cache
        with self._phase("calibration"):
            seconds = measure(
                model,
                self._form,
                awq_block_size=self._quantization.awq_block_size,
                kv_cache=kv_cache,
                batches=batches,
                progress=self._progress,
            )
            scales = check_scales(model, self._architecture, self._form, kv_cache)
        with self._phase("the sample answer"):
            shown = generate_sample(model, dataset_dir, self._source / "tokenizer.json")
        tokens = sum(len(sample) for sample in samples)
        self._progress.say(
            f"    {len(scales)} scales from {len(samples)} samples, {tokens} tokens: finite, positive"
        )
        self._progress.say(f"    asked:    {_line(shown['prompt'])}")
        self._progress.say(f"    answered: {_line(shown['answer'])}")
        return {
            "samples": len(samples),
            "tokens": tokens,
            "batches": len(batches),
            "pass_seconds": list(seconds),
            "answer": shown,
            "scales": scales,
        }

    def export(self, model: Any, sizes: Sequence[Parallelism]) -> dict[str, Json]:
        """Both kinds of checkpoint, read again and judged."""
        from pipeline.runtimes.tensorrt.checkpoint import modelopt_export
        from pipeline.stages.calibrate import unified

        exports: dict[str, Json] = {}
        if self._form is not Format.NONE:
            with self._phase("aligning what engines make one layer"):
                unified.align(model, self._form, modelopt_export.torch_dtype(self._architecture))
        divided = bool(self._architecture.experts) or self._architecture.fused
        if not divided:
            exports |= {size.folder: self._export_ranks(model, size) for size in sizes}
        exports["hf"] = self._export_whole(model)
        if divided:
            exports |= {size.folder: self._divide(size) for size in sizes}
        self._progress.say(f"    {', '.join(f'{name}/' for name in exports)}: read again, complete")
        return exports

    def _export_whole(self, model: Any) -> Json:
        """The Hugging Face checkpoint. It is the last thing that is done with the model."""
        from pipeline.stages.calibrate import unified

        directory = self._into / "hf"
        if self._form is Format.NONE:
            unified.link(self._source, directory)
        else:
            with self._phase("the Hugging Face export"):
                unified.export(model, self._form, self._source, directory)
        with self._progress.task("reading hf/ again"):
            unified.judge(directory, self._form, self.group_size, self._quantization.kv_cache)
        return _size(directory)

    def _export_ranks(self, model: Any, size: Parallelism) -> Json:
        from pipeline.runtimes.tensorrt.checkpoint import modelopt_export

        directory = self._into / size.folder
        with self._phase(f"the TensorRT-LLM export for {size.world} ranks"):
            modelopt_export.export(model, self._architecture, size, directory)
        return self._judged(directory, size)

    def _divide(self, size: Parallelism) -> Json:
        from pipeline.runtimes.tensorrt.checkpoint import split

        split(CheckpointReader(self._into / "hf"), size, self._into / size.folder, self._progress)
        return self._judged(self._into / size.folder, size)

    def _judged(self, directory: Path, size: Parallelism) -> Json:
        layout = CheckpointLayout(
            self._architecture,
            "BF16" if self._architecture.dtype == "bfloat16" else "F16",
            self._form,
            self.group_size,
            self._quantization.kv_cache,
            size.tensor,
            size.pipeline,
            size.expert,
        )
        with self._progress.task(f"reading {directory.name}/ again"):
            check_files(directory, layout)
        return _size(directory)


def _size(directory: Path) -> dict[str, Json]:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def _line(text: Json, most: int = 160) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"
