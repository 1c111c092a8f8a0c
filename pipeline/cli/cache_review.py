"""`pipeline cache review`: near hits that were served, side by side, for a person to say which were wrong."""

from __future__ import annotations

import json
import textwrap
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli.cache_target import CacheTarget, of_cache, utc_time
from pipeline.cli.options import Verb, json_option
from pipeline.cli.output import note, output_width, print_json
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.printable import printable
from pipeline.private_files import make_private

if TYPE_CHECKING:
    from pipeline.cache.backend import Backend
    from pipeline.cache.near_hits import NearHit, NearHitLog, Sample

_ANSWER_LINES = 8
# Columns where standard output is no terminal.
_WIDTH = 100
_KEYS = {"w": "wrong", "r": "right", "s": "skip", "q": "quit"}


@click.command(cls=Verb)
@of_cache
@click.option("--limit", default=50, show_default=True, help="Most near hits to show.")
@click.option(
    "--wrong", multiple=True, metavar="ID", help="Mark this one as wrong, and ask nothing. May be repeated."
)
@click.option(
    "--right", multiple=True, metavar="ID", help="Mark this one as right, and ask nothing. May be repeated."
)
@click.option(
    "--pairs",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("pairs.jsonl"),
    show_default=True,
    metavar="FILE",
    help="Where what is marked is added as labelled pairs, for `pipeline cache tune --pairs`.",
)
@json_option
def review(
    target: CacheTarget,
    limit: int,
    wrong: tuple[str, ...],
    right: tuple[str, ...],
    pairs: Path,
    as_json: bool,
) -> None:
    """Show which questions were answered with whose answers, and mark those that were wrong.

    Each near hit is shown with the question that was asked on the left, the one whose answer it got on the right, and
    the answer below. Half of them are drawn at random from all, which tells how many are wrong; the others are the most
    similar ones, among which are the mistakes that no threshold prevents. They come in turns, and each says which it
    is, also in the pairs. Answer with w (wrong), r (right), s (skip) or q (quit). The
    answer of a wrong one is removed, the gateway counts it as false_hit_reported, and what you marked becomes a
    labelled pair. With --json the near hits are listed, and --wrong and --right mark them by their ids:

    \b
        pipeline cache review tiny-cpu
        pipeline cache review tiny-cpu --json
        pipeline cache review tiny-cpu --wrong 3f9a0c --right 77b1
    """
    from pipeline.cache.near_hits import sample_hits

    with target.opened() as backend, target.near_hits() as log:
        hits = list(log.hits(time.time()))
        shown = sample_hits(hits, limit)
        reviewer = _Reviewer(backend, log, pairs)
        if wrong or right:
            _refuse_unknown(hits, wrong, right)
            for is_wrong, ids in ((True, wrong), (False, right)):
                for hit in _chosen(hits, ids):
                    reviewer.mark(hit, wrong=is_wrong)
        elif as_json:
            print_json([_row(hit, sample, backend) for hit, sample in shown])
            return
        else:
            _ask(reviewer, shown, backend)
    if as_json:
        print_json(reviewer.counts())
    else:
        reviewer.say(len(hits))


