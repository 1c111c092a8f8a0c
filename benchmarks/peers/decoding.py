"""One decoder, measured: ours, or a peer, each in a process and an environment of its own.

    python decoding.py WAY FOLDER THREADS        prints a JSON object

WAY is an engine and a form, like `genai:Q8_0`; FOLDER holds the model in that form. Weights are loaded, caches given
and prefix caching switched off by each engine's own interface; all else is its default.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

CPU = Path(__file__).resolve().parents[2] / "pipeline" / "runtimes" / "cpu"
STREAMS = (1, 8, 16)
PROMPT, ANSWER, LONG = 64, 96, 1024  # tokens
# Room for all streams, or for the long prompt.
KV_BLOCKS, BLOCK = 16 * 6, 32
VOCABULARY = 32_000
# Measurements of the first token.
FIRST = 3


class Decoder(Protocol):
    """An engine that has loaded the model.

    Attributes:
        about: Version, threads, and its own words on the processor.
    """

    about: str

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """As many tokens for each prompt, greedily, all prompts at once; none of them was seen before."""


class Ours:
    """The engine of the `cpu` runtime, imported as a package has it, without Triton around it."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        sys.path.insert(0, str(CPU))
        from engine import Engine, EngineSettings

        facts = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        settings = EngineSettings(
            max_concurrency=max(STREAMS),
            kv_blocks=KV_BLOCKS,
            max_draft_tokens=0,
            prefix_caching=False,
            threads=threads,
            precision="f32" if form == "f32" else "auto",
        )
        self._engine = Engine(folder, None, settings)
        precision = self._engine.precisions["target"]
        self.about = f"OpenVINO {facts['openvino']}, {threads} threads that are not pinned, {precision}"

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        from engine import EngineRequest

        answers: list[list[int]] = [[] for _ in prompts]
        running, done = set(range(len(prompts))), threading.Event()

        def take(at: int, output: Any) -> None:
            answers[at] += output.tokens
            if output.finish is not None:
                assert output.error is None, output.error
                running.remove(at)
                if not running:
                    done.set()

        for at, prompt in enumerate(prompts):
            request = EngineRequest(str(at), tuple(prompt), tokens, None)
            self._engine.submit(request, lambda output, at=at: take(at, output))
        done.wait()
        return answers


class GenAI:
    """OpenVINO GenAI: its continuous batching, on what its GGUF reader makes of a file."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks, scheduler.max_num_seqs = KV_BLOCKS, max(STREAMS)
        scheduler.max_num_batched_tokens = LONG  # by default 256, with which the long prompt takes longer
        scheduler.enable_prefix_caching = False
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder / f"{form}.gguf", scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )
        self.about = f"openvino-genai {openvino_genai.get_version()}, {threads} threads, pinned as by default"

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        import openvino
        from openvino_genai import GenerationConfig

        config = GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        asked = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = self._pipeline.generate(asked, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


class LlamaCpp:
    """llama.cpp by its C interface: all streams in one batch, each with its part of the cache, as its batched-bench."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        import llama_cpp

        self._api, self._threads = llama_cpp, threads
        self._silent = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
        llama_cpp.llama_log_set(self._silent, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(bytes(folder / f"{form}.gguf"), settings)
        assert self._model, f"{form}.gguf cannot be read"
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        # A context divides its cache evenly, so that streams and long prompts have one each.
        self._streams = self._context(PROMPT + ANSWER, max(STREAMS))
        self._long = self._context(LONG + 1, 1)
        self._batch = llama_cpp.llama_batch_init(max(STREAMS) * PROMPT, 0, 1)
        system = llama_cpp.llama_print_system_info().decode().strip(" |")
        self.about = f"llama-cpp-python {llama_cpp.__version__}, {threads} threads; {system}"

    def _context(self, length: int, streams: int) -> Any:
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = length * streams, streams, False
        settings.n_batch = max(STREAMS) * PROMPT
        settings.n_threads = settings.n_threads_batch = self._threads
        context = self._api.llama_init_from_model(self._model, settings)
        assert context, "no room for a context"
        return context

    def answer(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        context = self._long if len(prompts[0]) == LONG else self._streams
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        answers: list[list[int]] = [[] for _ in prompts]
        pieces, position = prompts, 0
        for _ in range(tokens):
            self._decode(context, pieces, position)
            position += len(pieces[0])
            shape = (len(prompts), self._vocabulary)
            logits = np.ctypeslib.as_array(self._api.llama_get_logits(context), shape)
            pieces = [[token] for token in logits.argmax(axis=1).tolist()]
            for answer, (token,) in zip(answers, pieces, strict=True):
                answer.append(token)
        return answers

    def _decode(self, context: Any, pieces: list[list[int]], position: int) -> None:
        """Compute the logits after the last token of each piece."""
        batch, at = self._batch, 0
        for sequence, piece in enumerate(pieces):
            for offset, token in enumerate(piece):
                batch.token[at], batch.pos[at] = token, position + offset
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = offset == len(piece) - 1
                at += 1
        batch.n_tokens = at
        failed = self._api.llama_decode(context, batch)
        assert not failed, f"llama_decode gave {failed}"


ENGINES = {"ours": Ours, "genai": GenAI, "llamacpp": LlamaCpp}


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Tokens drawn at random; the special ones are the first six."""
    numbers = random.Random(seed)
    return [[numbers.randrange(6, VOCABULARY) for _ in range(length)] for _ in range(count)]


def measure(decoder: Decoder) -> dict[str, object]:
    """Tokens/s of each number of streams, from all prompts to the last token; seconds to the first of a long one."""
    for streams in STREAMS:  # kernels are compiled for each size
        decoder.answer(prompts(streams, PROMPT, 7), 4)
    decoder.answer(prompts(1, LONG, 8), 1)
    rates: dict[str, float] = {}
    for streams in STREAMS:
        asked = prompts(streams, PROMPT, streams)
        began = time.perf_counter()
        answers = decoder.answer(asked, ANSWER)
        rates[f"tokens_per_s_{streams}"] = streams * ANSWER / (time.perf_counter() - began)
        assert [len(tokens) for tokens in answers] == [ANSWER] * streams
    firsts = []
    for seed in range(FIRST):
        asked = prompts(1, LONG, 100 + seed)
        began = time.perf_counter()
        decoder.answer(asked, 1)
        firsts.append(time.perf_counter() - began)
    return {
        **rates,
        "first_token_s": statistics.median(firsts),
        **memory(),
        "first_tokens": [tokens[0] for tokens in answers],
        "about": decoder.about,
    }


def memory() -> dict[str, float]:
    """Resident memory in MB, and the part of it that is pages of files, which the system may drop and read again."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = {name: int(value) * 1024 / 1e6 for name, value in re.findall(r"(RssFile|VmRSS):\s+(\d+)", status)}
    return {"resident_mb": found["VmRSS"], "of_files_mb": found["RssFile"]}


def main() -> None:
    engine, _, form = sys.argv[1].partition(":")
    print(json.dumps(measure(ENGINES[engine](Path(sys.argv[2]), form, int(sys.argv[3])))))


if __name__ == "__main__":
    main()
