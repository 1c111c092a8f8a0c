"""Constants of speed that were measured on a device (`pipeline plan calibrate`): where the store keeps them."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import Fault, InvalidInput
from pipeline.machine.host import processor_name
from pipeline.plan.performance.calibration import SpeedCalibration, calibration_file
from pipeline.recipe import CpuRuntime, Recipe
from pipeline.store import Store


def calibrated_device(recipe: Recipe) -> str:
    """Name what a calibration of a recipe is of: its GPU, or the processor of this machine."""
    return processor_name() if isinstance(recipe.runtime, CpuRuntime) else recipe.runtime.gpu


def calibration_path(recipe: Recipe, store: Store) -> Path:
    """Say where the store keeps the calibration of a recipe's device and runtime."""
    return store.calibrations / calibration_file(calibrated_device(recipe), recipe.runtime.kind)


def stored_calibration(recipe: Recipe, store: Store, file: Path | None = None) -> SpeedCalibration | None:
    """Read the calibration of a recipe's device and runtime.

    Args:
        file: Read this one instead of the store's.

    Returns:
        None where there is none in the store.

    Raises:
        UnreadableFile, InvalidInput: It cannot be read, or is no calibration, or of another device or runtime.
    """
    path = calibration_path(recipe, store) if file is None else file
    if file is None and not path.is_file():
        return None
    calibration = SpeedCalibration.read(path)
    device = calibrated_device(recipe)
    wrong = [
        Fault(f"is of {has}, and the recipe's is {wanted}", key=key, value=has)
        for key, has, wanted in (
            ("device", calibration.device, device),
            ("runtime", calibration.runtime, recipe.runtime.kind),
        )
        if has != wanted
    ]
    if wrong:
        raise InvalidInput(str(path), wrong)
    return calibration
