"""The samples that a model is calibrated and judged on, frozen to files before any model is loaded (freezing.py)."""
