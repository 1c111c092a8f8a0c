"""State of one streamed answer: messages of the server in, chunks and statistics out.

It does no I/O and knows no threads: `Stream` and `AsyncStream` read the connection and hand over each message, so that
both give the same chunks, figures and errors. Written against Triton 24.10 (gRPC, `triton_final_response`) and
TensorRT-LLM 1.0 to 1.2.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from pipeline.client.answer import (
    Answer,
    Chunk,
    FinishReason,
    PartialAnswer,
    PromptLogProbs,
    Stats,
    TopLogProbs,
    timing,
)
from pipeline.client.errors import (
    ClientError,
    Refused,
    ServerFailed,
    ServerLost,
    error_from_message,
    error_from_status,
    lost,
)
from pipeline.client.layout import MessageLayout
from pipeline.client.log_probs import TopLogProbsRequest, read_rows
from pipeline.client.request import (
    ARRIVAL,
    FIRST_TOKEN,
    LOG_PROB_ROWS,
    LOG_PROB_ROWS_IDS,
    LOG_PROBS,
    LOGITS,
    PROMPT_LOG_PROBS,
    PROMPT_LOG_PROBS_IDS,
    REUSED_BLOCKS,
    SCHEDULED,
    TOKEN_IDS,
)
from pipeline.client.tensors import ModelSignature, decode_bytes, decode_numbers

_FINAL, _TEXT, _OUTPUT_COUNT = "triton_final_response", "text_output", "num_output_tokens"
# Outputs whose contents alone do not say enough, or that only few messages have.
_PARSED = frozenset(
    (
        LOG_PROBS,
        LOG_PROB_ROWS,
        LOG_PROB_ROWS_IDS,
        LOGITS,
        PROMPT_LOG_PROBS,
        PROMPT_LOG_PROBS_IDS,
        "finish_reason",
    )
)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class StreamState:
    """State of one answer, from sending the request to its end."""

    def __init__(
        self,
        model: ModelSignature,
        *,
        url: str,
        request_id: str,
        max_tokens: int | None,
        top_log_probs: TopLogProbsRequest | None = None,
        prior: PartialAnswer | None = None,
        sent_at: float | None = None,
    ) -> None:
        """`sent_at`: when the request was first sent, by `time.perf_counter()`; None is now."""
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._model = model
        self._url = url
        self._max_tokens = max_tokens
        self._top_log_probs_request = top_log_probs
        # A chunk may end within a character.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Output received before an answer was resumed, which counts as its beginning.
        prior = prior or PartialAnswer((), "")
        self._prior_tokens = len(prior.token_ids)
        self._texts = [prior.text]
        # Of a cumulative model: the text that has been handed on, and its end that may still change.
        self._stable, self._unstable = prior.text, ""
        self._token_ids = list(prior.token_ids)
        self._log_probs: list[float] = []
        self._top_log_probs: list[TopLogProbs] = []
        # Rows [tokens, 1 + k] of both outputs of `PROMPT_LOG_PROBS`, until both have come.
        self._prompt_rows: dict[str, list[tuple[float, ...]]] = {}
        self._prompt_log_probs: PromptLogProbs | None = None
        # Datatype and content, decoded when asked for. `num_output_tokens` comes with each response or once at the end.
        self._counts: dict[str, tuple[str, bytes]] = {}
        self._output_counts: list[bytes] = []
        self._output_count_type = ""
        self._server_reason = ""
        # Of the last message that was parsed: what others are compared with, and its tensors' names and datatypes.
        self._layout: MessageLayout | None = None
        self._tensors: tuple[tuple[str, str], ...] = ()
        self._index = 0
        self._sent_at = time.perf_counter() if sent_at is None else sent_at
        # When responses with content came.
        self._times: list[float] = []
        self._ended_at: float | None = None

    @property
    def started(self) -> bool:
        """Whether any content has come."""
        return bool(self._times)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def receive(self, raw: bytes) -> Chunk | None:
        """Take in a message, a `ModelStreamInferResponse`; return its chunk, or None if it brings nothing new.

        Raises:
            ClientError: the server reports an error, or the bytes are no message.
        """
        layout = self._layout
        if layout is not None and (contents := layout.contents(raw)) is not None:
            return self._receive_alike(contents)
        try:
            message = pb.ModelStreamInferResponse.FromString(raw)
        except DecodeError as error:
            raise self.fail(
                ServerFailed(f"{self._url}: sent what is no message of an inference: {error}")
            ) from None
        chunk = self._receive_parsed(message)
        if not self.finished:
            tensors = {tensor.name: tensor.datatype for tensor in message.infer_response.outputs}
            if tensors.keys().isdisjoint(_PARSED):
                self._layout, self._tensors = MessageLayout.of(raw, message), tuple(tensors.items())
        return chunk

    def _receive_alike(self, contents: Sequence[bytes]) -> Chunk | None:
        """Take in the contents of a message like the one before, which is not the last and has no error."""
        self._times.append(time.perf_counter())
        text, token_ids = "", None
        for (name, datatype), raw in zip(self._tensors, contents, strict=True):
            if name == _TEXT:
                text = self._new_text(raw)
            elif name == TOKEN_IDS:
                token_ids = self._new_token_ids(datatype, raw)
            elif name == _OUTPUT_COUNT:
                self._output_counts.append(raw)
            else:
                self._counts[name] = (datatype, raw)
        if not text and not token_ids:
            return None
        self._texts.append(text)
        self._index += 1
        return Chunk(text, self._index - 1, None, token_ids)

    def _receive_parsed(self, message: pb.ModelStreamInferResponse) -> Chunk | None:
        response = message.infer_response
        if message.error_message:
            # Messages that come from a model have the mark, set or not; those of Triton's admission have none.
            at_admission = _FINAL not in response.parameters
            raise self.fail(
                error_from_message(
                    message.error_message,
                    url=self._url,
                    at_admission=at_admission,
                    inputs=self._model.inputs,
                    started=self.started,
                )
            )
        now = time.perf_counter()
        tops: tuple[TopLogProbs, ...] | None = None
        text, token_ids, log_probs, logits = "", None, None, None
        rows: dict[str, list[tuple[float, ...]]] = {}
        prompt_log_probs: PromptLogProbs | None = None
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            name = tensor.name
            if name == _TEXT:
                text = self._new_text(raw)
            elif name == LOG_PROBS:
                log_probs = decode_numbers(tensor.datatype, raw)
                self._log_probs += log_probs
            elif name in (LOG_PROB_ROWS, LOG_PROB_ROWS_IDS):
                rows[name] = read_rows(tensor, raw)
            elif name == LOGITS:
                logits = tensor.datatype, raw
            elif name == TOKEN_IDS:
                token_ids = self._new_token_ids(tensor.datatype, raw)
            elif name == "finish_reason":
                self._server_reason = b"".join(decode_bytes(raw)).decode(errors="replace")
            elif name == _OUTPUT_COUNT:
                self._output_counts.append(raw)
                self._output_count_type = tensor.datatype
            elif name in (PROMPT_LOG_PROBS, PROMPT_LOG_PROBS_IDS):
                prompt_log_probs = self._new_prompt_log_probs(name, tensor, raw)
            else:
                self._counts[name] = (tensor.datatype, raw)
        # False where there is no mark.
        final = response.parameters[_FINAL].bool_param
        if len(rows) == 2:
            log_probs, tops = self._new_log_probs(rows[LOG_PROB_ROWS], rows[LOG_PROB_ROWS_IDS])
        content = bool(text or token_ids or log_probs or prompt_log_probs)
        if content or not final or not self._times:
            self._times.append(now)
        if final:
            text += self._unstable + self._utf8.decode(b"", final=True)
            self._ended_at = now
            self.finish_reason = self._reason()
        elif not content:
            return None
        self._texts.append(text)
        self._index += 1
        if logits is not None and log_probs and self._top_log_probs_request is not None:
            tops = self._top_log_probs_request.read(*logits, len(log_probs))
            self._top_log_probs += tops
        return Chunk(
            text,
            self._index - 1,
            self.finish_reason,
            token_ids,
            log_probs,
            top_log_probs=tops,
            prompt_log_probs=prompt_log_probs,
        )

    def ended_early(self) -> ClientError:
        """Return the error to raise when the server ends the call without an error, but before the final response."""
        if self.started:
            return self.fail(ServerLost("the answer broke off: the server closed it before its end"))
        return self.fail(lost("the server closed the call", url=self._url, started=False))

    def call_failed(self, error: grpc.RpcError) -> ClientError:
        """Return the error to raise when the gRPC call fails."""
        return self.fail(error_from_status(error, url=self._url, started=self.started))

    def fail(self, error: ClientError) -> ClientError:
        """Stop the clock; return the error with the id of this request, and with how much of the answer had come."""
        self._ended_at = self._ended_at or time.perf_counter()
        error.request_id, error.url, error.text = self.request_id, self._url, self.text
        if isinstance(error, ServerLost) and self._token_ids:
            error.partial = PartialAnswer(tuple(self._token_ids), self.text)
        if self.started and not isinstance(error, Refused):
            count = len(self._times)
            came = f"{count} chunk{'' if count == 1 else 's'} of the answer, {len(error.text)} characters"
            error.args = (f"{error} (after {came})",)
        return error

    def stats(self) -> Stats:
        """Return timing and token counts so far."""
        input_tokens = self._count("num_input_tokens")
        return Stats(
            **timing(self._sent_at, self._times, self._ended_at),
            # The server counts the output before the resumption among them.
            input_tokens=None if input_tokens is None else input_tokens - self._prior_tokens,
            output_tokens=self._output_tokens(),
            draft_tokens=self._count("total_draft_tokens"),
            accepted_tokens=self._count("total_accepted_draft_tokens"),
            queue_ms=self._between_ms(ARRIVAL, SCHEDULED),
            prefill_ms=self._between_ms(SCHEDULED, FIRST_TOKEN),
            cached_tokens=self._cached_tokens(),
        )

    def answer(self) -> Answer:
        """Return the complete answer, once `finished`."""
        assert self.finish_reason is not None
        return Answer(
            text=self.text,
            finish_reason=self.finish_reason,
            stats=self.stats(),
            request_id=self.request_id,
            token_ids=tuple(self._token_ids) if self._token_ids else None,
            log_probs=tuple(self._log_probs) if self._log_probs else None,
            top_log_probs=tuple(self._top_log_probs) if self._top_log_probs else None,
            prompt_log_probs=self._prompt_log_probs,
        )

    def _new_log_probs(
        self, rows: Sequence[tuple[float, ...]], ids: Sequence[tuple[float, ...]]
    ) -> tuple[tuple[float, ...], tuple[TopLogProbs, ...] | None]:
        """Return what is new of rows that repeat the tokens so far: own log probabilities, and the most probable."""
        new = slice(len(self._log_probs), None)
        own = tuple(row[0] for row in rows[new])
        self._log_probs += own
        if self._top_log_probs_request is None:
            return own, None
        tops = tuple(
            tuple((int(token), value) for token, value in zip(tokens[1:], row[1:], strict=True) if token >= 0)
            for tokens, row in zip(ids[new], rows[new], strict=True)
        )
        self._top_log_probs += tops
        return own, tops

    def _new_prompt_log_probs(self, name: str, tensor: Any, raw: bytes) -> PromptLogProbs | None:
        """Take one of both outputs in; once both have come, return what they say."""
        self._prompt_rows[name] = read_rows(tensor, raw)
        if len(self._prompt_rows) < 2:
            return None
        ids, log_probs = self._prompt_rows[PROMPT_LOG_PROBS_IDS], self._prompt_rows[PROMPT_LOG_PROBS]
        rows = [
            tuple(zip(map(int, tokens), values, strict=True))
            for tokens, values in zip(ids, log_probs, strict=True)
        ]
        # Nothing comes before the first token that could tell its probability.
        self._prompt_log_probs = PromptLogProbs(
            token_ids=tuple(row[0][0] for row in rows),
            log_probs=(None, *(row[0][1] for row in rows[1:])),
            top_log_probs=((), *(row[1:] for row in rows[1:])),
        )
        return self._prompt_log_probs

    def _new_token_ids(self, datatype: str, raw: bytes) -> tuple[int, ...]:
        token_ids = tuple(int(token) for token in decode_numbers(datatype, raw))
        if self._model.cumulative:
            token_ids = token_ids[len(self._token_ids) :]
        self._token_ids += token_ids
        return token_ids

    def _new_text(self, raw: bytes) -> str:
        values = decode_bytes(raw)
        if not values:
            return ""
        if not self._model.cumulative:
            return self._utf8.decode(values[0])
        # A character that is not whole yet shows as U+FFFD at the end, and changes later.
        full = values[0].decode(errors="replace")
        stable = full.rstrip("�")
        if self._prior_tokens and len(stable) < len(self._stable) and self._stable.startswith(stable):
            # The model holds back what the server before it did not.
            return ""
        if not stable.startswith(self._stable):
            message = f"model {self._model.name!r} does not repeat the text so far, though its configuration says so"
            raise self.fail(ServerFailed(message))
        new = stable[len(self._stable) :]
        self._stable, self._unstable = stable, full[len(stable) :]
        return new

    def _count(self, name: str) -> int | None:
        return _decode_count(*self._counts[name]) if name in self._counts else None

    def _between_ms(self, start: str, end: str) -> float | None:
        """Time between two points of the server's clock; None where it did not say both, or has no first token yet."""
        started, ended = self._count(start), self._count(end)
        return (ended - started) / 1e6 if started and ended and ended >= started else None

    def _cached_tokens(self) -> int | None:
        """Tokens of the reused blocks. The engine may count a block that is reused in part, or once for each of several
        attention windows, so they are never more than the prompt.
        """
        reused = next((self._count(name) for name in REUSED_BLOCKS if name in self._counts), None)
        if reused is None or self._model.tokens_per_block is None:
            return None
        tokens, prompt = reused * self._model.tokens_per_block, self._count("num_input_tokens")
        return tokens if prompt is None else min(tokens, prompt)

    def _output_tokens(self) -> int | None:
        if self._output_counts:
            if self._output_count_type == "BYTES":
                return self._prior_tokens + sum(_decode_count("BYTES", raw) for raw in self._output_counts)
            # One call for all of them: there may be as many as tokens.
            counts = decode_numbers(self._output_count_type, b"".join(self._output_counts))
            return self._prior_tokens + int(sum(counts))
        return len(self._token_ids) or len(self._log_probs) or None

    def _reason(self) -> FinishReason:
        if self._server_reason:
            return _REASONS.get(self._server_reason, "unknown")
        tokens = self._output_tokens()
        if tokens is None or self._max_tokens is None:
            return "unknown"
        return "length" if tokens >= self._max_tokens else "stop"


def _decode_count(datatype: str, raw: bytes) -> int:
    """Decode a token count; upstream's `llmapi` model writes its figures as text."""
    values = decode_bytes(raw) if datatype == "BYTES" else decode_numbers(datatype, raw)
    return int(values[0]) if values else 0