class _Reviewer:
    """Carries out a person's marks."""

    def __init__(self, backend: Backend, log: NearHitLog, pairs: Path) -> None:
        self._backend, self._log, self._pairs = backend, log, pairs
        self._wrong = self._right = self._removed = 0

    def mark(self, hit: NearHit, sample: Sample | None = None, *, wrong: bool) -> None:
        """Carry out one mark. The pair is written first: it cannot be made again."""
        category = f"review, {sample}" if sample else "review"
        self._write({"a": hit.question.turn, "b": hit.kept, "same": int(not wrong), "category": category})
        # A hit that was only found did no harm: the answer is right for its own question.
        if wrong and not hit.shadow:
            self._removed += self._backend.remove([hit.key])
        self._log.judge(hit, wrong=wrong, now=time.time())
        self._wrong += wrong
        self._right += not wrong

    def counts(self) -> dict[str, object]:
        return {
            "wrong": self._wrong,
            "right": self._right,
            "removed": self._removed,
            "pairs": str(self._pairs),
        }

    def say(self, hits: int) -> None:
        marked = self._wrong + self._right
        note(
            f"{hits} near hits, {self._wrong} marked as wrong and {self._right} as right; "
            f"{self._removed} answers removed"
        )
        if marked:
            note(f"the pairs are in {self._pairs}: pipeline cache tune RECIPE --pairs {self._pairs}")

    def _write(self, pair: dict[str, object]) -> None:
        try:
            make_private(self._pairs, own=False)
            with self._pairs.open("a", encoding="utf-8") as file:
                file.write(json.dumps(pair, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"--pairs {self._pairs}: cannot be written: {error.strerror}") from error


def _ask(reviewer: _Reviewer, shown: Sequence[tuple[NearHit, Sample]], backend: Backend) -> None:
    for number, (hit, sample) in enumerate(shown, 1):
        entry = backend.get(hit.key, time.time())
        head = f"{number} of {len(shown)}, {sample}"
        click.echo(printable(_side_by_side(hit, None if entry is None else entry.text, head)))
        key = click.prompt(
            ", ".join(f"{key} {word}" for key, word in _KEYS.items()),
            type=click.Choice(list(_KEYS)),
            default="s",
            show_choices=False,
        )
        if key == "q":
            return
        if key != "s":
            reviewer.mark(hit, sample, wrong=key == "w")


def _side_by_side(hit: NearHit, answer: str | None, head: str) -> str:
    """Write a near hit in two columns, with its answer below; `head` is such as "1 of 50, random"."""
    width = output_width(_WIDTH)
    half = max(20, (width - 3) // 2)
    columns = [
        [name, *textwrap.wrap(text, half, break_on_hyphens=False)]
        for name, text in (("asked", hit.question.turn), ("answered as", hit.kept))
    ]
    rows = [f"{left.ljust(half)} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    lines = ["(the answer is gone)"] if answer is None else textwrap.wrap(answer, width - 2)
    if len(lines) > _ANSWER_LINES:
        lines = [*lines[:_ANSWER_LINES], "…"]
    title = f"{head}, similarity {hit.similarity:.2f}, id {hit.question.key.hex()[:12]}"
    if hit.shadow:
        title += ", found and not served"
    return "\n".join(["", title, *rows, "", *(f"  {line}" for line in lines), ""])


def _chosen(hits: Iterable[NearHit], ids: Sequence[str]) -> list[NearHit]:
    return [hit for hit in hits if any(_is(hit, id) for id in ids)]


def _refuse_unknown(hits: Sequence[NearHit], wrong: Sequence[str], right: Sequence[str]) -> None:
    """Raise InvalidInput with every id that is not the id of one near hit, or is marked twice."""
    faults = []
    for id in (*wrong, *right):
        count = sum(_is(hit, id) for hit in hits)
        if count != 1:
            faults.append(Fault(f"{count or 'no'} near hits have an id that begins so", where=id))
    marks = [{hit.question.key for hit in _chosen(hits, ids)} for ids in (wrong, right)]
    faults += [Fault("is marked as wrong and as right", where=key.hex()[:12]) for key in marks[0] & marks[1]]
    if faults:
        raise InvalidInput("--wrong, --right", faults)


def _is(hit: NearHit, id: str) -> bool:
    return bool(id) and hit.question.key.hex().startswith(id.lower())


def _row(hit: NearHit, sample: Sample, backend: Backend) -> dict[str, object]:
    entry = backend.get(hit.key, time.time())
    return {
        "id": hit.question.key.hex(),
        "asked": hit.question.turn,
        "stored": hit.kept,
        "similarity": hit.similarity,
        "sample": sample,
        "answer": None if entry is None else entry.text,
        "key": hit.key.hex(),
        "served": utc_time(hit.served),
        "shadow": hit.shadow,
    }
