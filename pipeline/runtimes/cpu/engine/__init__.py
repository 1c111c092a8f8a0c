"""A paged, batching inference engine for small machines: numpy, OpenVINO, and llguidance for answers of a form.

This folder is copied as it is into the Triton model that serves it, so it imports nothing outside itself.
"""

from .engine import Engine
from .grammars import Vocabulary
from .request import EngineStopped, FinishReason, Guide, Metrics, Output, Refused, Request, Sampling
from .settings import EngineSettings
from .stats import EngineStats

__all__ = [
    "Engine",
    "EngineSettings",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Guide",
    "Metrics",
    "Output",
    "Refused",
    "Request",
    "Sampling",
    "Vocabulary",
]
