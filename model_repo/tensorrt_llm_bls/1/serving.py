"""One request, from text to text: its prompt to the engine, the engine's tokens back as they come.

With `stream`, each response has only new text (with `accumulate_tokens`, all text so far). Without, each answer comes
in one response, which begins with the prompt unless `exclude_input_in_output`. A stop word ends the text before it,
even if the engine's tokens do not line up with it.

An answer that another server began goes on after `prior_output_ids`: the engine gets these tokens after those of the
prompt, and what goes out is what follows their text. With `return_output_ids` each response has the tokens since the
one before (with `accumulate_tokens`, all so far), also those whose text waits for more: an answer goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
from draft_target_call import DraftTargetCall
from engine_call import LOG_PROBS, EngineCall, PriorOutput, asked_for
from engine_client import EngineClient
from shared.answer_text import AnswerText
from shared.prompts import PromptEncoder
from shared.refusal import NOT_DECOUPLED, RequestRefused
from shared.tensors import Array, read, read_flag, read_ids, read_texts, required, response, texts
from shared.tokenizer import TextDecoder
from speculation import DraftSettings

_TEXT_ONLY = ("image_input", "image_bytes_input", "image_url_input", "image_sizes_input", "video_bytes_input")
OUTPUT_IDS, PRIOR_OUTPUT_IDS = "output_ids", "prior_output_ids"
_INDEXES = (
    "batch_index",
    "sequence_index",
)  # of the row, and of its returned sequence; left out where all is 0


@dataclass(frozen=True, slots=True)
class ServingContext:
    """State that all requests share."""

    encoder: PromptEncoder
    decoders: Mapping[bool, TextDecoder]  # by whether special tokens are left out
    skip_special_tokens: bool  # unless a request says otherwise
    engine: EngineClient
    speculation: DraftSettings | None  # None: there is no draft model beside the engine
    accumulate_tokens: bool
    exclude_input_in_output: bool  # unless a request says otherwise
    decoupled: bool  # several responses to a request; else one
    context_logits: bool  # the engine returns those of prompts, but no log probabilities of their tokens
    engine_takes_prior_output: bool  # it counts tokens of the answer that came before as its own


class TextRequest:
    """The state of one request; `run` takes one thread, `stop` may be called from another."""

    def __init__(self, request: Any, setup: ServingContext) -> None:
        """Read the request.

        Raises:
            RequestRefused: It asks for something that this model does not do.
        """
        _refuse(request, has_draft=setup.speculation is not None)
        rows = read_texts(request, "text_input") or []
        if not setup.decoupled:
            _refuse_several_responses(request, len(rows))
        stop_words, stop_token_ids = read_texts(request, "stop_words"), read_ids(request, "stop_token_ids")
        self._stream = read_flag(request, "stream")
        self._prior = _prior_output(request, len(rows), streams=self._stream)
        self._prompts = setup.encoder.encode(
            _token_prompts(request, rows) or [row[0] for row in rows],
            prior_output=self._prior,
            stop_words=stop_words,
            bad_words=read_texts(request, "bad_words"),
            bias_words=read_texts(request, "embedding_bias_words"),
            bias_weights=read(request, "embedding_bias_weights"),
            bias_ids=read_ids(request, "logit_bias_token_ids"),
            bias_values=read(request, "logit_bias_values"),
            stop_token_ids=stop_token_ids,
            end_id=read(request, "end_id"),
            pad_id=read(request, "pad_id"),
            table_id=read(request, "prompt_table_extra_id"),
        )
        skip_special_tokens = read_flag(request, "skip_special_tokens", setup.skip_special_tokens)
        self._decoder = setup.decoders[skip_special_tokens]
        self._stop_words = stop_words or [[] for _ in rows]
        self._keeps_stop = read_flag(request, "include_stop_str_in_output")
        # The text of a special token does not go out anyway.
        self._stop_tokens = [frozenset(row) for row in stop_token_ids or [[] for _ in rows]]
        if not skip_special_tokens and read(request, "end_id") is None:
            self._stop_tokens = [row.union(setup.encoder.stop_token_ids) for row in self._stop_tokens]
        self._accumulate = self._stream and setup.accumulate_tokens
        self._send: Callable[[Any], None]
        self._fault: Exception | None = None  # of the thread that brings tokens
        excludes = read_flag(request, "exclude_input_in_output", setup.exclude_input_in_output)
        self._prompt_comes_back = not self._stream and not excludes
        # Row, returned sequence -> answer of each beam.
        self._answers: dict[tuple[int, int], list[AnswerText]] = {}
        # The same -> tokens for the next response; None: they are not asked for.
        self._output: dict[tuple[int, int], list[int]] | None = None
        if read_flag(request, "return_output_ids"):
            _require_stream("return_output_ids", streams=self._stream)
            self._output = {(0, 0): self._prior.copy() if self._accumulate else []}
        if self._prior:
            self._answers[0, 0] = [self._answer_text(0)]
        max_tokens = required(request, "max_tokens")
        is_over = self._all_stopped() or len(self._prior) >= max_tokens.min()
        self._call = None if is_over else self._open(request, setup)
        # Of an answer that was over: what the engine would tell.
        self._counts: dict[str, Array] = {}
        if is_over:
            counts = {
                "num_input_tokens": self._prompts.input_lengths,
                "num_output_tokens": np.zeros((1, 1), np.int32),
            }
            self._counts = {name: counts[name] for name in asked_for(request) if name in counts}

    def stop(self) -> None:
        """End it early, if it has not ended: the engine frees what it holds."""
        if self._call is not None:
            self._call.stop()

    def run(self, send: Callable[[Any], None]) -> None:
        """Send responses as they come, some of them from another thread; the rest is then in `rests`.

        Raises:
            RequestRefused: The engine refused the request, or failed.
        """
        self._send = send
        for tensors in () if self._call is None else self._call.responses():
            if self._fault is None and self._respond(tensors):
                self.stop()
        if self._fault is not None:
            raise self._fault

    def _take(self, tokens: list[int]) -> None:
        """Respond to tokens that come before the engine's next response, in the thread that brings them."""
        if self._fault is None:
            try:
                ends = self._push((0, 0), [tokens], {})
            except Exception as error:
                self._fault, ends = error, True
            if ends:  # other requests wait for this thread
                Thread(target=self.stop, name="stop", daemon=True).start()

    def rests(self) -> Sequence[Any]:
        """Yield the end of a stream: text that waited for more.

        The last of these is to be marked as final: text that does not wait any more ends the answer, and an answer that
        broke off between the two could not go on after it.
        """
        rests = []
        for index, answers in self._answers.items() if self._stream else ():
            pieces = [answer.finish() for answer in answers]
            if any(pieces) or self._counts:
                more = self._indexes(*index) | self._output_ids(index) | self._counts
                rests.append(self._response(answers, pieces, more))
        return rests

    def _open(self, request: Any, setup: ServingContext) -> EngineCall | DraftTargetCall:
        speculation = setup.speculation
        draft_tokens = (
            None
            if speculation is None
            else speculation.draft_tokens(request, self._prompts, prior_output_len=len(self._prior))
        )
        if speculation is None or draft_tokens is None:
            return EngineCall(
                setup.engine,
                request,
                self._prompts,
                context_logits=setup.context_logits,
                vocab_size=setup.encoder.vocab_size,
                prior_output=PriorOutput(len(self._prior), setup.engine_takes_prior_output),
                on_tokens=self._take if self._stream and len(self._prompts.input_ids) == 1 else None,
            )
        return DraftTargetCall(
            setup.engine,
            speculation,
            request,
            self._prompts,
            draft_tokens=draft_tokens,
            prompt_comes_back=self._prompt_comes_back,
            prior_output_len=len(self._prior),
        )

    def _respond(self, tensors: dict[str, Array]) -> bool:
        """Respond to a response of the engine; see `_push`."""
        beams = tensors["output_ids"][0].tolist()  # [beams][tokens], from [1, beams, tokens]
        lengths = tensors["sequence_length"][0].tolist()
        tokens = [ids[:length] for ids, length in zip(beams, lengths, strict=True)]
        return self._push(self._index_of(tensors), tokens, tensors)

    def _push(self, index: tuple[int, int], beams: list[list[int]], tensors: dict[str, Array]) -> bool:
        """Respond to new tokens of each beam, unless nothing of their text is certain yet.

        Returns:
            Whether they end a stream, which the engine does not know.
        """
        answers = self._answers_of(index, len(beams))
        stopped = all(answer.stopped for answer in answers)
        if self._output is not None and not stopped:
            self._output.setdefault(index, []).extend(beams[0])
        assert self._call is not None, "it made these tokens"
        pieces = [answer.push(ids) for answer, ids in zip(answers, beams, strict=True)]
        if not self._stream:
            pieces = [piece + answer.finish() for piece, answer in zip(pieces, answers, strict=True)]
        asked = [name for name in self._call.asked_for if name in tensors]
        if stopped:  # these tokens do not go out, and neither do their probabilities
            asked = [name for name in asked if name not in LOG_PROBS]
        if any(pieces) or asked or not self._stream:
            passed = {name: tensors[name] for name in (*asked, *_INDEXES) if name in tensors}
            self._send(self._response(answers, pieces, passed | self._output_ids(index)))
        ends = self._stream and not stopped and all(answer.stopped for answer in answers)
        return ends and self._all_stopped()

    def _response(self, answers: Sequence[AnswerText], pieces: list[str], passed: dict[str, Array]) -> Any:
        text = [answer.text for answer in answers] if self._accumulate else pieces
        return response(text_output=texts(text), **passed)

    def _output_ids(self, index: tuple[int, int]) -> dict[str, Array]:
        """The tokens since the last response, or all of them, if they are asked for."""
        tokens = None if self._output is None else self._output.get(index)
        if self._output is None or not tokens:
            return {}
        if not self._accumulate:
            del self._output[index]
        return {OUTPUT_IDS: np.array([tokens], np.int32)}

    def _index_of(self, tensors: dict[str, Array]) -> tuple[int, int]:
        row, sequence = (int(tensors[name][0, 0]) if name in tensors else 0 for name in _INDEXES)
        return row, sequence

    def _answers_of(self, index: tuple[int, int], beams: int) -> list[AnswerText]:
        if index not in self._answers:
            self._answers[index] = [self._answer_text(index[0]) for _ in range(beams)]
        return self._answers[index]

    def _answer_text(self, row: int) -> AnswerText:
        length = int(self._prompts.input_lengths[row, 0]) if self._prompt_comes_back else 0
        return AnswerText(
            self._decoder,
            self._stop_words[row],
            self._prompts.input_ids[row, :length].tolist(),
            stop_tokens=self._stop_tokens[row],
            keeps_stop=self._keeps_stop,
            prior=self._prior,
        )

    def _all_stopped(self) -> bool:
        rows = {row for row, _ in self._answers}
        answers = [answer for beams in self._answers.values() for answer in beams]
        return len(rows) == len(self._prompts.input_ids) and all(answer.stopped for answer in answers)

    def _indexes(self, row: int, sequence: int) -> dict[str, Array]:
        needed = {"batch_index": len(self._prompts.input_ids) > 1, "sequence_index": sequence > 0}
        values = {"batch_index": row, "sequence_index": sequence}
        return {name: np.array([[values[name]]], np.int32) for name in _INDEXES if needed[name]}


