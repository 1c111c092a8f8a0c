"""LLM and RequestOutput: `async for` over an output gives the same object each time, with more text.

Text and stop words are upstream's (`behaviours` in llm_calls.yaml): in a stream nothing is held back, and what the
first tokens of a stop word added to the text stays there.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, make_dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
import torch

from tensorrt_llm.llmapi import RequestError
from tensorrt_llm.llmapi.llm_utils import Decoding
from tensorrt_llm.release import ATTRIBUTES, VERSION, method, signature
from tensorrt_llm.sampling_params import SamplingParams

# isort: split
# Found by `release`, which knows where it lies.
from pipeline.contracts import llm_args

LETTERS = "abcdefghijklmnopqrstuvwxyz .\n"  # a token each
EMOJI = "emoji"  # a word of a prompt whose answer has characters of several tokens
ENDLESS, SHORT, BREAKS = "endless", "short", "breaks"  # words of a prompt that decide how the answer ends
# Words of a prompt that is answered by the arguments that are not defaults: of SamplingParams, and of the call.
SAMPLING, CALL = "sampling", "the call"
VOCAB_SIZE = 300
OWN_LOG_PROB = -0.25  # of each token of an answer; the alternatives are more probable

CompletionOutput = make_dataclass(
    "CompletionOutput", [(name, Any, None) for name in ATTRIBUTES["CompletionOutput"]]
)


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


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

    @method("LLM.generate_async")
    def generate_async(
        self, inputs: str | list[int], sampling_params: SamplingParams | None, streaming: bool, **others: Any
    ) -> RequestOutput:
        asyncio.get_running_loop()  # upstream's answers come on the loop that asked for them
        if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
            ids, inputs = inputs, self.tokenizer.decode(inputs)
        elif isinstance(inputs, str):
            ids = self.tokenizer.encode(inputs)
        else:
            raise TypeError(f"inputs must be a text or token ids, not {type(inputs).__name__}")
        if not isinstance(streaming, bool):
            raise TypeError(f"streaming must be a bool, not {streaming!r}")
        params = sampling_params or SamplingParams()
        most = self.arguments.get("max_num_tokens")
        if most and len(ids) > most:
            raise RequestError(
                f"The sum of prompt length ({float(len(ids))}), query length (0) should not exceed "
                f"max_num_tokens ({most})"
            )
        if params.guided_decoding is not None and not given_backend(self.arguments):
            raise ValueError("guided_decoding: the LLM was started without guided_decoding_backend")
        defaults = signature("LLM.generate_async").parameters
        changed = {name: value for name, value in others.items() if value != defaults[name].default}
        said = f"{params.changed}" if SAMPLING in inputs else f"{changed}" if CALL in inputs else ""
        output = RequestOutput(inputs, ids, params, streaming, self._status, self.tokenizer, said)
        if params.return_context_logits:
            output.context_logits = context_logits(ids)
        return output

    @method("LLM.shutdown")
    def shutdown(self) -> None:
        self._status.note(shut_down=1)


class Tokenizer:
    """As upstream wraps one: texts to ids, special tokens included, and back."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.letters = [self.encode(letter)[0] for letter in LETTERS]
        self.emoji = self.encode("😀")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
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
        said: str,
    ) -> None:
        for name in ATTRIBUTES["RequestOutput"]:
            setattr(self, name, None)
        self.outputs = [CompletionOutput(index=0, text="", token_ids=[], logprobs=[])]
        self.finished = False
        self.prompt, self.prompt_token_ids = prompt, ids
        self.context_logits: torch.Tensor | None = None
        self._params, self._streaming, self._status, self._said = params, streaming, status, said
        self._tokenizer, self._decoded = tokenizer, list[int]()  # tokens that are in the text of a stream
        self._stops = {word: tokenizer.encode(word, add_special_tokens=False) for word in params.stops}
        self._aborted = self._stopped_in_text = False
        self._steps: asyncio.Queue[Exception | None] = asyncio.Queue()
        self._began = time.monotonic()
        self._engine = asyncio.get_running_loop().create_task(self._run())  # it goes on, whoever reads

    @method("RequestOutput.abort")
    def abort(self) -> None:
        self._status.note(aborted=1)
        self._aborted = True

    @method("RequestOutput.aborted")
    def aborted(self) -> bool:
        return self._aborted

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
            while self._stopped_in_text and not self._aborted and count < self._params.max_tokens:
                await asyncio.sleep(seconds)
                count += 1
                self._status.note(tokens=1)
        except RequestError as error:
            self._steps.put_nowait(error)
        finally:
            self._status.note(active=-1)

    def _step(self, out: Any, count: int) -> None:
        if BREAKS in self.prompt and count > 3:
            raise RequestError("the engine\nran out of luck")
        ids, seed = [*self.prompt_token_ids, *out.token_ids], self._params.seed or 0
        before = len(out.token_ids)
        out.token_ids.append(self._tokenizer.after(ids, seed, emoji=EMOJI in self.prompt))
        self._status.note(tokens=1)
        if self._params.logprobs is not None:
            out.cumulative_logprob = OWN_LOG_PROB * count
            out.logprobs.append(log_probs(out.token_ids[-1], self._params.logprobs))
        self._end_by_tokens(out, count)
        guide = self._params.guided_decoding or self._said
        if guide:  # the form itself, a letter a token
            out.text = f"{guide}"[:count]
        elif self._streaming:
            self._decoded += out.token_ids[before:]
            out.text = self._tokenizer.decode(self._decoded).rstrip("\ufffd")
        else:
            out.text = self._tokenizer.decode(out.token_ids)
        self._end_by_text(out)
        if self.finished and self._params.return_perf_metrics:
            out.request_perf_metrics = self._metrics(count)

    def _end_by_tokens(self, out: Any, count: int) -> None:
        """Stop words match over the border between prompt and answer, but are taken out of the answer alone."""
        both = [*self.prompt_token_ids, *out.token_ids]
        if self._aborted:
            out.finish_reason = "cancelled"
        elif any(both[-len(ids) :] == ids for ids in self._stops.values()):
            out.finish_reason = "stop"
            for word, ids in self._stops.items():
                if out.token_ids[-len(ids) :] == ids:
                    out.stop_reason = word
                    if not self._params.include_stop_str_in_output:
                        out.token_ids = out.token_ids[: -len(ids)]
                    break
        elif SHORT in self.prompt and count == 5:
            out.finish_reason = "stop"
        elif count == self._params.max_tokens:
            out.finish_reason = "length"
        self.finished = out.finish_reason is not None

    def _end_by_text(self, out: Any) -> None:
        for word in self._stops:
            if word in out.text and out.finish_reason != "cancelled":
                end = out.text.index(word)
                out.text = out.text[: end + len(word) if self._params.include_stop_str_in_output else end]
                # The engine does not know of it, if it has not found the word, too.
                self._stopped_in_text = out.finish_reason is None
                self._aborted = VERSION < "1.3"
                out.finish_reason, out.stop_reason, self.finished = "stop", word, True
                break

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


def log_probs(token: int, k: int) -> dict[int, Logprob]:
    """The k most probable tokens, the tokens above this one; then this one."""
    tops = {(token + n) % VOCAB_SIZE: Logprob(-0.01 * n, n) for n in range(1, k + 1)}
    return {**tops, token: Logprob(OWN_LOG_PROB, k + 1)}


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
