"""Cost of guided decoding: microseconds a token for the mask, and milliseconds a token of the whole engine with it.

    python benchmarks/guided.py [--rounds 5] [--threads 2] [--json]

First the library and our matcher alone, along a text of each form: on the vocabulary of the checked-in pair, and on one
of 128,256 tokens, made of that one's tokens two by two (there is no hub here to take a real one from). "mask" is the
computing of the mask, "lay on" the writing of it over the logits, "go on" the taking of a token. Then the engine on the
checked-in target: the same requests with a form and without, in turns, round by round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.common import markdown
from pipeline.bench.statistics import percentile
from pipeline.progress import Silent
from pipeline.runtimes.cpu.engine import (
    EngineRequest,
    EngineSettings,
    Guide,
    RequestOutput,
    SamplingParams,
    Vocabulary,
)
from pipeline.runtimes.cpu.engine.core import EngineCore
from pipeline.runtimes.cpu.engine.grammars import Grammars
from pipeline.runtimes.cpu.engine.paged_model import PagedModel
from pipeline.runtimes.cpu.ir import build_ir

CHECKPOINT = Path(__file__).resolve().parents[1] / "recipes/checkpoints/support-target"
LARGE, END_ID, TOKENS, STREAMS = 128_256, 2, 96, (1, 8)
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "object", "properties": {"name": {"type": "string"}, "id": {"type": "integer"}}},
        "state": {"enum": ["open", "paid", "sent", "lost"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
                    "count": {"type": "integer"},
                },
                "required": ["sku", "count"],
            },
        },
        "placed": {"type": "string", "format": "date"},
    },
    "required": ["customer", "state", "items", "placed"],
    "additionalProperties": False,
}
ITEMS = [{"sku": f"AB-{number:04}", "count": number} for number in range(6)]
ORDERED = {
    "customer": {"name": "Ada Lovelace", "id": 1815},
    "state": "paid",
    "items": ITEMS,
    "placed": "2026-02-01",
}
# Without white space, as the engine holds JSON.
WRITTEN = json.dumps(ORDERED, separators=(",", ":"))
# Form -> what is asked for, and a text that has it.
FORMS = {
    "any JSON": (Guide("json"), WRITTEN),
    "JSON schema": (Guide("json_schema", json.dumps(ORDER)), WRITTEN),
    "expression": (Guide("regex", r"(\w+, )*\w+\."), "one, two, three, four, five, six, seven, eight."),
    "grammar": (
        Guide("ebnf_grammar", 'root ::= term (("+" | "-") term)*\nterm ::= [0-9]+ | "(" root ")"'),
        "12+(3-4)+56-(7+(8-9))+10",
    ),
}
# Any string of printable characters, so that a guided answer is as long as a free one.
LONG = Guide("json_schema", json.dumps({"type": "string", "minLength": 4 * TOKENS}))


def large(into: Path) -> Path:
    """Write a tokenizer.json of LARGE tokens."""
    content = json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = content["model"]["vocab"]
    words = [token for token in vocab if token.isascii() and len(token) > 1]
    taken = {token["id"] for token in content["added_tokens"]} | set(vocab.values())
    free: Iterator[int] = (id for id in itertools.count() if id not in taken)
    for first, second in itertools.product(words, words):
        if len(taken) + 1 > LARGE:
            break
        if first + second not in vocab:
            vocab[first + second] = next(free)
            taken.add(vocab[first + second])
    path = into / "tokenizer.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def timed(times: list[float], call: Callable[[], Any]) -> Any:
    """Call a function, and append its microseconds."""
    start = time.perf_counter()
    result = call()
    times.append((time.perf_counter() - start) * 1e6)
    return result


def along(path: Path, name: str, rounds: int) -> dict[str, Any]:
    """Measure the costs of one form along its text."""
    guide, text = FORMS[name]
    tokenizer = Tokenizer.from_file(str(path))
    size = tokenizer.get_vocab_size()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    row = np.zeros(size, np.float32)
    compiling, masks, laying, going = ([] for _ in range(4))
    for _ in range(rounds):
        grammars = Grammars(Vocabulary(path, END_ID), size)
        grammars.matcher(Guide("regex", "[a-z]"))  # its process has read the tokenizer then
        matcher = timed(compiling, lambda: grammars.matcher(guide, [END_ID]))  # noqa: B023  called at once
        for token in tokens:
            mask = timed(masks, lambda: matcher.allowed([]))  # noqa: B023
            assert mask[token], (name, token)
            timed(laying, lambda: np.copyto(row, -np.inf, where=~mask))  # noqa: B023
            timed(going, lambda: matcher.append(token))  # noqa: B023
        grammars.close()
        assert matcher.fault is None
    return {
        "form": name,
        "vocabulary": size,
        "compile_ms": statistics.median(compiling) / 1e3,
        "mask_us": statistics.median(masks),
        "mask_p99_us": percentile(masks, 99),
        "lay_on_us": statistics.median(laying),
        "go_on_us": statistics.median(going),
    }


def run(core: EngineCore, streams: int, guide: Guide | None) -> float:
    """Measure the milliseconds of a step, which makes a token for every stream."""
    prompt = tuple(Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode("Where is my parcel?").ids)

    def sink(output: RequestOutput) -> None:
        assert output.error is None, output.error

    for at in range(streams):
        request = EngineRequest(
            str(at), prompt, TOKENS, None, sampling=SamplingParams(top_k=20, seed=at), guide=guide
        )
        matcher = core.grammars.matcher(guide, core.ends(request)) if guide and core.grammars else None
        core.add(request, sink, matcher)
    core.step()  # the prompts
    start, steps = time.perf_counter(), 0
    while not core.idle:
        core.step()
        steps += 1
    return (time.perf_counter() - start) * 1e3 / steps


def engine(rounds: int, threads: int) -> list[dict[str, Any]]:
    """Measure steps with a form and without."""
    with tempfile.TemporaryDirectory() as folder:
        build_ir(CHECKPOINT, Path(folder), progress=Silent())
        settings = EngineSettings(max_concurrency=max(STREAMS), threads=threads)
        model = PagedModel(Path(folder), settings)
        grammars = Grammars(Vocabulary(CHECKPOINT / "tokenizer.json", END_ID), model.vocab_size)
        core = EngineCore(model, None, settings, grammars)
        made: list[dict[str, Any]] = []
        for streams in STREAMS:
            run(core, streams, LONG)
            pairs = [(run(core, streams, None), run(core, streams, LONG)) for _ in range(rounds)]
            free, held = (statistics.median(times) for times in zip(*pairs, strict=True))
            made.append({"streams": streams, "free_ms": free, "guided_ms": held})
        return made


def table(result: Any) -> str:
    """Render the result as Markdown, for the terminal and the page of measurements."""
    forms = [
        (
            row["form"],
            f"{row['vocabulary']:,}",
            f"{row['compile_ms']:.1f} ms",
            f"{row['mask_us']:.0f} µs",
            f"{row['mask_p99_us']:.0f} µs",
            f"{row['lay_on_us']:.0f} µs",
            f"{row['go_on_us']:.0f} µs",
        )
        for row in result["forms"]
    ]
    steps = [
        (row["streams"], f"{row['free_ms']:.2f} ms", f"{row['guided_ms']:.2f} ms") for row in result["engine"]
    ]
    return "\n\n".join(
        (
            markdown(
                ("form", "vocabulary", "to compile", "mask of a token", "p99", "lay on", "go on"), forms
            ),
            markdown(("streams", "a step without a form", "with one"), steps),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = (CHECKPOINT / "tokenizer.json", large(Path(folder)))
        forms = [along(path, name, options.rounds) for path in paths for name in FORMS]
    steps = engine(options.rounds, options.threads)
    result = {"forms": forms, "engine": steps}
    print(json.dumps(result, indent=2) if options.json else table(result))


if __name__ == "__main__":
    main()
