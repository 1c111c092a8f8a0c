"""The stages of a build, and what runs them.

prepared = prepare(recipe, store)                     # `pipeline.prepare`: resolve sources, make the plan
Builder(prepared, store, progress).run()
"""

from pipeline.stages.builder import Builder, DeploymentPreview, StepOutcome, preview_deployment
from pipeline.stages.remote_build import adopt, build_or_hand_over

__all__ = [
    "Builder",
    "DeploymentPreview",
    "StepOutcome",
    "adopt",
    "build_or_hand_over",
    "preview_deployment",
]
