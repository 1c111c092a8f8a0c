"""A paged, batching inference engine for small machines: numpy, OpenVINO, and nothing else.

This folder is copied as it is into the Triton model that serves it, so it imports nothing outside itself.
"""

from .engine import Engine
from .request import EngineStopped, FinishReason, Metrics, Output, Refused, Request, Sampling
from .settings import EngineSettings
from .stats import EngineStats

__all__ = [
    "Engine",
    "EngineSettings",
    "EngineStats",
    "EngineStopped",
    "FinishReason",
    "Metrics",
    "Output",
    "Refused",
    "Request",
    "Sampling",
]
