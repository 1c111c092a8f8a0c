"""The samples that a model is calibrated and judged on, frozen to files before any model is loaded.

freeze(dataset, checkpoint, samples=128, …)      calibration.jsonl, heldout.jsonl, dataset.json
"""

from pipeline.stages.dataset.freezing import freeze

__all__ = ["freeze"]
