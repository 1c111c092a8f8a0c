"""The samples that a model is calibrated and judged on, frozen to files before any model is loaded.

freeze(dataset, checkpoint, samples=128, …)      calibration.jsonl, heldout.jsonl, dataset.json
identity(dataset)                                name and digests, for the plan: no checkpoint needed
read_definition(name)                            where the files of a named set lie
"""

from pipeline.stages.dataset.definition import read_definition
from pipeline.stages.dataset.freezing import freeze
from pipeline.stages.dataset.resolution import identity

__all__ = ["freeze", "identity", "read_definition"]
