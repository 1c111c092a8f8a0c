"""One recipe per model becomes a running Triton deployment that streams tokens."""

__version__ = "0.1.0"
