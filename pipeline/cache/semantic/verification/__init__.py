"""Whether the answer to one question serves another that is near: what both say is read and held side by side."""

from pipeline.cache.semantic.verification.checks import CHECKS
from pipeline.cache.semantic.verification.verifier import Checked, default_verifier

__all__ = ["CHECKS", "Checked", "default_verifier"]
