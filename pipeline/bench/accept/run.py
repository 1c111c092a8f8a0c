"""What the steps of an acceptance run share: what was asked for, and what the steps before have made."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import resources
from pipeline.bench.accept.asking import TIMEOUTS
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.workload import Words
from pipeline.client import ChatTemplate, Client, Message, Sampling
from pipeline.errors import ServerError
from pipeline.plan.report import PlanReport
from pipeline.prepare import Prepared
from pipeline.progress import Progress
from pipeline.reading import read_tokenizer
from pipeline.recipe import Gate, Recipe
from pipeline.serving.served import ServedDeployment
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from pipeline.store import Store
from pipeline.triton.deployment import DRAFT_MODEL, Deployment

Checks = Iterator[AcceptanceCheck]
# Gauges of TensorRT-LLM's backend, and of our engine.
REQUESTS, KV_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"


@dataclass(frozen=True, slots=True)
class AcceptanceOptions:
    """How an acceptance run is made.

    Attributes:
        prompt_tokens: of the prompts that latency and load are measured with; None: up to 1,024 of the recipe's limit.
        output_tokens: of their answers; None: up to 128 of the recipe's limit.
        rounds: requests of each stream that are measured at each load.
        questions: that draft equality and the gate are judged by.
        upstream: folder with upstream's clients; None: where the containers have them.
        offline: ask no hub.
        allowed: rules of preflight whose errors are let pass.
        devices: GPUs; empty for all that are needed.
        start_timeout_s: time to become ready; None for what the package's size asks for.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    rounds: int = 3
    questions: int = 32
    upstream: Path | None = None
    offline: bool = False
    allowed: frozenset[str] = frozenset()
    devices: tuple[int, ...] = ()
    start_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class DraftedTexts:
    """Answers to the same questions, and how many tokens a draft proposed for them, and how many were accepted."""

    texts: tuple[str, ...]
    proposed: int
    accepted: int


@dataclass(slots=True)
class AcceptanceRun:
    """What the steps share: what was asked for, and what the steps before have made."""

    recipe: Recipe
    store: Store
    options: AcceptanceOptions
    progress: Progress
    logs: Path
    figures: dict[str, Any] = field(default_factory=dict)  # of the step that runs
    prepared: Prepared | None = None
    plan: PlanReport | None = None
    package: Path | None = None
    served: ServedDeployment | None = None
    before_mib: dict[str, float] = field(default_factory=dict)  # GPU -> used before the start
    answers: list[EngineAnswer] = field(default_factory=list)
    drafted: DraftedTexts | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the recipe is for a GPU."""
        return self.recipe.runtime.kind != "cpu"

    @property
    def deployment(self) -> Deployment:
        """Of the package. Raises ServerError if there is none."""
        return Deployment.load(self.built)

    @property
    def built(self) -> Path:
        """The package's folder. Raises ServerError if it was not built."""
        if self.package is None:
            raise ServerError("there is no package: see the step build")
        return self.package

    @property
    def up(self) -> ServedDeployment:
        """The server. Raises ServerError if it is not there."""
        if self.served is None:
            raise ServerError("there is no server: see the step serve")
        if self.served.process.poll() is not None:
            raise ServerError(f"pipeline serve has ended with exit code {self.served.process.returncode}")
        return self.served

    @property
    def template(self) -> ChatTemplate:
        """The chat template of the package."""
        return ChatTemplate.from_directory(self.built / self.deployment.tokenizer_dir)

    @property
    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer` of the package."""
        return read_tokenizer(self.built / self.deployment.tokenizer_dir / "tokenizer.json")

    def prompts(self, count: int, tokens: int, seed: str = "") -> list[str]:
        """Make prompts no two of which begin alike, so that no prefix is reused.

        Args:
            count: how many.
            tokens: of each at most, with those that the tokenizer puts in front.
            seed: the same one makes the same prompts.
        """
        tokenizer, chance = self.tokenizer, random.Random(seed)
        words, around = Words(tokenizer), len(tokenizer.encode("").ids)
        return [words.text(max(1, tokens - around), chance) for _ in range(count)]

    @property
    def gate(self) -> Gate:
        """The budgets of the recipe; the usual ones where it has none."""
        return self.recipe.quantization.gate or Gate()

    def client(self, model: str | None = None) -> Client:
        """Make a client of the server, with its chat template.

        Args:
            model: Triton model to ask; None for the one that clients ask.
        """
        asked = model or self.deployment.entry_model
        return Client(self.up.record.target, model=asked, template=self.template, timeouts=TIMEOUTS)

    def sampling(self, **given: Any) -> Sampling:
        """Greedy sampling of an answer of exactly `max_tokens`, as far as the model takes that.

        Args:
            **given: further parameters; None leaves one out.
        """
        with self.client() as client:
            inputs = client.model().inputs
        sampling: dict[str, Any] = {"temperature": 0.0, **given}
        tokens = sampling.get("max_tokens")
        if inputs.keys() & {"min_tokens", "min_length"} and tokens:
            sampling["min_tokens"] = tokens
        return sampling  # type: ignore[return-value]

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompts that are measured with."""
        return self.options.prompt_tokens or min(1024, self.deployment.limits.max_input_tokens)

    @property
    def output_tokens(self) -> int:
        """Length of the answers that are measured."""
        return self.options.output_tokens or min(128, self.deployment.limits.max_output_tokens)

    @property
    def separate_draft(self) -> bool:
        """Whether the draft is a model of its own, that a request can do without."""
        return self.deployment.limits.max_draft_tokens > 0 and DRAFT_MODEL in self.deployment.models

    @property
    def undrafted(self) -> dict[str, int]:
        """What a request says to be answered without the draft."""
        return {"num_draft_tokens": 0} if self.separate_draft else {}


def questions(count: int) -> list[list[Message]]:
    """First turns of the packaged held-out dialogues, as chat messages.

    Args:
        count: how many; there are 320.
    """
    file = resources.folder("calibration") / "support" / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [[json.loads(line)["messages"][0]] for line in lines]
