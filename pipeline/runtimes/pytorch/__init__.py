"""TensorRT-LLM's LLM API: a checkpoint and its arguments, served by the `llmapi` model (1.0 and newer)."""
