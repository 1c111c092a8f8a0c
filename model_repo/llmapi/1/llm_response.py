"""Responses to one request: the LLM's outputs as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from llm_request import LlmRequest
from shared.prompt_log_probs import PromptLogProbTable
from shared.stop_words import overlap
from shared.tensors import Array, response, texts

# Output -> where the LLM API has it in `request_perf_metrics`.
_COUNTS = {
    "kv_cache_reused_block": ("kv_cache_metrics", "num_reused_blocks"),
    "kv_cache_missed_block": ("kv_cache_metrics", "num_missed_blocks"),
    "kv_cache_alloc_new_blocks": ("kv_cache_metrics", "num_new_allocated_blocks"),
    "kv_cache_alloc_total_blocks": ("kv_cache_metrics", "num_total_allocated_blocks"),
    "kv_cache_hit_rate": ("kv_cache_metrics", "kv_cache_hit_rate"),
    "acceptance_rate": ("speculative_decoding", "acceptance_rate"),
    "total_accepted_draft_tokens": ("speculative_decoding", "total_accepted_draft_tokens"),
    "total_draft_tokens": ("speculative_decoding", "total_draft_tokens"),
}
_TIMES = {
    "arrival_time_ns": "arrival_time",
    "first_scheduled_time_ns": "first_scheduled_time",
    "first_token_time_ns": "first_token_time",
    "last_token_time_ns": "last_token_time",
}


class LlmResponses:
    """Makes them, one for each output of the LLM: each repeats the answer so far."""

    def __init__(
        self, wanted: LlmRequest, types: Mapping[str, Any], decode: Callable[[Sequence[int]], str]
    ) -> None:
        """
        Args:
            wanted: The request.
            types: The numpy type of each output that the model declares.
            decode: The LLM's own way to make text of all tokens of an answer.
        """
        self._wanted, self._types = wanted, types
        stops = wanted.sampling.get("stop", ()) if wanted.streaming and not wanted.prior else ()
        self._text = StreamedText(stops, decode) if stops else None
        self._log_probs = None if wanted.log_probs is None else LogProbTable(wanted.log_probs)

    @property
    def stopped_in_text(self) -> bool:
        """Whether a stop word was found in the text alone, so that the engine may not know of it."""
        return self._text is not None and self._text.stopped

    def make(self, output: Any) -> Any:
        """Make the response for one output, a `RequestOutput` of the LLM API."""
        wanted, outputs = self._wanted, output.outputs
        said = [one.text for one in outputs]
        if self._text is not None:
            said = [self._text.take(outputs[0], finished=output.finished)]
        made = {"text_output": texts(said)}
        if wanted.output_ids:
            made["output_ids"] = np.array(outputs[0].token_ids, np.int32)
        if self._log_probs is not None:
            made |= self._log_probs.take(outputs[0].token_ids, outputs[0].logprobs)
        if wanted.alternatives is not None and output.finished:
            made |= _prompt_log_probs(output, wanted.alternatives)
        if wanted.finish_reason:
            made["finish_reason"] = texts([str(one.finish_reason) for one in outputs])
        if wanted.stop_reason:
            made["stop_reason"] = texts([str(one.stop_reason) for one in outputs])
        if wanted.cumulative_logprob:
            sums = [one.cumulative_logprob for one in outputs]
            if None not in sums:  # not counted yet
                made["cumulative_logprob"] = np.array(sums, self._types["cumulative_logprob"])
        metrics = getattr(outputs[0], "request_perf_metrics", None)
        if metrics is not None:
            made |= {
                name: np.array([value], self._types[name])
                for name, value in _measured(metrics)
                if name in self._types
            }
        return response(**made)


class StreamedText:
    """Text of a stream that stop words may end: what may be the beginning of one waits.

    The LLM hands on what its tokens say. Where a stop word is found by its tokens, these are taken out of token_ids,
    but what the first of them had added to the text stays in it; so the text then comes from the tokens.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops, self._decode = stops, decode
        self._shown = ""
        self.stopped = False  # in the text, where the tokens did not

    def take(self, output: Any, *, finished: bool) -> str:
        """The text that may go out, after one more output: never shorter than before."""
        text: str = output.text
        if not finished:
            text = text[: len(text) - max(overlap(text, word) for word in self._stops)]
        elif isinstance(output.stop_reason, str):
            text = self._ended(output.stop_reason, text, output.token_ids)
        if not self._shown.startswith(text):
            self._shown = text
        return self._shown

    def _ended(self, stop: str, text: str, tokens: Sequence[int]) -> str:
        whole = self._decode(tokens)
        if stop in whole:
            self.stopped = True
            return text
        shown = self._shown.rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that was not whole
        return whole if whole.startswith(shown) else text[: len(text) - overlap(text, stop)]


class LogProbTable:
    """A row for each token of an answer: its own log probability, then those of the k most probable tokens there.

    What the LLM does not tell is NaN, with the id -1.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._ids: list[list[int]] = []
        self._values: list[list[float]] = []

    def take(self, tokens: Sequence[int], told: Sequence[Mapping[int, Any]] | None) -> dict[str, Array]:
        """The outputs [tokens, 1 + k], with what the LLM tells of the last tokens of `tokens`."""
        told = told or ()
        count = min(len(told), len(tokens))
        del self._ids[count:], self._values[count:]
        known = len(self._ids)
        for token, entry in zip(tokens[len(tokens) - count + known :], told[known:count], strict=True):
            best = sorted(entry.items(), key=lambda item: -item[1].logprob)[: self._k]
            missing = self._k - len(best)
            own = entry[token].logprob if token in entry else np.nan
            self._ids.append([token, *(id for id, _ in best), *[-1] * missing])
            self._values.append([own, *(one.logprob for _, one in best), *[np.nan] * missing])
        shape = (count, 1 + self._k)
        return {
            "log_probs": np.array(self._values, np.float32).reshape(shape),
            "log_probs_ids": np.array(self._ids, np.int32).reshape(shape),
        }


def _prompt_log_probs(output: Any, alternatives: int) -> dict[str, Array]:
    """Compute them from the logits [tokens, vocabulary] of the prompt.

    Raises:
        RuntimeError: The LLM has not computed all of them.
    """
    table = PromptLogProbTable(output.prompt_token_ids, alternatives)
    logits = output.context_logits
    if logits is not None:
        table.read(logits.reshape(-1, logits.shape[-1]).float().cpu().numpy())
    if not table.complete:
        raise RuntimeError("the LLM has not computed the whole prompt: kv_cache.reuse must be false")
    return {name: array[0] for name, array in table.tensors().items()}


def _measured(metrics: Any) -> Iterator[tuple[str, int | float]]:
    for name, (section, field) in _COUNTS.items():
        yield name, getattr(getattr(metrics, section), field)
    for name, field in _TIMES.items():
        yield name, _nanoseconds(getattr(metrics.timing_metrics, field))


def _nanoseconds(time: timedelta) -> int:
    return round(time / timedelta(microseconds=1)) * 1000
