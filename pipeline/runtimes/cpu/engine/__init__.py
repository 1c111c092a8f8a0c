"""A paged, batching inference engine for small machines: numpy, OpenVINO, and llguidance for answers of a form.

This folder is copied as it is into the Triton model that serves it, so it imports nothing outside itself.
"""

from .engine import Engine
from .grammars import Vocabulary
from .request import (
    EngineRequest,
    EngineStopped,
    FinishReason,
    Guide,
    InvalidRequest,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from .settings import EngineSettings
from .stats import EngineStats

__all__ = [
    "Engine",
    "EngineRequest",
    "EngineSettings",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Guide",
    "InvalidRequest",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Vocabulary",
]
