"""One request and what has come back for it: messages in, chunks out. It does no I/O and knows no thread.

`Stream` and `AsyncStream` read the connection and hand each message to an exchange, so that both give the same chunks,
figures and errors. Written against Triton 24.10 (gRPC, `triton_final_response`) and TensorRT-LLM 0.19 to 1.2.
"""

from __future__ import annotations

import codecs
import time
from itertools import pairwise

import grpc
from tritonclient.grpc import service_pb2 as pb

from pipeline.client import failures, wire
from pipeline.client.chunk import Answer, Chunk, FinishReason
from pipeline.client.errors import ClientError, ServerFailed
from pipeline.client.model import Model
from pipeline.client.request import LOG_PROBS, LOGITS, TOKEN_IDS
from pipeline.client.stats import Stats
from pipeline.client.top_logprobs import Likeliest, TopLogProbs

_FINAL = "triton_final_response"
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class Exchange:
    """State of one answer, from sending to its end."""

    def __init__(
        self,
        model: Model,
        *,
        url: str,
        request_id: str,
        max_tokens: int | None,
        likeliest: Likeliest | None = None,
    ) -> None:
        """`likeliest`: how the logits that come are read, if they were asked for."""
        self.request_id = request_id
        self.finish_reason: FinishReason | None = None
        self._model = model
        self._url = url
        self._max_tokens = max_tokens
        self._likeliest = likeliest
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")  # a chunk may end within a character
        self._texts: list[str] = []
        self._so_far = ""  # of a cumulative model: what has been handed on,
        self._held = ""  # and what may still change
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._top_log_probs: list[TopLogProbs] = []
        self._counts: dict[str, tuple[str, bytes]] = {}  # datatype and content, read when asked for
        self._token_counts: list[tuple[str, bytes]] = []  # of each response, or one at the end
        self._reason = ""
        self._index = 0
        self._sent_at = time.perf_counter()
        self._times: list[float] = []  # of responses with content
        self._ended_at: float | None = None

    @property
    def started(self) -> bool:
        """Whether anything has come."""
        return bool(self._times)

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def sent(self, at: float | None = None) -> None:
        """The request goes out now, or went out first at `at` (`perf_counter`): the clock starts."""
        self._sent_at = time.perf_counter() if at is None else at

    def receive(self, message: pb.ModelStreamInferResponse) -> Chunk | None:
        """The chunk in a message, None if it brings nothing new. ClientError if the server reports one."""
        response = message.infer_response
        if message.error_message:
            # what comes from a model has a mark, set or not; what Triton says at admission has none
            at_admission = _FINAL not in response.parameters
            inputs = self._model.inputs
            raise self.over(
                failures.from_message(message.error_message, at_admission=at_admission, inputs=inputs)
            )
        now = time.perf_counter()
        text, token_ids, log_probs, logits = "", None, None, None
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            name = tensor.name
            if name == "text_output":
                text = self._new_text(raw)
            elif name == LOG_PROBS:
                log_probs = wire.decode_numbers(tensor.datatype, raw)
                self._log_probs += log_probs
            elif name == LOGITS:
                logits = tensor.datatype, raw
            elif name == TOKEN_IDS:
                token_ids = tuple(int(token) for token in wire.decode_numbers(tensor.datatype, raw))
                self._token_ids += token_ids
            elif name == "finish_reason":
                self._reason = b"".join(wire.decode_bytes(raw)).decode(errors="replace")
            elif name == "num_output_tokens":
                self._token_counts.append((tensor.datatype, raw))
            else:
                self._counts[name] = (tensor.datatype, raw)
        final = response.parameters[_FINAL].bool_param  # False where there is no such mark
        content = bool(text or token_ids or log_probs)
        if content or not final or not self._times:
            self._times.append(now)
        if final:
            text += self._held + self._utf8.decode(b"", final=True)
            self._ended_at = now
            self.finish_reason = self._why()
        elif not content:
            return None
        self._texts.append(text)
        self._index += 1
        top_log_probs = self._tops(logits, len(log_probs or ()))
        return Chunk(
            text, self._index - 1, self.finish_reason, token_ids, log_probs, top_log_probs=top_log_probs
        )

    def broken_off(self) -> ClientError:
        """What to raise when the server ends the call without an error, but before the end of the answer."""
        return self.over(ServerFailed("the answer broke off: the server closed it before its end"))

    def broken(self, error: grpc.RpcError) -> ClientError:
        """What to raise for an error of the call."""
        return self.over(failures.from_status(error, url=self._url, started=self.started))

    def over(self, error: ClientError) -> ClientError:
        """Stop the clock; the error, marked as this request's."""
        self._ended_at = self._ended_at or time.perf_counter()
        error.request_id = self.request_id
        return error

    def stats(self) -> Stats:
        """The figures up to now."""
        times = self._times
        ended = self._ended_at
        return Stats(
            ttft_ms=(times[0] - self._sent_at) * 1e3 if times else None,
            itl_ms=tuple((later - earlier) * 1e3 for earlier, later in pairwise(times)),
            total_ms=(ended - self._sent_at) * 1e3 if ended else None,
            chunks=len(times),
            input_tokens=self._count("num_input_tokens"),
            output_tokens=self._output_tokens(),
            draft_tokens=self._count("total_draft_tokens"),
            accepted_tokens=self._count("total_accepted_draft_tokens"),
        )

    def answer(self) -> Answer:
        """The whole answer, once finished."""
        assert self.finish_reason is not None
        return Answer(
            text=self.text,
            finish_reason=self.finish_reason,
            stats=self.stats(),
            request_id=self.request_id,
            token_ids=tuple(self._token_ids) if TOKEN_IDS in self._model.outputs else None,
            log_probs=tuple(self._log_probs) if self._log_probs else None,
            top_log_probs=tuple(self._top_log_probs) if self._top_log_probs else None,
        )

    def _tops(self, logits: tuple[str, bytes] | None, positions: int) -> tuple[TopLogProbs, ...] | None:
        """Of the tokens of one message."""
        if logits is None or self._likeliest is None or not positions:
            return None
        found = self._likeliest.read(*logits, positions)
        self._top_log_probs += found
        return found

    def _new_text(self, raw: bytes) -> str:
        values = wire.decode_bytes(raw)
        if not values:
            return ""
        if not self._model.cumulative:
            return self._utf8.decode(values[0])
        # A character that is not whole yet shows as U+FFFD at the end, and changes later.
        full = values[0].decode(errors="replace")
        stable = full.rstrip("�")
        if not stable.startswith(self._so_far):
            message = f"model {self._model.name!r} does not repeat the text so far, though its configuration says so"
            raise self.over(ServerFailed(message))
        new = stable[len(self._so_far) :]
        self._so_far, self._held = stable, full[len(stable) :]
        return new

    def _count(self, name: str) -> int | None:
        return _number(*self._counts[name]) if name in self._counts else None

    def _output_tokens(self) -> int | None:
        if self._token_counts:
            return sum(_number(*count) for count in self._token_counts)
        return len(self._token_ids) or len(self._log_probs) or None

    def _why(self) -> FinishReason:
        if self._reason:
            return _REASONS.get(self._reason, "unknown")
        tokens = self._output_tokens()
        if tokens is None or self._max_tokens is None:
            return "unknown"
        return "length" if tokens >= self._max_tokens else "stop"


def _number(datatype: str, raw: bytes) -> int:
    """A count; upstream's `llmapi` model writes its figures as text."""
    values = wire.decode_bytes(raw) if datatype == "BYTES" else wire.decode_numbers(datatype, raw)
    return int(values[0]) if values else 0
