"""Freeze the samples to files: what is calibrated on can be read, hashed and used again.

calibration.jsonl and heldout.jsonl hold one {"tokens": […]} a line, never padded; dataset.json says where they come
from. The same inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import SourceError, StageError, UserError
from pipeline.models.chat_template import ChatTemplate, TemplateError
from pipeline.progress import Progress
from pipeline.reading import read_tokenizer, sha256_of
from pipeline.recipe.source import LocalSource, NamedDataset
from pipeline.sources.dataset import HELDOUT, TRAIN, DatasetFiles, resolve_dataset
from pipeline.stages.dataset.rows import DatasetRow, read_rows
from pipeline.store import Json


def freeze(
    dataset: NamedDataset | LocalSource,
    checkpoint_dir: Path,
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    heldout_samples: int,
    into: Path,
    progress: Progress,
) -> dict[str, Json]:
    """Draw, template, tokenize and cut samples, and write them into a folder.

    Args:
        checkpoint_dir: Its tokenizer and chat template are used.
        samples: For calibration.
        max_tokens: Longer rows are cut.
        heldout_samples: For the gate; from the set's held-out split, else from the rows that calibration left.

    Returns:
        Facts for the manifest: name, license, digests, counts and lengths.

    Raises:
        UserError: The set does not exist, cannot be read, or has fewer usable samples than were asked for.
    """
    files = resolve_dataset(dataset)
    encoder = SampleEncoder(checkpoint_dir)
    train = _rows(files, TRAIN)
    calibration = draw(
        train,
        encoder,
        count=samples,
        max_tokens=max_tokens,
        seed=seed,
        purpose="calibration",
        progress=progress,
    )
    has_heldout = HELDOUT in files.paths
    rows = _rows(files, HELDOUT) if has_heldout else train
    heldout = draw(
        rows,
        encoder,
        count=heldout_samples,
        max_tokens=max_tokens,
        seed=seed,
        purpose="held-out",
        without=calibration.samples,
        same_file=not has_heldout,
        progress=progress,
    )
    _check_counts(
        files, [("calibration", samples, calibration, train), ("held-out", heldout_samples, heldout, rows)]
    )
    for name, drawn in (("calibration", calibration), ("heldout", heldout)):
        _write(into / f"{name}.jsonl", drawn.samples)
    facts: dict[str, Json] = {
        "dataset": files.name,
        "license": files.license,
        "files": files.digests(),
        "seed": seed,
        "max_tokens": max_tokens,
        **encoder.facts(),
        "calibration": _facts(into / "calibration.jsonl", calibration),
        "heldout": _facts(into / "heldout.jsonl", heldout),
        "prompt": _prompt(encoder, rows, heldout, max_tokens),
    }
    (into / "dataset.json").write_text(
        json.dumps(facts, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    for name, drawn in (("calibration", calibration), ("held-out", heldout)):
        tokens = sum(len(sample.tokens) for sample in drawn.samples)
        cut = sum(sample.cut for sample in drawn.samples)
        shortened = f", {cut} cut to {max_tokens}" if cut else ""
        progress.say(f"    {name}: {len(drawn.samples)} samples of {files.name}, {tokens} tokens{shortened}")
    return {key: value for key, value in facts.items() if key != "prompt"}


def _rows(files: DatasetFiles, split: str) -> list[DatasetRow]:
    return read_rows(files.paths[split], files.column, files.any_kind)


def _check_counts(files: DatasetFiles, draws: list[tuple[str, int, SampleDraw, list[DatasetRow]]]) -> None:
    problems = []
    for purpose, wanted, drawn, rows in draws:
        if len(drawn.samples) < wanted:
            reasons = "".join(
                f"; {count} passed over: {why}" for why, count in sorted(drawn.passed_over.items())
            )
            problems.append(
                f"  {purpose}: {wanted} samples asked for, {len(drawn.samples)} usable of {len(rows)} rows{reasons}"
            )
    if problems:
        fix = (
            "  Ask for fewer (quantization.calibration.samples, with allow_sample_count: true below 128; "
            "quantization.gate.samples), or give a larger set."
        )
        raise UserError("\n".join([f"data set {files.name} is too small:", *problems, fix]))


def _write(path: Path, samples: list[Sample]) -> None:
    lines = [json.dumps({"tokens": list(sample.tokens)}, separators=(",", ":")) for sample in samples]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_samples(path: Path, vocab: int) -> list[list[int]]:
    """Read frozen samples.

    Args:
        path: calibration.jsonl or heldout.jsonl.
        vocab: Size of the vocabulary.

    Raises:
        StageError: There are none, or one has fewer than two tokens, or tokens beyond the vocabulary.
    """
    samples: list[list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        tokens = json.loads(line)["tokens"]
        if len(tokens) < 2 or not 0 <= min(tokens) <= max(tokens) < vocab:
            raise StageError(f"{path}:{number}: needs two tokens or more, all below {vocab}")
        samples.append(tokens)
    if not samples:
        raise StageError(f"{path} holds no sample")
    return samples


def _facts(path: Path, drawn: SampleDraw) -> dict[str, Json]:
    lengths = sorted(len(sample.tokens) for sample in drawn.samples)
    return {
        "sha256": sha256_of(path),
        "samples": len(lengths),
        "tokens": sum(lengths),
        "shortest": lengths[0],
        "median": lengths[len(lengths) // 2],
        "longest": lengths[-1],
        "cut": sum(sample.cut for sample in drawn.samples),
        "passed_over": dict(sorted(drawn.passed_over.items())),
        "rows": [sample.row for sample in drawn.samples],
    }


def _prompt(
    encoder: SampleEncoder, rows: list[DatasetRow], heldout: SampleDraw, max_tokens: int
) -> dict[str, Json]:
    """A held-out question, for the sample answer that calibration shows."""
    tokens, question, answer = encoder.encode_prompt(rows[heldout.samples[0].row])
    return {"tokens": list(tokens[:max_tokens]), "text": question, "expected": answer}


# One token predicts nothing, and a handful says nothing about activations.
SHORTEST = 8
# Some templates write the date. Theirs stands still, or samples would differ from day to day.
TODAY = datetime(2024, 7, 26)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens of one row, cut to the longest that is wanted."""

    row: int  # 0-based in its file
    tokens: tuple[int, ...]
    cut: bool


