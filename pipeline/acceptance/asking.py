"""Requests to a deployment under test: prompts of a length, many streams at a time, streams that are left, token ids.

`load` measures as the plan computes: so many requests are always in flight, and when one ends the next begins.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import json
import queue
import random
import string
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.client import AsyncClient, ClientError, Message, Sampling, Stats, Timeouts, percentile
from pipeline.client.tensors import read_signature
from pipeline.errors import ServerError
from pipeline.stages.evaluate.engine_answers import EngineAnswer
from pipeline.triton.deployment import TARGET_MODEL

TIMEOUTS = Timeouts(connect_s=30.0, first_token_s=300.0, between_tokens_s=120.0)
_TIMEOUT_S = 300.0
_STREAMS = 8  # of token ids, at a time


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """What streams at a time saw; requests before all were under way are left out."""

    streams: int
    stats: tuple[Stats, ...]
    faults: tuple[str, ...]

    @property
    def ttft_ms(self) -> tuple[float, ...]:
        """Time to first token of each request."""
        return tuple(one.ttft_ms for one in self.stats if one.ttft_ms is not None)

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first, over all requests; 0 where nothing tells it."""
        told = [one.tpot_ms for one in self.stats if one.tpot_ms is not None]
        return sum(told) / len(told) if told else 0.0

    @property
    def itl_p95_ms(self) -> float:
        """Time between two chunks, 95th percentile; 0 without any."""
        gaps = [gap for one in self.stats for gap in one.itl_ms]
        return percentile(gaps, 95) if gaps else 0.0

    @property
    def ttft_p95_ms(self) -> float:
        """Time to first token, 95th percentile; 0 without any."""
        return percentile(self.ttft_ms, 95) if self.ttft_ms else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of all streams together, by Little's law."""
        ended = [one for one in self.stats if one.total_ms and one.output_tokens]
        tokens = sum(one.output_tokens or 0 for one in ended)
        busy_s = sum(one.total_ms or 0.0 for one in ended) / 1e3
        return self.streams * tokens / busy_s if busy_s else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the draft's tokens that were accepted, 0 to 1; None where none was proposed."""
        proposed = sum(one.draft_tokens or 0 for one in self.stats)
        return sum(one.accepted_tokens or 0 for one in self.stats) / proposed if proposed else None

    def as_json(self) -> dict[str, float | int | None]:
        """The figures, rounded."""
        return {
            "streams": self.streams,
            "requests": len(self.stats),
            "failed": len(self.faults),
            "ttft_p50_ms": round(percentile(self.ttft_ms, 50), 3) if self.ttft_ms else None,
            "ttft_p95_ms": round(self.ttft_p95_ms, 3),
            "tpot_ms": round(self.tpot_ms, 3),
            "itl_p95_ms": round(self.itl_p95_ms, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "acceptance": None if self.acceptance is None else round(self.acceptance, 3),
        }


class PromptMaker:
    """Prompts of a given number of tokens, no two of which begin alike, so that no prefix is reused."""

    def __init__(self, tokenizer_dir: Path) -> None:
        """Load the tokenizer of a package.

        Args:
            tokenizer_dir: folder with its tokenizer.json.
        """
        from pipeline.reading import read_tokenizer

        self._tokenizer: Any = read_tokenizer(tokenizer_dir / "tokenizer.json")
        self._random = random.Random(0)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with those that the tokenizer puts in front."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def prompt(self, tokens: int) -> str:
        """Make a text of words at random that has at most so many tokens, and as many as words allow.

        Args:
            tokens: 2 or more.
        """
        words = [
            "".join(self._random.choices(string.ascii_lowercase, k=self._random.randint(1, 6)))
            for _ in range(tokens)
        ]
        fitting = bisect.bisect_right(
            range(1, len(words) + 1), tokens, key=lambda count: len(self.encode(" ".join(words[:count])))
        )
        return " ".join(words[:fitting]) or words[0][0]


async def load(
    url: str,
    model: str,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    streams: int,
    rounds: int,
    seconds: float,
) -> LoadFigures:
    """Keep so many streams under way, and measure them.

    The first answer of each is of another length, so that they do not all end and begin together, and is not counted.

    Args:
        url: gRPC address, host:port.
        model: that is asked.
        prompts: asked in turns.
        sampling: of all requests; with `max_tokens`.
        streams: at a time.
        rounds: requests of each stream that are counted.
        seconds: after which no stream begins another request.
    """
    endless = itertools.cycle(prompts)
    longest = sampling.get("max_tokens") or 1
    counted: list[Stats] = []
    faults: list[str] = []
    until = asyncio.get_running_loop().time() + seconds

    async def ask(client: AsyncClient, given: Sampling) -> Stats | None:
        try:
            async with client.stream(next(endless), **given) as stream:
                async for _ in stream:
                    pass
                return stream.stats
        except ClientError as error:
            faults.append(f"{type(error).__name__}: {error}")
            return None

    async def keep_one(client: AsyncClient, number: int) -> None:
        first = max(1, longest * (number + 1) // streams)
        await ask(client, {**sampling, "max_tokens": first, "min_tokens": None})
        for done in range(rounds):
            if done and asyncio.get_running_loop().time() > until:
                return
            stats = await ask(client, sampling)
            if stats is not None:
                counted.append(stats)

    async with AsyncClient(url, model=model, timeouts=TIMEOUTS) as client, asyncio.TaskGroup() as group:
        for number in range(streams):
            group.create_task(keep_one(client, number))
    return LoadFigures(streams, tuple(counted), tuple(faults))


async def leave_streams(
    url: str, model: str, prompts: Sequence[str], sampling: Sampling, streams: int
) -> int:
    """Begin so many long answers, and leave each after its first text, when all have one.

    Args:
        url: gRPC address, host:port.
        model: that is asked.
        prompts: asked in turns.
        sampling: of all of them.
        streams: how many.

    Returns:
        How many had a first text.
    """
    endless, begun, go = itertools.cycle(prompts), 0, asyncio.Event()

    async def visit(client: AsyncClient) -> None:
        nonlocal begun
        async with client.stream(next(endless), **sampling) as stream:
            async for chunk in stream:
                if chunk.text:
                    begun += 1
                    break
            if begun >= streams:
                go.set()
            await asyncio.wait_for(go.wait(), _TIMEOUT_S)

    async with AsyncClient(url, model=model, timeouts=TIMEOUTS) as client, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(visit(client))
    return begun


def gateway_answer(url: str, model: str, messages: Sequence[Message], max_tokens: int) -> tuple[str, int]:
    """Ask an OpenAI gateway for a greedy streamed answer, with the standard library alone.

    Args:
        url: of the gateway, without /v1.
        model: name of the recipe.
        messages: the chat so far.
        max_tokens: of the answer, at most.

    Returns:
        Its text, and the number of events that had a part of it.

    Raises:
        OSError: nothing answers, or with an error.
        ValueError: the stream is not one of server-sent events with JSON, or has no end.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    parts, ended = list[str](), False
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if ended := line.strip() == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            parts += [choice["delta"].get("content") or "" for choice in event.get("choices", [])]
    if not ended:
        raise ValueError("the stream ended without [DONE]")
    told = [part for part in parts if part]
    return "".join(told), len(told)


def engine_answers(
    url: str, prompts: Sequence[Sequence[int]], *, max_tokens: int, end_id: int, pad_id: int
) -> list[EngineAnswer]:
    """Ask the engine's own model for greedy answers, token ids in and out, as upstream's inflight batcher client does.

    Args:
        url: gRPC address, host:port.
        prompts: token ids of each.
        max_tokens: of an answer.
        end_id: token that ends one.
        pad_id: token that fills up.

    Raises:
        ServerError: a request was refused, or broke off.
    """
    with ThreadPoolExecutor(_STREAMS) as pool:
        asked = (pool.submit(_engine_answer, url, tuple(one), max_tokens, end_id, pad_id) for one in prompts)
        return [one.result() for one in list(asked)]


def _engine_answer(
    url: str, prompt: tuple[int, ...], max_tokens: int, end_id: int, pad_id: int
) -> EngineAnswer:
    from tritonclient import grpc
    from tritonclient.utils import InferenceServerException, np_to_triton_dtype

    values: dict[str, Any] = {
        "input_ids": np.array([prompt], np.int32),
        "input_lengths": np.array([[len(prompt)]], np.int32),
        "request_output_len": np.array([[max_tokens]], np.int32),
        "end_id": np.array([[end_id]], np.int32),
        "pad_id": np.array([[pad_id]], np.int32),
        "runtime_top_k": np.array([[1]], np.int32),
        "streaming": np.array([[False]]),
        "exclude_input_in_output": np.array([[True]]),
        "return_log_probs": np.array([[True]]),
    }
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    client = grpc.InferenceServerClient(url)
    over = False
    try:
        config = read_signature(client.get_model_config(TARGET_MODEL, client_timeout=_TIMEOUT_S).config)
        tensors = []
        for name, value in values.items():
            if name in config.inputs:
                tensor = grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
                tensor.set_data_from_numpy(value)
                tensors.append(tensor)
        wanted = [
            name for name in ("output_ids", "sequence_length", "output_log_probs") if name in config.outputs
        ]
        client.start_stream(lambda result, error: arrived.put((result, error)), stream_timeout=_TIMEOUT_S)
        client.async_stream_infer(
            TARGET_MODEL,
            tensors,
            outputs=[grpc.InferRequestedOutput(name) for name in wanted],
            enable_empty_final_response=True,
        )
        tokens, log_probs = list[int](), list[float]()
        while not over:
            result, error = arrived.get(timeout=_TIMEOUT_S)
            over = error is not None
            if over:
                raise ServerError(f"{TARGET_MODEL} refused a prompt of {len(prompt)} tokens: {error}")
            ids = result.as_numpy("output_ids")
            if ids is not None:
                length = int(result.as_numpy("sequence_length").reshape(-1)[0])
                tokens += ids.reshape(-1)[:length].tolist()
                told = result.as_numpy("output_log_probs")
                log_probs += [] if told is None else told.reshape(-1)[:length].tolist()
            over = result.get_response().parameters["triton_final_response"].bool_param
    except queue.Empty:
        raise ServerError(f"{TARGET_MODEL} gave no answer within {_TIMEOUT_S:g} s") from None
    except InferenceServerException as error:
        raise ServerError(f"{TARGET_MODEL} does not answer: {error}") from None
    finally:
        # As `pipeline.serving.health` does: a request that is cancelled as it ends may stay in Triton 24.10.
        client.stop_stream(cancel_requests=not over)
        client.close()
    return EngineAnswer(prompt, tuple(tokens), tuple(log_probs) or None)
