"""Over how many GPUs a model is spread, and how: the sizes that checkpoint, engine and launch share."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.recipe import Recipe

RANKS = "trtllm-"  # how the folders of TensorRT-LLM checkpoints begin


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Over how many GPUs one model is spread, and how."""

    tensor: int = 1  # GPUs that share each layer
    pipeline: int = 1  # groups of GPUs that share the layers
    expert: int = 1  # of the tensor-parallel GPUs, groups that hold different experts
    attention_dp: bool = False  # each of them has requests of its own, and all but the routed experts whole

    @property
    def shared(self) -> int:
        """GPUs that share each layer, but for its routed experts."""
        return 1 if self.attention_dp else self.tensor

    @property
    def expert_tensor(self) -> int:
        """GPUs that share each routed expert.

        >>> Parallelism(tensor=4, expert=2).expert_tensor
        2
        """
        return max(1, self.tensor // self.expert)

    @property
    def request_groups(self) -> int:
        """Groups of GPUs that each have requests, and a KV cache, of their own."""
        return self.tensor // self.shared

    def rank_requests(self, requests: int) -> int:
        """Divide requests that run at a time among the groups: the most that one of them has, evenly spread."""
        return -(-requests // self.request_groups)

    @property
    def world(self) -> int:
        """Ranks, one a GPU."""
        return self.tensor * self.pipeline

    @property
    def folder(self) -> str:
        """Name of the folder of a TensorRT-LLM checkpoint that is split like this.

        >>> Parallelism(tensor=4, pipeline=2).folder
        'trtllm-tp4-pp2'
        """
        parts = [f"{RANKS}tp{self.tensor}"]
        parts += [f"pp{self.pipeline}"] if self.pipeline > 1 else []
        parts += [f"ep{self.expert}"] if self.expert > 1 else []
        return "-".join(parts)


def parallelism(recipe: Recipe, role: str) -> Parallelism:
    """Return how the target or the draft of a recipe is spread.

    On `tensorrt` the draft has a size of its own; elsewhere it lies with the target.
    """
    runtime = recipe.runtime
    if runtime.kind == "cpu":
        return Parallelism()
    if role == "draft" and runtime.kind == "tensorrt" and recipe.draft is not None:
        return Parallelism(tensor=recipe.draft.tensor_parallel)
    return Parallelism(
        runtime.tensor_parallel,
        runtime.pipeline_parallel,
        runtime.expert_parallel or 1,
        runtime.kind == "pytorch" and runtime.attention_dp,
    )
