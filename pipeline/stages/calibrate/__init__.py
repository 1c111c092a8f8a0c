"""Measure the scales of a checkpoint with NVIDIA ModelOpt, and export it for the engines.

    calibration.calibrate(checkpoint, dataset, quantization, exports=[Parallelism(1), Parallelism(2)], into=folder, …)

leaves `hf/` (a unified Hugging Face checkpoint), `trtllm-tp1/`, `trtllm-tp2/` (TensorRT-LLM checkpoints) and
calibration.json. What was written is read again and judged. Written against ModelOpt 0.47, torch 2.13 and
transformers 5.14, which are imported when it is called.
"""
