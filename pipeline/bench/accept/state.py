"""State of an acceptance run: its settings, and the results of earlier steps for later ones."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import resources
from pipeline.bench.accept.report import AcceptanceCheck
from pipeline.bench.accept.settings import AcceptSettings
from pipeline.bench.load import Period, run_load
from pipeline.bench.load_settings import Load
from pipeline.bench.result import LevelResult, ServerFigures
from pipeline.bench.summary import summarize
from pipeline.bench.targets import BenchReply, BenchRequest, OpenAITarget, TritonTarget
from pipeline.bench.workload import ScriptedConversation, Words
from pipeline.client import ChatTemplate, Client, Message, Sampling, Timeouts
from pipeline.errors import ServerError
from pipeline.prepare import Prepared
from pipeline.prepare.report import PlanReport
from pipeline.progress import Progress
from pipeline.reading import read_tokenizer
from pipeline.recipe import Gate, Recipe
from pipeline.serving.served import ServedDeployment
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from pipeline.store import Store
from pipeline.triton.deployment import DRAFT_MODEL, Deployment

Checks = Iterator[AcceptanceCheck]
TIMEOUT_S = 300.0  # for each answer
_TIMEOUTS = Timeouts(connect_s=30.0, first_token_s=TIMEOUT_S, between_tokens_s=120.0)
# Gauges of TensorRT-LLM's backend, and of our engine.
REQUESTS, KV_BLOCKS = "nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics"


@dataclass(frozen=True, slots=True)
class DraftedTexts:
    """Answers to the same questions, with the tokens that a draft proposed, and those that were accepted."""

    texts: tuple[str, ...]
    proposed: int
    accepted: int


@dataclass(slots=True)
class AcceptanceRun:
    """Settings of the run, and the results of its steps so far."""

    recipe: Recipe
    store: Store
    settings: AcceptSettings
    progress: Progress
    logs: Path
    allowed: frozenset[str] = frozenset()  # rules of preflight whose errors are let pass
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
        """Deployment of the package. Raises ServerError if there is none."""
        return Deployment.load(self.built)

    @property
    def built(self) -> Path:
        """Folder of the package. Raises ServerError if it was not built."""
        if self.package is None:
            raise ServerError("there is no package: see the step build")
        return self.package

    @property
    def up(self) -> ServedDeployment:
        """The running server. Raises ServerError if there is none."""
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
            tokens: Tokens of each at most, with those that the tokenizer puts in front.
            seed: The same seed makes the same prompts.
        """
        tokenizer, rng = self.tokenizer, random.Random(seed)
        words, around = Words(tokenizer), len(tokenizer.encode("").ids)
        return [words.text(max(1, tokens - around), rng) for _ in range(count)]

    @property
    def gate(self) -> Gate:
        """The budgets of the recipe; the usual ones where it has none."""
        return self.recipe.quantization.gate or Gate()

    def client(self, model: str | None = None) -> Client:
        """Make a client of a Triton model, by default the one that clients ask, with its chat template."""
        model_name = model or self.deployment.entry_model
        return Client(self.up.record.target, model=model_name, template=self.template, timeouts=_TIMEOUTS)

    @property
    def takes_exact_lengths(self) -> bool:
        """Whether a request can ask for a least number of tokens."""
        with self.client() as client:
            return "min_tokens" in client.model().inputs

    def load(
        self,
        streams: int,
        conversations: Iterator[ScriptedConversation],
        period: Period,
        sampling: Sampling,
    ) -> LevelResult:
        """Keep so many streams under way at Triton: when a request ends, the next begins."""

        async def measure() -> LevelResult:
            url, model = self.up.record.target, self.deployment.entry_model
            async with TritonTarget(url, model, None, timeout_s=TIMEOUT_S) as target:
                records = await run_load(
                    target, Load("concurrency", streams), conversations, period, sampling=sampling, seed=0
                )
            return summarize(records, self.recipe.slo, ServerFigures())

        return asyncio.run(measure())

    def ask_gateway(self, messages: Sequence[Message], max_tokens: int) -> BenchReply:
        """Ask the gateway for a greedy streamed answer."""

        async def ask() -> BenchReply:
            url, name = self.up.record.gateway_url, self.recipe.name
            async with OpenAITarget(url, name, timeout_s=TIMEOUT_S) as target:
                return await target.ask(
                    BenchRequest(messages, {"temperature": 0.0, "max_tokens": max_tokens})
                )

        return asyncio.run(ask())

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompts that are measured."""
        return self.settings.load.prompt_tokens or min(1024, self.deployment.limits.max_input_tokens)

    @property
    def output_tokens(self) -> int:
        """Length of the answers that are measured."""
        return self.settings.load.output_tokens or min(128, self.deployment.limits.max_output_tokens)

    @property
    def separate_draft(self) -> bool:
        """Whether the draft is a model of its own, which a request can do without."""
        return self.deployment.limits.max_draft_tokens > 0 and DRAFT_MODEL in self.deployment.models

    @property
    def undrafted(self) -> Sampling:
        """Sampling of requests that are answered without the draft."""
        return {"num_draft_tokens": 0} if self.separate_draft else {}


def questions(count: int) -> list[list[Message]]:
    """Read the first turns of up to 320 packaged held-out dialogues, as chat messages."""
    file = resources.folder("calibration") / "support" / "heldout.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [[json.loads(line)["messages"][0]] for line in lines]
