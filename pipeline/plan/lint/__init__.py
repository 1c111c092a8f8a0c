"""Lint of published checkpoints."""

from pipeline.plan.lint.files import CheckpointFiles, LocalFiles, lint, lint_files, lint_folder
from pipeline.plan.lint.findings import Finding, settings_are_dynamic

__all__ = [
    "CheckpointFiles",
    "Finding",
    "LocalFiles",
    "lint",
    "lint_files",
    "lint_folder",
    "settings_are_dynamic",
]
