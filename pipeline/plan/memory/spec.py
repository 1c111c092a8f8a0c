"""The demand of a deployment on the memory of GPUs (or of the machine), which `plan_memory` answers line by line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.models.adapter import Adapter
from pipeline.models.sizes import ModelSizes
from pipeline.plan.parallelism import Parallelism

Group = Literal["runtime", "weights", "activations", "communication", "kv_cache", "graphs"]


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One figure of a memory plan: bytes on one rank, with the formula that they come from."""

    group: Group
    role: str  # "target" | "draft"; "" for what no model owns
    name: str  # "attention"
    bytes: int
    formula: str
    sources: tuple[str, ...]

    @property
    def key(self) -> str:
        """Group, role and name in one: "weights.target.attention"."""
        return ".".join(part for part in (self.group, self.role, self.name) if part)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model as it is served: sizes, split, formats and the limits of its engine."""

    role: str  # "target" | "draft"
    sizes: ModelSizes
    split: Parallelism = field(default_factory=Parallelism)
    format: str = (
        "none"  # of the weights; that of most of the published ones stands for all as they are published
    )
    kv_cache: str = "bfloat16"  # data type of keys and values
    step_tokens: int = 8192  # max_num_tokens: in one step, of all requests
    block_tokens: int = 32  # of a page of the KV cache
    awq_block: int = 128
    bits: float | None = None  # average of a weight, for format auto
    unexplained: int = 0  # weights that the checkpoint has besides those that its sizes explain
    expert_bytes: float | None = (
        None  # of a weight of an expert, where a runtime unpacks it; None: as it is stored
    )
    packed: str | None = None  # type that linear layers are packed in by the embedded engine; None: as stored
    rounded_head: bool = (
        False  # whether the embedded engine holds an output projection that is not quantized in 8 bits
    )
    copies_tied: bool = False  # whether an output projection that is the embedding is held twice
    predicts: bool = False  # whether layers that predict further tokens (MTP) are loaded
    partition: tuple[int, ...] = ()  # layers of each stage; (): as even as can be
    windows: tuple[
        int, ...
    ] = ()  # tokens that the KV cache keeps in each layer, 0 for all; repeated; (): all
    window_margin: int = 0  # tokens of a sequence that are kept besides its window
    state_dtype: str | None = None  # of recurrent states; None: as the checkpoint has it


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of an engine that memory depends on, as the runtime will write them."""

    step_tokens: int = 8192  # max_num_tokens
    block_tokens: int = 32


@dataclass(frozen=True, slots=True)
class AdapterDemand:
    """LoRA adapters of the target, as far as memory depends on them.

    Attributes:
        known: Adapters whose files are here, by name.
        unknown: Names of the others, which are not counted.
        device: Adapters that are held on each GPU; on `cpu`, all of them are held once.
        host: Adapters that are held in the memory of the host, by each rank.
        version: Release of TensorRT-LLM; None on `cpu`.
    """

    known: Mapping[str, Adapter]
    unknown: tuple[str, ...]
    device: int
    host: int
    version: str | None


@dataclass(frozen=True, slots=True)
class DeploymentSpec:
    """Models that lie together, in the order in which they load; ranks of all are on the same GPUs, from the first."""

    device: str  # "h100-sxm-80g"
    capacity: int  # bytes of one GPU, as its driver reports them
    models: tuple[ModelSpec, ...]
    sequence_tokens: int  # prompt, answer, and drafts that are verified
    concurrency: int  # requests that the recipe wants to run at a time
    fraction: float = 0.9  # of what weights and buffers leave, for KV caches
    graph_sizes: tuple[int, ...] = ()  # batches that CUDA graphs are captured for
    pool_bytes: int | None = None  # most of the KV caches of a rank, where it is not a share of what is left
    most_tokens: int | None = None  # that the KV cache of a rank holds, whatever room there is
    is_gpu: bool = True
    adapters: AdapterDemand | None = None

    @property
    def request_groups(self) -> int:
        """Ranks of a stage that each have requests and a KV cache of their own."""
        return self.models[0].split.request_groups

    @property
    def rank_sequences(self) -> int:
        """Requests that a rank runs at a time, and sets states aside for."""
        return self.models[0].split.rank_requests(self.concurrency)

    @property
    def ranks(self) -> int:
        """GPUs that it takes: those of its largest model."""
        return max(model.split.world for model in self.models)
