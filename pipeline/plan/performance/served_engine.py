"""A replica of a deployment as its scheduler's simulation sees it: limits, memory, and the times of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.plan.performance.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class PromptBalance:
    """Attention data parallelism with `attention_dp_config.enable_balance`: prompts wait until each rank has one.

    While all ranks generate, prompts are let in when each has one and some steps more have passed, or when a timer ends
    that begins again at each end and each time that prompts are let in (`_balance_adp_requests` in TensorRT-LLM 1.2).

    Attributes:
        timeout_steps: Steps of the timer, `timeout_iters`.
        wait_steps: Steps more when each rank has a prompt, `batching_wait_iters`.
    """

    timeout_steps: int = 50
    wait_steps: int = 10


@dataclass(frozen=True)
class ServedEngine:
    """One replica of a deployment, as its scheduler sees it.

    Attributes:
        name: Name of the deployment.
        times: Times of its engine's steps.
        slots: Requests that it takes at a time.
        blocks: Pages of its KV cache.
        block_tokens: Tokens of a page.
        step_tokens: Most tokens of a step, of all ranks together.
        ranks: Ranks that have requests of their own, each with its part of `step_tokens`. A request goes to the rank
            that has the fewest, and its prompt is computed there.
        chunked: Whether a prompt may be split over steps.
        overlaps: Whether a step is scheduled while the one before runs, so that a request that comes during a step
            begins with the next but one.
        balance: Wait for prompts of other ranks; None: prompts begin with the next step.
        max_prompt: Tokens of the longest prompt.
        gpus: GPUs of a replica.
        request_s: Seconds of a request outside the engine: HTTP, tokens, and their way back.
        admit_s: Seconds from one request to the next, in which a front end hands them over one by one.
        weight_bytes: Bytes of weights that it loads before it is ready.
        ttft_s: Target of the recipe's SLO, for the 95th percentile.
    """

    name: str
    times: StepTimes
    slots: int
    blocks: int
    block_tokens: int = 32
    step_tokens: int = 8192
    ranks: int = 1
    chunked: bool = True
    overlaps: bool = False
    balance: PromptBalance | None = None
    max_prompt: int = 8192
    gpus: int = 1
    request_s: float = 0.0
    admit_s: float = 0.0
    weight_bytes: float = 0.0
    ttft_s: float = 1.0

    @property
    def progress(self) -> float:
        """Tokens that a step brings a sequence."""
        return self.times.progress

    def bundled(self, bundle: int) -> ServedEngine:
        """Let each request stand for several that are alike, and do everything together."""
        if bundle == 1:
            return self
        return replace(
            self,
            times=self.times.bundled(bundle),
            slots=max(1, self.slots // bundle),
            blocks=max(1, self.blocks // bundle),
            step_tokens=max(1, self.step_tokens // bundle),
            ranks=max(1, self.ranks // bundle),
            admit_s=self.admit_s * bundle,
        )

    def prompt_s(self, tokens: int, cached: int = 0, sequences: int = 0, context: float = 0.0) -> float:
        """Seconds of a prompt that shares its steps with sequences that generate.

        Args:
            tokens: Tokens of the prompt.
            cached: Tokens of these that the KV cache has.
            sequences: Sequences that generate.
            context: Tokens that all of them together have behind them.
        """
        seconds, done = self.times.prompt_s, cached
        while done < tokens:
            room = (self.step_tokens - sequences) // self.ranks
            piece = int(min(tokens - done, room)) if self.chunked else tokens - done
            seconds += self.times.mixed(sequences, context, piece, done, piece * (done + piece / 2), piece)
            done += piece
        return seconds

    def requests_per_s(self, prompt: float, answer: float, cached: float = 0.0) -> float:
        """Requests a second of a replica whose slots are all taken all the time.

        Args:
            prompt: Mean tokens of a prompt.
            answer: Mean tokens of an answer.
            cached: Mean tokens of a prompt that the KV cache has.
        """
        context = self.slots * (prompt + answer / 2)
        steps = answer / self.times.progress * self.times.decode(self.slots, context) / self.slots
        beside = self.prompt_s(round(prompt), round(cached), self.slots, context)
        return 1 / (steps + beside - self.times.decode(self.slots, context))
