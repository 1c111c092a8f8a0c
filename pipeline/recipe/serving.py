"""How a deployment is run: its KV cache, its scheduler, how it answers, and the latencies that it is to meet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipeline.recipe.section import Section


class KvCache(Section):
    """The keys and values of the tokens so far, in pages."""

    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the GPU memory left after loading; by default 0.9. Not for cpu.",
    )
    reuse: bool = Field(
        default=True, description="Keep the pages of finished prompts, for prompts that begin alike."
    )
    host_memory_gib: float = Field(
        default=0.0,
        ge=0,
        le=4096,
        description="Host memory that pages are moved to when the GPU is full. Not for cpu.",
    )


class Scheduler(Section):
    """Which requests take part in the next step."""

    chunked_context: bool = Field(
        default=True, description="Split long prompts over steps, so that they delay no one else."
    )
    policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        default="guaranteed_no_evict",
        description="Admit a request when it fits to its end, or as soon as it can start.",
    )
    max_queue_size: int = Field(
        default=0, ge=0, le=1_000_000, description="Requests that may wait; 0 is no limit."
    )
    max_queue_delay_us: int = Field(
        default=0, ge=0, le=10_000_000, description="Wait this long to batch arrivals together."
    )


class TransactionPolicy(Section):
    """How many responses Triton's models send to one request."""

    decoupled: bool = Field(
        default=True,
        description="Stream: many responses to one request. If false, each request has one response, the whole answer, "
        "as clients that call infer() need it: KServe tools, benchmarks.",
    )


class Slo(Section):
    """The latencies to meet; `plan` and `bench` judge by them."""

    ttft_p95_ms: float | None = Field(default=None, gt=0, description="Time to first token, 95th percentile.")
    itl_p95_ms: float | None = Field(default=None, gt=0, description="Time between tokens, 95th percentile.")