def _prior_output(request: Any, rows: int, *, streams: bool) -> list[int]:
    """Tokens of the answer that came before; none as a rule."""
    given = read_ids(request, PRIOR_OUTPUT_IDS)
    if given is None or not any(given):
        return []
    _require_stream(PRIOR_OUTPUT_IDS, streams=streams)
    if rows != 1:
        raise RequestRefused(f"{PRIOR_OUTPUT_IDS}: an answer goes on for one prompt, and there are {rows}")
    return given[0]


def _require_stream(name: str, *, streams: bool) -> None:
    if not streams:
        raise RequestRefused(f"{name}: needs stream = true")


def _token_prompts(request: Any, rows: Sequence[Sequence[str]]) -> list[list[int]] | None:
    """Prompts that came as token ids; None where they are texts."""
    prompts = read_ids(request, "prompt_token_ids")
    if prompts is None:
        return None
    if any(text for row in rows for text in row):
        raise RequestRefused("prompt_token_ids: are in place of text_input, which must be empty beside them")
    if len(prompts) != len(rows) or not all(prompts):
        raise RequestRefused("prompt_token_ids: must hold one token or more for each row of text_input")
    return prompts


def _refuse_several_responses(request: Any, rows: int) -> None:
    if read_flag(request, "stream"):
        raise RequestRefused(f"stream = true: {NOT_DECOUPLED}")
    if rows != 1:
        raise RequestRefused(f"text_input: has {rows} prompts, must be one: {NOT_DECOUPLED}")
    sequences = read(request, "num_return_sequences")
    if sequences is not None and (sequences > 1).any():
        raise RequestRefused(f"num_return_sequences = {sequences.flat[0]}: {NOT_DECOUPLED}")


