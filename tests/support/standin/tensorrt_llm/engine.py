"""LLM and RequestOutput: `async for` over an output gives the same object each time, with more text."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch

from pipeline.contracts import llm_args
from tensorrt_llm.llmapi.llm_utils import Decoding
from tensorrt_llm.sampling_params import SamplingParams

VERSION = os.environ.get("STANDIN_VERSION", "1.2.1")
LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"  # a token each
EMOJI = "emoji"  # a word of a prompt whose answer has characters of several tokens
ENDLESS, SHORT, BREAKS = "endless", "short", "breaks"  # words of a prompt that decide how the answer ends
SAMPLING = (
    "sampling"  # a word of a prompt that is answered by the arguments of SamplingParams that are not defaults
)
VOCAB_SIZE = 300


class RequestError(RuntimeError):
    """What upstream raises where an answer is awaited."""


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    request_perf_metrics: Any = None


class LLM:
    def __init__(self, **arguments: Any) -> None:
        given = dict(arguments)
        self.session = given.pop("_mpi_session", None)
        speculation = given.get("speculative_config")
        if isinstance(speculation, Decoding):
            given["speculative_config"] = speculation.settings
        elif speculation is not None and VERSION < "1.3":
            raise ValueError("speculative_config: extra inputs are not permitted: decoding_type")
        faults = llm_args.check(VERSION, given)
        if faults:
            raise ValueError("; ".join(map(str, faults)))
        drafts = [speculation.settings.get("speculative_model")] if isinstance(speculation, Decoding) else []
        for folder in filter(None, (given["model"], *drafts)):
            for name in ("config.json", "model.safetensors"):
                if not Path(folder, name).is_file():
                    raise ValueError(f"{folder} has no {name}")
        if not Path(given["model"]).is_absolute():
            raise ValueError(f"{given['model']} is not a path, nor a model of the hub")
        self.arguments = given
        self.tokenizer = Tokenizer(Path(given["model"]))
        self._status = _Status(gpus=os.environ.get("CUDA_VISIBLE_DEVICES"))

    def generate_async(
        self, inputs: str | list[int], sampling_params: SamplingParams | None = None, streaming: bool = False
    ) -> RequestOutput:
        asyncio.get_running_loop()  # upstream's answers come on the loop that asked for them
        if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
            ids, inputs = inputs, self.tokenizer.decode(inputs)
        elif isinstance(inputs, str):
            ids = self.tokenizer.encode(inputs)
        else:
            raise TypeError(f"inputs must be a text or token ids, not {type(inputs).__name__}")
        params = sampling_params or SamplingParams()
        length = len(inputs.split()) + params.max_tokens
        if length > self.arguments["max_seq_len"]:
            raise ValueError(
                f"The sum of prompt length and max_tokens ({length}) should not exceed "
                f"max_seq_len ({self.arguments['max_seq_len']})"
            )
        if params.guided_decoding is not None and not given_backend(self.arguments):
            raise ValueError("guided_decoding: the LLM was started without guided_decoding_backend")
        output = RequestOutput(inputs, ids, params, streaming, self._status, self.tokenizer)
        if params.return_context_logits:
            output.context_logits = context_logits(ids)
        return output

    def shutdown(self) -> None:
        self._status.note(shut_down=1)


class Tokenizer:
    """As upstream wraps one: texts to ids, special tokens included, and back."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.letters = [self.encode(letter)[0] for letter in LETTERS]
        self.emoji = self.encode("😀")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def after(self, ids: list[int], seed: int, *, emoji: bool) -> int:
        """The token that follows: chosen by all that came before, and by nothing else."""
        for begun in range(len(self.emoji) - 1, 0, -1):
            if ids[-begun:] == self.emoji[:begun]:
                return self.emoji[begun]
        number = zlib.crc32(f"{ids} {seed}".encode())
        if emoji and number % 4 == 0:
            return self.emoji[0]
        return self.letters[number // 4 % len(self.letters)]


def context_logits(ids: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary]: the next token is most likely the same again, then the one above it."""
    above = (torch.arange(VOCAB_SIZE) - torch.tensor(ids)[:, None]) % VOCAB_SIZE
    return (-above / 8).to(torch.float16)


def given_backend(arguments: dict[str, Any]) -> bool:
    return arguments.get("guided_decoding_backend") is not None


class RequestOutput:
    def __init__(
        self,
        prompt: str,
        ids: list[int],
        params: SamplingParams,
        streaming: bool,
        status: _Status,
        tokenizer: Tokenizer,
    ) -> None:
        self.prompt, self.outputs, self.finished = prompt, [CompletionOutput()], False
        self.prompt_token_ids, self._tokenizer = ids, tokenizer
        self.context_logits: torch.Tensor | None = None
        self._params, self._streaming, self._status = params, streaming, status
        self._aborted = False
        self._steps: asyncio.Queue[Exception | None] = asyncio.Queue()
        self._began = time.monotonic()
        self._engine = asyncio.get_running_loop().create_task(self._run())  # it goes on, whoever reads

    def abort(self) -> None:
        self._status.note(aborted=1)
        self._aborted = True

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        error = await self._steps.get()
        if error is not None:
            raise error
        return self

    async def _run(self) -> None:
        self._status.note(active=1)
        out, seconds, count = self.outputs[0], float(os.environ.get("STANDIN_TOKEN_S", "0.002")), 0
        try:
            while not self.finished:
                await asyncio.sleep(seconds)
                count += 1
                self._step(out, count)
                if self.finished or self._streaming:
                    self._steps.put_nowait(None)
        except RequestError as error:
            self._steps.put_nowait(error)
        finally:
            self._status.note(active=-1)

    def _step(self, out: CompletionOutput, count: int) -> None:
        if BREAKS in self.prompt and count > 3:
            raise RequestError("the engine\nran out of luck")
        ids, seed = [*self.prompt_token_ids, *out.token_ids], self._params.seed or 0
        out.token_ids.append(self._tokenizer.after(ids, seed, emoji=EMOJI in self.prompt))
        guide = self._params.guided_decoding or (SAMPLING in self.prompt and self._params.changed)
        # The form itself, a letter a token; else whole characters.
        text = self._tokenizer.decode(out.token_ids)
        out.text = f"{guide}"[:count] if guide else text.rstrip("\ufffd")
        self._status.note(tokens=1)
        if self._params.logprobs is not None:
            out.cumulative_logprob = -0.25 * count
        self._end(out, count)
        if self.finished and self._params.return_perf_metrics:
            out.request_perf_metrics = self._metrics(count)

    def _end(self, out: CompletionOutput, count: int) -> None:
        found = [word for word in self._params.stops if word in out.text]
        # Stop words match over the border between prompt and answer.
        if not found and (borders := self._stops_over_border(out)):
            out.finish_reason, out.stop_reason = "stop", borders[0]
        if self._aborted:
            out.finish_reason = "cancelled"
        elif found:
            first = min(found, key=out.text.index)
            out.text = out.text[: out.text.index(first)]
            out.finish_reason, out.stop_reason = "stop", first
        elif SHORT in self.prompt and count == 5:
            out.finish_reason = "stop"
        elif count == self._params.max_tokens:
            out.finish_reason = "length"
        self.finished = out.finish_reason is not None
        if not self.finished:
            begun = [word[:n] for word in self._params.stops for n in range(1, len(word))]
            held = max((len(part) for part in begun if out.text.endswith(part)), default=0)
            out.text = out.text[: len(out.text) - held]

    def _stops_over_border(self, out: CompletionOutput) -> list[str]:
        both = self._tokenizer.decode([*self.prompt_token_ids[-40:], *out.token_ids])
        return [word for word in self._params.stops if both.endswith(word)]

    def _metrics(self, count: int) -> Any:
        arrival = timedelta(seconds=self._began)
        now = timedelta(seconds=time.monotonic())
        return SimpleNamespace(
            kv_cache_metrics=SimpleNamespace(
                num_reused_blocks=1,
                num_missed_blocks=2,
                num_new_allocated_blocks=2,
                num_total_allocated_blocks=3,
                kv_cache_hit_rate=0.25,
            ),
            timing_metrics=SimpleNamespace(
                arrival_time=arrival,
                first_scheduled_time=arrival,
                first_token_time=now,
                last_token_time=now,
            ),
            speculative_decoding=SimpleNamespace(
                acceptance_rate=0.75, total_accepted_draft_tokens=3 * count, total_draft_tokens=4 * count
            ),
        )


class _Status:
    """Counters in a file, for the test to read from outside."""

    def __init__(self, gpus: str | None) -> None:
        folder = os.environ.get("STANDIN_STATUS")
        self._path = Path(folder, f"{os.getpid()}.json") if folder else None
        self._lock = threading.Lock()
        of_mpi = sorted(name for name in os.environ if name.startswith(("OMPI_", "PMIX_")))
        self._counts: dict[str, Any] = {"active": 0, "tokens": 0, "aborted": 0, "shut_down": 0}
        self._counts |= {"gpus": gpus, "of_mpi": of_mpi}
        self.note()

    def note(self, **more: int) -> None:
        with self._lock:
            for name, count in more.items():
                self._counts[name] += count
            if self._path is not None:
                draft = self._path.with_suffix(".part")
                draft.write_text(json.dumps(self._counts))
                draft.replace(self._path)
