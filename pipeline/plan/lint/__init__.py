"""Lint of published checkpoints."""

from pipeline.plan.lint.files import CheckpointFiles, LocalFiles, lint, lint_files, lint_folder
from pipeline.plan.lint.findings import Finding, refuse_errors, settings_are_dynamic

__all__ = [
    "CheckpointFiles",
    "Finding",
    "LocalFiles",
    "lint",
    "lint_files",
    "lint_folder",
    "refuse_errors",
    "settings_are_dynamic",
]
