"""The recipe: one YAML file that says everything about a deployment.

    recipe = load_recipe("recipes/tiny-cpu.yaml", ["limits.max_concurrency=8"])

Frozen pydantic models, a loader that names file, line and key of every fault, overrides, and the JSON schema.
Nothing heavy is imported and nothing is fetched.
"""

from __future__ import annotations

from pipeline.recipe.deployment import DeploySection, GatewaySection, KubernetesSection, TritonSection
from pipeline.recipe.library import find_recipe, headline, packaged
from pipeline.recipe.loading import load_recipe
from pipeline.recipe.quantization import AutoQuantization, Calibration, Format, Gate, Quantization
from pipeline.recipe.recipe import SERVED_SECTIONS, AdapterSource, Draft, Recipe, RecipeProvenance
from pipeline.recipe.response_cache import CacheSettings
from pipeline.recipe.runtime import CpuRuntime, PyTorchRuntime, Runtime, TensorRTRuntime
from pipeline.recipe.sections import KvCache, Limits, Scheduler, ServingPolicy, Slo
from pipeline.recipe.source import Checkpoint, Dataset, HubSource, LocalSource, NamedDataset, Source

__all__ = [
    "SERVED_SECTIONS", "AdapterSource", "AutoQuantization", "CacheSettings", "Calibration", "Checkpoint", "CpuRuntime",
    "Dataset", "DeploySection", "Draft", "Format", "Gate", "GatewaySection", "HubSource", "KubernetesSection",
    "KvCache", "Limits", "LocalSource", "NamedDataset", "PyTorchRuntime", "Quantization", "Recipe", "RecipeProvenance",
    "Runtime", "Scheduler", "ServingPolicy", "Slo", "Source", "TensorRTRuntime", "TritonSection", "find_recipe",
    "headline", "load_recipe", "packaged",
]  # fmt: skip