@dataclass(slots=True)
class SampleDraw:
    """Samples that were drawn, and how many rows were passed over for which reason."""

    samples: list[Sample] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)


def order(rows: int, seed: int, purpose: str) -> list[int]:
    """Permute the numbers of rows by seed and purpose alone, without any library's generator."""
    return sorted(range(rows), key=lambda row: hashlib.sha256(f"{seed}:{purpose}:{row}".encode()).digest())


def draw(
    rows: Sequence[DatasetRow],
    encoder: SampleEncoder,
    *,
    count: int,
    max_tokens: int,
    seed: int,
    purpose: str,
    without: Iterable[Sample] = (),
    same_file: bool = False,
    progress: Progress,
) -> SampleDraw:
    """Draw samples that all differ, each with a reason for every row that was passed over.

    Args:
        count: Most samples.
        max_tokens: Longer rows are cut.
        seed: Fixes the order of rows, with `purpose`.
        purpose: "calibration" or "held-out".
        without: Samples that are drawn already.
        same_file: `without` comes from the same rows, which are then not taken again.
    """
    without = list(without)
    drawn, known = SampleDraw(), {sample.tokens for sample in without}
    taken = {sample.row for sample in without} if same_file else set()
    with progress.task(f"{purpose} samples", total=count, unit="samples") as task:
        for row in order(len(rows), seed, purpose):
            if len(drawn.samples) == count:
                break
            if row in taken:
                continue
            try:
                tokens = tuple(encoder.encode(rows[row]))
            except TemplateRefusal as refusal:
                drawn.passed_over[str(refusal)] += 1
                continue
            kept = tokens[:max_tokens]
            if len(kept) < SHORTEST:
                drawn.passed_over[f"shorter than {SHORTEST} tokens"] += 1
            elif kept in known:
                drawn.passed_over["the same as another sample"] += 1
            else:
                known.add(kept)
                drawn.samples.append(Sample(row, kept, cut=len(tokens) > max_tokens))
                task.advance()
    return drawn


class TemplateRefusal(UserError):
    """The template does not take these messages (roles that do not alternate, say)."""


class SampleEncoder:
    """The tokenizer and the chat template of one checkpoint.

    Raises:
        SourceError: There is no tokenizer.json, or it cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.exists():
            raise SourceError(
                f"{path} is missing; where a checkpoint has only tokenizer.model, load it with transformers' "
                "AutoTokenizer and call save_pretrained, which writes tokenizer.json"
            )
        self.directory = directory
        self._tokenizer: Any = read_tokenizer(path)
        self._template: ChatTemplate | None = None

    def encode(self, row: DatasetRow) -> list[int]:
        """Encode a whole row.

        Raises:
            TemplateRefusal: The template does not take its messages.
        """
        if row.text is not None:
            return self._tokens(row.text, add_special_tokens=True)
        return self._tokens(self._render(row.messages), add_special_tokens=False)

    def encode_prompt(self, row: DatasetRow) -> tuple[list[int], str, str]:
        """Encode what comes before the last answer of a row.

        Returns:
            Tokens of the prompt, its last message, and the answer of the data set ("" for plain text).
        """
        if row.text is not None:
            tokens = self.encode(row)
            tokens = tokens[: max(2, len(tokens) // 2)]
            return tokens, self.decode(tokens), ""
        ends = [n for n, message in enumerate(row.messages) if message["role"] == "assistant"]
        end = ends[-1] if ends and ends[-1] > 0 else len(row.messages)
        text = self._render(row.messages[:end], add_generation_prompt=True)
        answer = row.messages[end]["content"] if end < len(row.messages) else ""
        return self._tokens(text, add_special_tokens=False), row.messages[end - 1]["content"], answer

    def decode(self, tokens: list[int]) -> str:
        """Decode tokens to text, special tokens left out."""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        try:
            return self.template.render(
                messages, add_generation_prompt=add_generation_prompt, strftime_now=_strftime_today
            )
        except TemplateError as error:
            raise TemplateRefusal(str(error)) from error

    @property
    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            SourceError: There is none, or it cannot be read.
        """
        if self._template is None:
            try:
                self._template = ChatTemplate.from_directory(self.directory).compile()
            except TemplateError as error:
                raise SourceError(
                    f"samples of messages need the checkpoint's chat template, and {error}; give a data set of plain "
                    "text, or mend chat_template.jinja"
                ) from error
        return self._template

    def facts(self) -> dict[str, Json]:
        """Facts of tokenizer and template."""
        facts: dict[str, Json] = {"tokenizer_sha256": sha256_of(self.directory / "tokenizer.json")}
        if self._template is not None:
            facts["template_date"] = TODAY.date().isoformat()
        return facts

    def _tokens(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return tokens


def _strftime_today(pattern: str) -> str:
    return TODAY.strftime(pattern)
