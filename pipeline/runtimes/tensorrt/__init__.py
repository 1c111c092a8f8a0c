"""Engines that trtllm-build makes ahead of time, served by the C++ backend (TensorRT-LLM 1.0 to 1.2.1)."""
