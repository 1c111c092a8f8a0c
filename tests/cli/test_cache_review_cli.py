"""`pipeline cache review`: what a person sees, and what becomes of what they mark."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.cache.backend import Candidate
from pipeline.cache.entry import CacheEntry, StoredChunk
from pipeline.cache.key import Origin, make_question
from pipeline.cache.near_hits import NEAR_HITS, NearHitLog
from pipeline.cache.sqlite import SqliteBackend
from pipeline.cache.tuning.pairs import Pair, read_pairs
from pipeline.cli.cache import command

HITS = (
    ("How do I turn it off?", "How do I turn it on?", 0.81),
    ("Where's my parcel?", "Where is my parcel?", 0.97),
)


def failed(error: Exception) -> None:
    raise error


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A cache with two answers, each of which was served to a near question."""
    path, now = tmp_path / "cache.db", time.time()
    backend, log = SqliteBackend(path), NearHitLog(SqliteBackend(tmp_path / "cache.near-hits.db", NEAR_HITS))
    for asked, kept, similarity in HITS:
        question = make_question(Origin("d"), kept, {"temperature": 0})
        pieces = [StoredChunk(f"To be told of: {kept}")]
        backend.put(question, CacheEntry.of(pieces, finish_reason="stop", created=now, expires=now + 600))
        near = make_question(Origin("d"), asked, {"temperature": 0})
        log.note(near, Candidate(question.key, kept, similarity), now, failed)
    log.close()
    backend.close()
    return path


@pytest.fixture
def _nearest_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hits of `file` are shown in their order."""
    monkeypatch.setattr(
        "random.sample",
        lambda found, count: sorted(found, key=lambda hit: hit.similarity, reverse=True)[:count],
    )


def run(file: Path, *arguments: str, input: str | None = None) -> Result:
    verb, *rest = arguments
    return CliRunner().invoke(command, [verb, str(file), *rest], input=input)


def listed(file: Path) -> list[dict[str, object]]:
    result = run(file, "review", "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def kept(file: Path) -> list[str]:
    return [row["question"] for row in json.loads(run(file, "show", "--json").stdout)]


def test_each_is_listed_with_its_answer(file: Path) -> None:
    rows = listed(file)
    assert {(row["asked"], row["stored"], row["similarity"]) for row in rows} == set(HITS)
    assert all(row["answer"] == f"To be told of: {row['stored']}" for row in rows)
    assert [row["sample"] for row in rows] == ["most similar", "random"]
    assert len(kept(file)) == 2, "near hits are no answers"


def test_a_random_sample_of_all_comes_in_turns_with_the_most_similar(tmp_path: Path) -> None:
    now = time.time()
    SqliteBackend(tmp_path / "cache.db").close()
    log = NearHitLog(SqliteBackend(tmp_path / "cache.near-hits.db", NEAR_HITS))
    for number in range(60):
        kept = make_question(Origin("d"), f"kept {number}", {"temperature": 0})
        near = make_question(Origin("d"), f"asked {number}", {"temperature": 0})
        log.note(near, Candidate(kept.key, f"kept {number}", 0.9 + number / 1000), now, failed)
    log.close()
    drawn = set()
    for _ in range(20):
        rows = json.loads(run(tmp_path / "cache.db", "review", "--json", "--limit", "9").stdout)
        assert [row["sample"] for row in rows] == [*["most similar", "random"] * 4, "most similar"]
        sample = {row["asked"] for row in rows if row["sample"] == "random"}
        similar = [row["asked"] for row in rows if row["sample"] == "most similar"]
        others = [text for number in range(59, -1, -1) if (text := f"asked {number}") not in sample]
        assert similar == others[:5]
        assert len(sample) == 4
        drawn |= sample
    # That 80 draws out of 60 stay within the nearest half has a chance of 1 in 2 to the 80th.
    assert any(int(text.split()[1]) < 30 for text in drawn)
    page = run(tmp_path / "cache.db", "review", input="q\n").output
    assert "1 of 50, most similar, similarity 0.9" in page


@pytest.mark.usefixtures("_nearest_drawn")
def test_a_person_judges_them_one_by_one(file: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    result = run(file, "review", "--pairs", str(pairs), input="x\nw\nr\n")
    assert result.exit_code == 0, result.output
    assert "How do I turn it off?" in result.output
    assert "To be told of: How do I turn it on?" in result.output
    assert "2 near hits, 1 marked as wrong and 1 as right; 1 answers removed" in result.output
    with pairs.open(encoding="utf-8") as lines:
        assert read_pairs(lines) == [
            Pair("How do I turn it off?", "How do I turn it on?", False, "review, most similar"),
            Pair("Where's my parcel?", "Where is my parcel?", True, "review, random"),
        ]
    assert stat.S_IMODE(pairs.stat().st_mode) == 0o600
    assert kept(file) == ["Where is my parcel?"]
    assert listed(file) == []
    log = NearHitLog(SqliteBackend(tmp_path / "cache.near-hits.db"))
    assert log.take_marks() == 1
    log.close()


def test_who_stops_has_marked_what_they_marked(file: Path, tmp_path: Path) -> None:
    result = run(file, "review", "--pairs", str(tmp_path / "pairs.jsonl"), input="s\nq\n")
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "pairs.jsonl").exists()
    assert len(listed(file)) == 2


@pytest.mark.usefixtures("_nearest_drawn")
def test_marks_without_a_terminal(file: Path, tmp_path: Path) -> None:
    ids = [str(row["id"]) for row in listed(file)]
    pairs = str(tmp_path / "pairs.jsonl")
    marks = ("--wrong", ids[0][:12], "--right", ids[1])
    shown = json.loads(run(file, "review", *marks, "--pairs", pairs, "--json").stdout)
    assert shown == {"wrong": 1, "right": 1, "removed": 1, "pairs": pairs}
    assert [row["same"] for row in map(json.loads, Path(pairs).read_text().splitlines())] == [0, 1]


def test_every_id_that_is_wrong_is_named_and_nothing_is_marked(file: Path, tmp_path: Path) -> None:
    good = str(listed(file)[0]["id"])
    marks = ("--wrong", "zz", "--wrong", good, "--right", good, "--right", "yy")
    result = run(file, "review", *marks, "--pairs", str(tmp_path / "pairs.jsonl"))
    for said in ("zz: no near hits", "yy: no near hits", f"{good[:12]}: is marked as wrong and as right"):
        assert said in str(result.exception)
    assert not (tmp_path / "pairs.jsonl").exists()
    assert len(listed(file)) == 2


@pytest.mark.usefixtures("_nearest_drawn")
def test_an_answer_that_has_gone_meanwhile(file: Path, tmp_path: Path) -> None:
    run(file, "purge", "--only", f"key={listed(file)[0]['key']}", "--yes")
    assert listed(file)[0]["answer"] is None
    result = run(file, "review", "--pairs", str(tmp_path / "pairs.jsonl"), input="w\nq\n")
    assert "(the answer is gone)" in result.output
    assert "0 answers removed" in result.output


def test_purging_the_answers_purges_the_questions(file: Path) -> None:
    assert "2 removed" in run(file, "purge", "--yes").output
    assert listed(file) == []


def test_a_cache_that_never_answered_a_near_question(tmp_path: Path) -> None:
    SqliteBackend(tmp_path / "cache.db").close()
    assert listed(tmp_path / "cache.db") == []
    assert not (tmp_path / "cache.near-hits.db").exists()
