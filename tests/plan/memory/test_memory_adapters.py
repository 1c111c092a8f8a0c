"""Sizes of the caches of LoRA adapters: by hand after upstream's formula, and in the plan of a recipe."""

from __future__ import annotations

from typing import Any

from pipeline.contracts.models import known_model
from pipeline.models.adapter import Adapter, AdapterModule
from pipeline.models.sizes import ModelSizes
from pipeline.plan.memory import MemoryPlan, deployment_spec, plan_memory
from pipeline.plan.memory.capacity import cache_bytes, host_cache_bytes, lora_targets
from pipeline.plan.memory.spec import AdapterDemand, ModelSpec
from pipeline.plan.parallelism import Parallelism
from pipeline.recipe import Recipe


def _sizes() -> ModelSizes:
    sizes = known_model("meta-llama/Llama-3.1-8B-Instruct")
    assert sizes is not None
    return sizes


def _adapter(rank: int, *names: str) -> Adapter:
    """An adapter of the first layer."""
    shapes = {"q_proj": (4096, 4096), "v_proj": (4096, 1024), "down_proj": (14336, 4096)}
    parents = {"down_proj": "mlp"}
    modules = [
        AdapterModule(f"layers.0.{parents.get(name, 'self_attn')}.{name}", "", rank, *shapes[name], 1.0)
        for name in names
    ]
    return Adapter(modules=tuple(modules))


def _demand(*adapters: Adapter, device: int = 1, host: int = 1) -> AdapterDemand:
    known = {f"adapter-{number}": adapter for number, adapter in enumerate(adapters)}
    return AdapterDemand(known=known, unknown=(), device=device, host=host, version="1.2.1")


def test_queries_keys_and_values_come_together() -> None:
    assert lora_targets("1.2.1", iter([_adapter(8, "v_proj")])) == ["attn_k", "attn_q", "attn_v"]
    assert lora_targets("1.2.1", iter([_adapter(8, "down_proj")])) == ["mlp_4h_to_h"]


def test_a_cache_is_as_upstream_lays_it_out() -> None:
    # Inputs and outputs of q: 8192, k and v: 5120 each. So a row is 5120 wide and q takes two; a page has
    # 8 ranks * (2 + 1 + 1) rows * 32 layers = 1024 rows, and an adapter 16 * 32 * 3 modules * 2 = 3072.
    demand, model = (
        _demand(_adapter(16, "q_proj", "v_proj"), _adapter(8, "v_proj")),
        ModelSpec("target", _sizes()),
    )
    assert cache_bytes(demand, model, 1) == 3072 * 5120 * 2
    assert cache_bytes(demand, model, 4) == 4 * 3072 * 5120 * 2
    # On two GPUs each has half the outputs: 6144 and 4608.
    split = ModelSpec("target", _sizes(), split=Parallelism(tensor=2))
    assert cache_bytes(demand, split, 1) == 3072 * 4608 * 2
    # The layer that adds up what the GPUs worked out has half the inputs: 14336 / 2 + 4096; one row for each rank.
    down = _demand(_adapter(8, "down_proj"))
    assert cache_bytes(down, split, 1) == 8 * 32 * (14336 // 2 + 4096) * 2


def test_the_host_holds_a_cache_for_each_rank() -> None:
    demand = _demand(_adapter(16, "q_proj"), host=5)
    split = ModelSpec("target", _sizes(), split=Parallelism(tensor=2))
    assert host_cache_bytes(demand, split) == 2 * cache_bytes(demand, split, 5)


def _planned(known: dict[str, Adapter], **runtime: Any) -> MemoryPlan:
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"source": "hf:meta-llama/Llama-3.1-8B-Instruct"},
            "adapters": {name: {"source": f"hf:org/{name}"} for name in ("a", "b", "c")},
            "limits": {"max_input_tokens": 2048, "max_output_tokens": 512, "max_concurrency": 2},
            "runtime": {"kind": "pytorch", "version": "1.2.1", "gpu": "h100-sxm-80g", **runtime},
        }
    )
    spec = deployment_spec(recipe, {"target": _sizes()}, adapters=known)
    assert spec is not None
    return plan_memory(spec)


def test_a_plan_counts_those_of_a_batch_on_the_gpu_and_all_on_the_host() -> None:
    known = {name: _adapter(16, "q_proj", "v_proj") for name in ("a", "b", "c")}
    adapter_line = 3072 * 5120 * 2
    memory = _planned(known)
    (line,) = [line for line in memory.ranks[0].lines if line.name == "adapters"]
    assert line.bytes == 2 * adapter_line  # as many as requests run at a time
    assert memory.adapter_host_bytes == 3 * adapter_line
    assert memory.spec.graph_sizes == ()  # TensorRT-LLM 1.2.1 replays no graphs with adapters
    own = _planned(known, llm_args={"lora_config": {"max_loras": 1, "max_cpu_loras": 8}})
    (line,) = [line for line in own.ranks[0].lines if line.name == "adapters"]
    assert (line.bytes, own.adapter_host_bytes) == (adapter_line, 8 * adapter_line)
    assert own.tokens > memory.tokens


def test_adapters_that_are_not_here_are_named() -> None:
    memory = _planned({"a": _adapter(16, "q_proj")})
    assert any("b" in warning and "c" in warning for warning in memory.warnings)
