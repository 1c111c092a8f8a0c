"""The stage from beginning to end: load, measure, check, answer, export, judge.

Whether the format, its groups and the ranks suit the model is judged before, by the rules of preflight.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.contracts.checkpoint import CheckpointLayout, check_files
from pipeline.contracts.rules import rule
from pipeline.errors import UserError
from pipeline.models import Architecture, CheckpointReader, Format
from pipeline.plan.parallelism import Parallelism
from pipeline.plan.plan import UNIFIED
from pipeline.progress import Progress
from pipeline.recipe import Quantization
from pipeline.stages.calibrate.cast import FORMATS as CASTS
from pipeline.stages.calibrate.cast import can_cast, cast, largest_inputs
from pipeline.stages.calibrate.third_party import Notes, quietly
from pipeline.stages.dataset.freezing import read_samples
from pipeline.stages.torch_device import torch_device, torch_threads_for
from pipeline.store import Json

if TYPE_CHECKING:
    from pipeline.stages.calibrate.measurement import Batch

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
    sensitivity_dir: Path | None = None,
) -> dict[str, Json]:
    """Quantize a checkpoint and write its exports into the folder `into`; returns the facts.

    Args:
        dataset_dir: Folder of frozen samples; may be None for format `none`, which measures nothing.
        exports: Sizes of each TensorRT-LLM checkpoint to write; may be empty.
        sensitivity_dir: For format `auto`: folder that `measure_sensitivity` left.
        device: "cpu" or "cuda"; by default a GPU if there is one.

    Raises:
        UserError: the model, the format or the parallelism cannot be done; found before the model is loaded.
        StageError: ModelOpt failed, or a scale or a file is not as it must be; everything that is wrong is listed.
    """
    began = time.monotonic()
    work = _open(checkpoint_dir, dataset_dir, quantization, into, progress, device)
    form, notes = work.form, work.notes
    if form is Format.AUTO and (sensitivity_dir is None or exports):
        raise UserError("format auto needs measured sensitivity, and is exported for no engines")
    facts: dict[str, Json] = {
        "format": str(form),
        "kv_cache": quantization.kv_cache,
        "group_size": work.group_size,
        "device": work.device,
        "tools": {name: metadata.version(name) for name in _TOOLS},
    }
    source = CheckpointReader(checkpoint_dir)
    if form is not Format.NONE and source.quantization.format is not Format.NONE:
        if quantization.kv_cache != "auto":
            raise UserError("weights are cast without calibration: quantization.kv_cache must be auto")
        return facts | _cast(work, source, dataset_dir) | {"seconds": round(time.monotonic() - began, 1)}
    if form is not Format.NONE or exports:
        work.import_libraries()
    with torch_threads_for(work.elements):
        model = work.load() if form is not Format.NONE or exports else None
        if form is not Format.NONE and dataset_dir is not None:
            facts |= work.measure(model, dataset_dir, sensitivity_dir)
        facts["exports"] = work.export(model, exports)
    facts["warnings"] = list(dict.fromkeys(notes.warnings))
    for warning in dict.fromkeys(notes.warnings):
        progress.say(f"    note: {warning}")
    from pipeline.stages.calibrate.unified import write_json

    # The file is the same for the same inputs; what took how long is a fact of this one run.
    write_json(into / "calibration.json", {k: v for k, v in facts.items() if k != "pass_seconds"})
    facts["seconds"] = round(time.monotonic() - began, 1)
    return {key: value for key, value in facts.items() if key != "scales"}


def measure_sensitivity(
    checkpoint_dir: Path,
    dataset_dir: Path,
    quantization: Quantization,
    *,
    kept: Path,
    into: Path,
    progress: Progress,
    device: str | None = None,
) -> dict[str, Json]:
    """Measure what each candidate of format `auto` costs each group of layers; no budget is needed for it.

    Args:
        kept: File in which a killed measurement goes on.
        into: Folder; gets search.pt, for `calibrate`, and sensitivity.json.

    Raises:
        UserError: The model or a candidate cannot be done.
        StageError: ModelOpt failed.
    """
    began = time.monotonic()
    work = _open(checkpoint_dir, dataset_dir, quantization, into, progress, device)
    work.import_libraries()
    with torch_threads_for(work.elements):
        sensitivity = work.measure_sensitivity(work.load(), dataset_dir, kept)
    return {
        "formats": list(sensitivity["bits"]),
        "groups": len(sensitivity["groups"]),
        "device": work.device,
        "seconds": round(time.monotonic() - began, 1),
    }


def _open(
    checkpoint_dir: Path,
    dataset_dir: Path | None,
    quantization: Quantization,
    into: Path,
    progress: Progress,
    device: str | None,
) -> _Calibration:
    """Check the files, and that this machine can calibrate them."""
    architecture = Architecture.read(checkpoint_dir)
    if device is None:
        with progress.task("importing torch"):
            device = torch_device()
    form = Format(quantization.format)
    source = CheckpointReader(checkpoint_dir)
    stored = source.quantization
    if (
        form is not Format.NONE
        and stored.format is not Format.NONE
        and not (form in CASTS and can_cast(source))
    ):
        fix = f"format {' or '.join(CASTS)} casts it, " if can_cast(source) else ""
        raise UserError(
            f"{checkpoint_dir} is quantized already ({stored.format}): {fix}format: none keeps it"
        )
    with progress.task("checking the checkpoint"):
        source.check()
    if form is not Format.NONE and dataset_dir is None:
        raise UserError(f"format {form} is calibrated on samples, and no data set was given")
    elements = source.tensors.elements
    return _Calibration(
        checkpoint_dir, architecture, form, quantization, device, into, progress, Notes(), elements
    )


def _cast(work: _Calibration, source: CheckpointReader, dataset_dir: Path | None) -> dict[str, Json]:
    """Four-bit floats from one kind of scales to another."""
    from pipeline.stages.calibrate import unified

    directory, inputs = work.into / UNIFIED, None
    if work.form is Format.NVFP4:
        assert dataset_dir is not None, "looked at when it was opened"
        samples = read_samples(dataset_dir / "calibration.jsonl", source.architecture.vocab)
        with torch_threads_for(work.elements):
            inputs = largest_inputs(source, samples, work.device, work.progress)
    facts = cast(source, directory, inputs, work.progress)
    unified.copy_companions(source.directory, directory)
    unified.judge(directory, work.form, work.group_size, "auto", {})
    work.progress.say(f"    {facts['blocks']} blocks cast, {facts['inexact_blocks']} of them not exact")
    for layer in facts["inexact_layers"]:  # type: ignore[union-attr]
        work.progress.say(f"    not exact: {layer}, with blocks more than 2^17 below its largest")
    return {"cast": facts, "exports": {UNIFIED: _size(directory)}, "warnings": []}


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
        elements: int,
    ) -> None:
        self._source, self._architecture, self.form = source, architecture, form
        self._quantization, self.device, self.into = quantization, device, into
        self.progress, self.notes, self.elements = progress, notes, elements
        self.group_size = _group_size(form, quantization)

    @contextlib.contextmanager
    def _phase(self, doing: str) -> Iterator[None]:
        """Show work of libraries as a task: most of it takes long, and reports no progress."""
        with self.progress.task(doing), quietly(doing, self.notes):
            yield

    def import_libraries(self) -> None:
        """Import ModelOpt, which takes up to half a minute. Raises UserError for families that it does not know."""
        from pipeline.stages.calibrate.model import check_family

        check_family(self._architecture)
        with self._phase("importing ModelOpt"):
            import modelopt.torch.export  # noqa: F401

    def load(self) -> Any:
        """Load the model, after a check in seconds that ModelOpt supports it."""
        from pipeline.stages.calibrate.model import check_known, load

        with self._phase("looking at the model"):
            check_known(self._source, self._architecture)
        with self._phase("loading the model"):
            return load(self._source, self._architecture, self.device)

    def _batches(self, model: Any, dataset_dir: Path) -> tuple[list[list[int]], list[Batch]]:
        """Read the calibration samples, alone and in batches."""
        from pipeline.stages.calibrate.measurement import check_packing, make_batches

        samples = read_samples(dataset_dir / "calibration.jsonl", self._architecture.vocab)
        calibration = self._quantization.calibration
        at_once = calibration.batch_size if calibration else _BATCH_SAMPLES
        longest = calibration.max_tokens if calibration else max(map(len, samples))
        with self._phase("comparing samples alone and in one row"):
            check_packing(model, samples)
        return samples, make_batches(samples, at_once * longest)

    def measure_sensitivity(self, model: Any, dataset_dir: Path, kept: Path) -> dict[str, Any]:
        """Measure the costs of the candidates of `auto`, by group of layers."""
        from pipeline.stages.calibrate import auto
        from pipeline.stages.calibrate.unified import write_json

        _, batches = self._batches(model, dataset_dir)
        with self._phase("measuring sensitivity"):
            sensitivity = auto.measure_sensitivity(
                model, self._quantization, batches, kept, self.into, self.progress
            )
        write_json(self.into / auto.SENSITIVITY, sensitivity)
        for form, bits in sorted(sensitivity["bits"].items(), key=lambda item: float(item[1])):
            costs: dict[str, float] = {
                group["layers"][0]: group["scores"][form] for group in sensitivity["groups"]
            }
            if form != "none":
                most = max(costs, key=costs.__getitem__)
                total = f"{sum(costs.values()):.2g} nats"
                self.progress.say(
                    f"    {form}, {bits:.4g} bits a weight: {total} by the gradients, most in {most}"
                )
        return sensitivity

    def measure(self, model: Any, dataset_dir: Path, sensitivity_dir: Path | None) -> dict[str, Json]:
        """Measure and check the scales, and generate a sample answer."""
        from pipeline.stages.calibrate import auto
        from pipeline.stages.calibrate.measurement import check_scales, measure
        from pipeline.stages.calibrate.model import generate_sample

        samples, batches = self._batches(model, dataset_dir)
        kv_cache = self._quantization.kv_cache
        seconds: list[float] = []
        chosen: dict[str, Json] = {}
        with self._phase("calibration"):
            if sensitivity_dir is not None:
                state, copy = sensitivity_dir / auto.STATE, self.into / auto.STATE
                chosen = auto.choose(model, self._quantization, batches, state, copy, self.progress)
                self.progress.say(f"    {_mix(chosen)}")
            else:
                seconds = measure(
                    model,
                    self.form,
                    awq_block_size=self._quantization.awq_block_size,
                    kv_cache=kv_cache,
                    batches=batches,
                    progress=self.progress,
                )
            scales = check_scales(model, self._architecture, self.form, kv_cache)
        with self._phase("the sample answer"):
            shown = generate_sample(model, dataset_dir, self._source / "tokenizer.json")
        tokens = sum(len(sample) for sample in samples)
        self.progress.say(
            f"    {len(scales)} scales from {len(samples)} samples, {tokens} tokens: finite, positive"
        )
        self.progress.say(f"    asked:    {_line(shown['prompt'])}")
        self.progress.say(f"    answered: {_line(shown['answer'])}")
        return {
            "samples": len(samples),
            "tokens": tokens,
            "batches": len(batches),
            "pass_seconds": list(seconds),
            **({"auto": chosen} if chosen else {}),
            "answer": shown,
            "scales": scales,
        }

    def export(self, model: Any, sizes: Sequence[Parallelism]) -> dict[str, Json]:
        """Read both kinds of checkpoint again, and check them."""
        from pipeline.runtimes.tensorrt.checkpoint import modelopt_export
        from pipeline.stages.calibrate import unified

        exports: dict[str, Json] = {}
        if self.form is not Format.NONE:
            with self._phase("aligning what engines make one layer"):
                unified.align(model, modelopt_export.torch_dtype(self._architecture))
        divided = bool(self._architecture.experts) or self._architecture.fused
        if not divided:
            exports |= {size.folder: self._export_ranks(model, size) for size in sizes}
        exports["hf"] = self._export_whole(model)
        if divided:
            exports |= {size.folder: self._divide(size) for size in sizes}
        self.progress.say(f"    {', '.join(f'{name}/' for name in exports)}: read again, complete")
        return exports

    def _export_whole(self, model: Any) -> Json:
        """Write the Hugging Face checkpoint; the model cannot be used afterwards."""
        from pipeline.stages.calibrate import unified

        directory, chosen = self.into / "hf", dict[str, Format]()
        if self.form is Format.AUTO:
            from pipeline.stages.calibrate.measurement import layer_format, linear_layers

            chosen = {name: layer_format(layer) for name, layer in linear_layers(model)}
        if self.form is Format.NONE:
            unified.link(self._source, directory)
        else:
            with self._phase("the Hugging Face export"):
                unified.export(model, self._source, directory)
        with self.progress.task("reading hf/ again"):
            unified.judge(directory, self.form, self.group_size, self._quantization.kv_cache, chosen)
        return _size(directory)

    def _export_ranks(self, model: Any, size: Parallelism) -> Json:
        from pipeline.runtimes.tensorrt.checkpoint import modelopt_export

        directory = self.into / size.folder
        with self._phase(f"the TensorRT-LLM export for {size.world} ranks"):
            modelopt_export.export(model, self._architecture, size, directory)
        return self._judged(directory, size)

    def _divide(self, size: Parallelism) -> Json:
        from pipeline.runtimes.tensorrt.checkpoint import split

        split(CheckpointReader(self.into / "hf"), size, self.into / size.folder, self.progress)
        return self._judged(self.into / size.folder, size)

    def _judged(self, directory: Path, size: Parallelism) -> Json:
        layout = CheckpointLayout(
            self._architecture,
            "BF16" if self._architecture.dtype == "bfloat16" else "F16",
            self.form,
            self.group_size,
            self._quantization.kv_cache,
            size.tensor,
            size.pipeline,
            size.expert,
        )
        with self.progress.task(f"reading {directory.name}/ again"):
            check_files(directory, layout)
        return _size(directory)


def _size(directory: Path) -> dict[str, Json]:
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def _mix(chosen: Mapping[str, Any]) -> str:
    """Say what `auto` chose: "6 bits a weight: int4_awq 8, fp8 12, none 8 layers"."""
    counts = ", ".join(f"{form} {count}" for form, count in chosen["formats"].items())
    return f"{chosen['effective_bits']:.4g} bits a weight: {counts} layers"


def _line(text: Json, most: int = 160) -> str:
    flat = " ".join(str(text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"
