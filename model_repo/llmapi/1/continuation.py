"""An answer that another server began: the LLM goes on after its tokens, and what comes back is the whole answer.

The LLM takes the tokens that came before for the end of the prompt. It stops at stop words that begin among them, and
its penalties count prompts anyway, but it makes text of new tokens only. So the text is made here, of all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llm_request import LlmRequest
from shared.answer_text import AnswerText
from shared.seeds import call_seed
from shared.tokenizer import TextDecoder


@dataclass(frozen=True, slots=True)
class WholeOutput:
    """The whole answer so far, with the attributes of the LLM API's `CompletionOutput` that a response is made of."""

    text: str
    token_ids: Sequence[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: Sequence[Mapping[int, Any]] = ()  # of the new tokens alone
    request_perf_metrics: Any = None


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The same for `RequestOutput`."""

    outputs: Sequence[WholeOutput]
    finished: bool


class Continuation:
    """The state of one such answer."""

    def __init__(self, wanted: LlmRequest, decoders: Mapping[bool, TextDecoder]) -> None:
        """
        Args:
            wanted: The request, with `prior`.
            decoders: By whether special tokens are left out.
        """
        sampling = wanted.sampling
        self._wanted = wanted
        self._decoder = decoders[bool(sampling.get("skip_special_tokens", True))]
        self._answer = AnswerText(
            self._decoder,
            sampling.get("stop", ()),
            keeps_stop=bool(sampling.get("include_stop_str_in_output", False)),
            prior=wanted.prior,
        )
        self._seen = 0  # new tokens whose text is made

    @property
    def ended(self) -> WholeAnswer | None:
        """The answer, if all of it had come before, but for the word that says so."""
        most = self._wanted.sampling.get("max_tokens")
        if self._answer.stopped:
            return self._whole((), "stop")
        return self._whole((), "length") if most is not None and len(self._wanted.prior) >= most else None

    def rest(self, prompt: Sequence[int]) -> LlmRequest:
        """The request of what is missing; `prompt`: the tokens of the prompt.

        Seeds: the LLM would begin with the random numbers that made the first tokens, so it gets another seed.
        """
        before, sampling = len(self._wanted.prior), dict(self._wanted.sampling)
        if "max_tokens" in sampling:
            sampling["max_tokens"] -= before
        if "min_tokens" in sampling:
            sampling["min_tokens"] = max(0, sampling["min_tokens"] - before)
        if "seed" in sampling:
            sampling["seed"] = call_seed(sampling["seed"], before)
        return replace(self._wanted, prompt=[*prompt, *self._wanted.prior], sampling=sampling)

    def take(self, output: Any) -> WholeAnswer:
        """The whole answer, after one more output of the LLM; it may have ended before the LLM knows."""
        made = output.outputs[0]
        # Where a stop word ends the answer, the LLM takes its tokens back.
        self._answer.push(made.token_ids[self._seen :])
        self._seen = max(self._seen, len(made.token_ids))
        finish_reason = "stop" if self._answer.stopped else made.finish_reason
        return self._whole(made.token_ids, finish_reason, made)

    def _whole(self, new: Sequence[int], finish_reason: str | None, made: Any = None) -> WholeAnswer:
        tokens, stop_reason = [*self._wanted.prior, *new], getattr(made, "stop_reason", None)
        if isinstance(stop_reason, str) and not self._answer.stopped:
            # The engine found the stop word by its tokens. What waits is its beginning.
            text = self._decoder.decode(tokens)
        else:
            if finish_reason is not None:
                self._answer.finish()
            text = self._answer.text
        whole = WholeOutput(
            text=text,
            token_ids=tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            cumulative_logprob=getattr(made, "cumulative_logprob", None),
            logprobs=getattr(made, "logprobs", None) or (),
            request_perf_metrics=getattr(made, "request_perf_metrics", None),
        )
        return WholeAnswer([whole], finished=finish_reason is not None)
