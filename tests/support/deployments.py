"""Deployments for a GPU, as their deployment.json says; nothing is built for them."""

from __future__ import annotations

from pipeline.triton.deployment import Deployment, DeploymentLimits, LaunchSpec, Requirements

# For `RunningServer.of`.
ADDRESSES = {
    "grpc_url": "127.0.0.1:1",
    "http_url": "http://127.0.0.1:1",
    "metrics_url": "http://127.0.0.1:1/metrics",
}


FIVE = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


def gpu_deployment(
    launch: LaunchSpec, *, gpus: int = 1, version: str = "1.2.1", gpu: str = "h100-sxm-80g", sm: int = 90
) -> Deployment:
    """What the package of an engine, or of LLM API arguments, says of itself."""
    api = launch.mode == "llmapi"
    draft = ("tensorrt_llm_draft",) if "tensorrt_llm_draft" in launch.engine_models else ()
    return Deployment(
        name="llama",
        runtime="pytorch" if api else "tensorrt",
        entry_model="tensorrt_llm" if api else "tensorrt_llm_bls",
        models=("tensorrt_llm",) if api else (*FIVE, *draft),
        limits=DeploymentLimits(max_input_tokens=1024, max_output_tokens=256, max_concurrency=8),
        tokenizer_dir="model_repository/tokenizer",
        end_id=2,
        pad_id=2,
        stop_token_ids=(),
        digest="0" * 64,
        versions={},
        requirements=Requirements(
            tensorrt_llm=version,
            tensorrt=None if api else "10.14.1.48",
            image="nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3",
            driver="590.44.01",
            gpu=gpu,
            sm=sm,
            gpus=gpus,
        ),
        launch=launch,
    )