def _refuse(request: Any, *, has_draft: bool) -> None:
    for name in _TEXT_ONLY:
        if read(request, name) is not None:
            raise RequestRefused(f"{name}: this model takes text only")
    if read(request, "decoder_text_input") is not None:
        raise RequestRefused("decoder_text_input: encoder-decoder models are not served by this model")
    required(request, "text_input")
    drafts = read(request, "num_draft_tokens")
    if drafts is not None and (drafts < 0).any():
        raise RequestRefused(f"num_draft_tokens = {drafts.min()}: must be 0 or more")
    if drafts is not None and drafts.any() and not has_draft:
        raise RequestRefused(
            f"num_draft_tokens = {drafts.flat[0]}: there is no draft model beside this one; "
            "where the engine has a draft of its own, it uses it without being asked"
        )
    if read_flag(request, "use_draft_logits") and not has_draft:
        raise RequestRefused("use_draft_logits = true: there is no draft model beside this one")
    max_tokens = required(request, "max_tokens")
    if max_tokens.size == 0 or (max_tokens < 1).any():
        raise RequestRefused(f"max_tokens = {max_tokens.tolist()}: must be 1 or more")
    beams = read(request, "beam_width")
    if beams is not None and (beams > 1).any() and read_flag(request, "stream"):
        raise RequestRefused(
            f"beam_width = {beams.flat[0]}: beams may change places until the end and cannot be streamed"
        )
