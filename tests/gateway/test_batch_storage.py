"""Files and batches wherever they lie, in a folder or in PostgreSQL: one contract for both."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cache.encryption import AesGcmCodec
from pipeline.gateway.api.batches import claims, storage
from pipeline.gateway.api.batches.claims import Claim, ClaimLost
from pipeline.gateway.api.batches.objects import BatchObject, FileObject
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from pipeline.gateway.errors import ApiError
from tests.gateway.conftest import opened_place, places
from tests.support.servers import Servers
from tests.support.state_places import StatePlace
from tests.support.waiting import wait_for

CHAT = "/v1/chat/completions"
STRANGE = ("", "file-\0", "\ud800", "batch_" + "x" * 5000, "' OR 1=1 --", "é")


@pytest.fixture(params=places("folder", "postgres"))
def place(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[StatePlace]:
    with opened_place(request.param, tmp_path, servers) as place:
        yield place


def add(kept: BatchStorage, content: bytes = b"{}", tenant: str = "ann") -> FileObject:
    return kept.add_file(tenant, io.BytesIO(content), "in.jsonl")


def batch(kept: BatchStorage, file: FileObject, name: str = "batch_1", tenant: str = "ann") -> BatchObject:
    now = int(time.time())
    made = BatchObject(
        id=name,
        endpoint=CHAT,
        input_file_id=file.id,
        created_at=now,
        expires_at=now + 99,
        metadata={"job": "Canary"},
    )
    return kept.add_batch(tenant, made, None)


def claim(kept: BatchStorage, name: str = "batch_1") -> Claim:
    made = kept.claims.claim("ann", name)
    assert made is not None
    return made


def content(kept: BatchStorage, id: str | None) -> bytes:
    assert id is not None
    with kept.open_content("ann", id) as file:
        return file.read()


def refused(ask: Callable[[], object]) -> tuple[int, str | None]:
    with pytest.raises(ApiError) as error:
        ask()
    return error.value.status, error.value.code


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([0, 1, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 17]),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2**20 + 9)), max_size=8),
)
def test_what_is_read_is_what_was_written(
    place: StatePlace, size: int, reads: list[tuple[float, int]]
) -> None:
    """At any place of a file, by another gateway."""
    first, second = place.first or place.batches(), place.batches() if place.kind == "folder" else place.first
    text = bytes(range(251)) * (size // 251 + 1)
    made = add(first, text[:size])
    assert made.bytes == size
    with (second or first).open_content("ann", made.id) as file:
        for share, length in reads:
            at = int(share * size)
            file.seek(at)
            assert file.read(length) == text[:size][at : at + length]
        file.seek(0)
        assert file.read() == text[:size]
    first.delete_file("ann", made.id)


def test_what_a_tenant_keeps_is_bounded(place: StatePlace) -> None:
    kept = place.batches(StorageLimits(tenant_bytes=4, tenant_files=3, finished=2))

    def run(name: str) -> None:
        batch(kept, first, name)
        held = claim(kept, name)
        kept.claims.add_answers(held, [(0, False, "12")])
        kept.claims.finish(held, "completed")

    first, *_ = [add(kept, b"") for _ in range(3)]
    with pytest.raises(ApiError, match="You have 3 files"):
        add(kept, b"")
    kept.limits = replace(kept.limits, tenant_files=99)
    run("batch_1")
    run("batch_2")
    # One input file, asked again and again, does not fill the disk with outputs.
    with pytest.raises(ApiError, match="Your files have 6 bytes"):
        run("batch_3")
    kept.limits = replace(kept.limits, tenant_bytes=99)
    run("batch_3")
    run("batch_4")
    assert [batch.id for batch in kept.batches("ann", after=None, limit=9)] == [
        "batch_4",
        "batch_3",
        "batch_2",
    ]
    kept.limits = replace(kept.limits, unfinished=1)
    batch(kept, first, "batch_5")
    assert refused(lambda: batch(kept, first, "batch_6")) == (429, "batch_limit")
    assert refused(lambda: kept.delete_file("ann", first.id)) == (409, "file_in_use")


def test_uploads_at_once_do_not_pass_the_bounds(place: StatePlace) -> None:
    gateways = [place.batches(StorageLimits(tenant_bytes=100, tenant_files=8)) for _ in range(2)]

    def upload(number: int) -> bool:
        try:
            add(gateways[number % 2], b"x" * 10)
        except ApiError as error:
            return error.code == "storage_limit"
        return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(upload, range(24))) == 16
    listed = gateways[0].files("ann", after=None, limit=99, newest_first=True, purpose="batch")
    assert len(listed) == 8


def test_tenants_do_not_learn_of_each_other(place: StatePlace) -> None:
    kept = place.batches()
    ours, foreign = add(kept), add(kept, tenant="bob")
    more = add(kept)
    batch(kept, ours)
    batch(kept, foreign, "batch_foreign", tenant="bob")
    batch(kept, ours, "batch_2")
    for id in (foreign.id, *STRANGE):
        for ask in (kept.file, kept.open_content, kept.delete_file):
            assert refused(lambda ask=ask, id=id: ask("ann", id)) == (404, "file_not_found")
        assert not kept.files("ann", after=id, limit=9, newest_first=True, purpose=None)
        assert refused(lambda id=id: batch(kept, ours.model_copy(update={"id": id}), "batch_3")) == (
            404,
            "file_not_found",
        )
    for id in ("batch_foreign", *STRANGE):
        assert refused(lambda id=id: kept.batch("ann", id)) == (404, "batch_not_found")
        assert refused(lambda id=id: kept.change("ann", id, lambda batch: batch)) == (404, "batch_not_found")
        assert not kept.batches("ann", after=id, limit=9)
    assert not kept.files("ann", after=None, limit=9, newest_first=True, purpose="\0")
    assert [
        file.id for file in kept.files("ann", after=ours.id, limit=9, newest_first=False, purpose=None)
    ] == [more.id]
    assert [batch.id for batch in kept.batches("ann", after="batch_2", limit=9)] == ["batch_1"]


def test_one_gateway_runs_a_batch_until_its_claim_ends(
    place: StatePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one that was stopped writes later is refused: nothing is lost, and nothing is there twice."""
    monkeypatch.setattr(claims, "CLAIM_S", 60.0)
    first, second = place.batches(), place.batches()
    batch(first, add(first))
    stopped = claim(first)
    assert (second.claims.claim("ann", "batch_1"), list(second.claims.claimable())) == (None, [])
    first.claims.renew(stopped)
    first.claims.add_answers(stopped, [(0, False, "zero"), (1, True, "one")])
    # From now on nobody renews it.
    monkeypatch.setattr(claims, "CLAIM_S", 0.05)
    first.claims.renew(stopped)
    monkeypatch.setattr(claims, "CLAIM_S", 60.0)
    wait_for(
        lambda: [found.batch.id for found in second.claims.claimable()] == ["batch_1"], "the end of the claim"
    )
    held = claim(second)
    assert held.run > stopped.run
    assert second.claims.answered("batch_1") == {0, 1}
    for write in (
        lambda: first.claims.add_answers(stopped, [(2, False, "late")]),
        lambda: first.claims.change(stopped, lambda found: found),
        lambda: first.claims.finish(stopped, "completed"),
        lambda: first.claims.renew(stopped),
        lambda: first.claims.claimed(stopped),
    ):
        with pytest.raises(ClaimLost):
            write()
    first.claims.release(stopped)
    assert second.claims.claim("ann", "batch_1") is None, "who has lost it gives nothing back"
    # An answer that is there stays.
    second.claims.add_answers(held, [(1, False, "again"), (3, False, "three"), (2, False, "two")])
    ended = second.claims.finish(held, "completed")
    assert ended.request_counts.model_dump() == {"total": 0, "completed": 3, "failed": 1}
    assert content(first, ended.output_file_id) == b"zero\ntwo\nthree\n"
    assert content(first, ended.error_file_id) == b"one\n"
    assert first.batch("ann", "batch_1") == ended
    for late in (stopped, held):
        with pytest.raises(ClaimLost):
            second.claims.finish(late, "completed")
    assert second.claims.claim("ann", "batch_1") is None, "it is over"
    assert len(first.files("ann", after=None, limit=9, newest_first=True, purpose=None)) == 3


def test_a_claim_that_is_given_back_is_free_at_once(place: StatePlace) -> None:
    first, second = place.batches(), place.batches()
    batch(first, add(first))
    held = claim(first)
    first.claims.release(held)
    assert claim(second).run > held.run


def test_losses_of_servers_stay_with_the_batch(place: StatePlace) -> None:
    """Whichever gateway goes on with it, until it is over."""
    first, second = place.batches(), place.batches()
    batch(first, add(first))
    held = claim(first)
    assert [
        kept.claims.count_loss("batch_1", line) for kept, line in ((first, 3), (first, 5), (second, 3))
    ] == [
        1,
        1,
        2,
    ]
    assert second.claims.losses("batch_1") == {3: 2, 5: 1}
    assert first.claims.losses("batch_2") == {}
    first.claims.finish(held, "completed")
    assert second.claims.losses("batch_1") == {}


def test_answers_of_gateways_that_race_are_there_once(place: StatePlace) -> None:
    gateways = [place.batches() for _ in range(4)]
    batch(gateways[0], add(gateways[0]))
    held = claim(gateways[0])

    def answer(number: int) -> None:
        gateways[number % 4].claims.add_answers(
            held, [(line, line % 3 == 0, str(line)) for line in range(number * 10, number * 10 + 300)]
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(answer, range(8)))
    counts = gateways[1].batch("ann", "batch_1").request_counts
    assert (counts.completed, counts.failed) == (246, 124)
    ended = gateways[2].claims.finish(held, "completed")
    assert content(gateways[3], ended.output_file_id).split() == [
        b"%d" % line for line in range(370) if line % 3
    ]


def test_what_is_expired_or_left_behind_is_swept(place: StatePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = place.batches()
    file, used = add(kept), add(kept)
    batch(kept, used)
    batch(kept, file, "batch_over")
    kept.claims.finish(claim(kept, "batch_over"), "failed")
    # Of a process that ended between the bytes of a file and its row.
    kept._place.write("file-unknown", [b"left"])
    kept.sweep()
    assert kept.file("ann", file.id) == file
    with kept._place.open("file-unknown") as left:
        assert left.read() == b"left"
    real = time.time
    monkeypatch.setattr(storage.time, "time", lambda: real() + 31 * 24 * 3600)
    monkeypatch.setattr(storage, "_ABANDONED_S", -1.0)
    kept.sweep()
    assert refused(lambda: kept.file("ann", file.id)) == (404, "file_not_found")
    assert [batch.id for batch in kept.batches("ann", after=None, limit=9)] == ["batch_1"], "it is not over"
    assert content(kept, used.id) == b"{}", "a batch that is not over reads it"
    stored = {used.id}
    if place.kind == "folder":
        assert {path.name for path in (place.folder / "batches" / "contents").iterdir()} == stored
    else:
        assert {row[0] for row in kept._place.read("SELECT DISTINCT file FROM contents")} == stored


@pytest.mark.servers
def test_a_server_sees_nothing_that_was_written(tmp_path: Path, servers: Servers) -> None:
    with opened_place("postgres", tmp_path, servers) as place:
        kept = place.batches(codec=AesGcmCodec(AesGcmCodec.new_secret()))
        file = kept.add_file("ann", io.BytesIO(b"Canary in a file"), "Canary.jsonl")
        batch(kept, file)
        held = claim(kept)
        kept.claims.add_answers(held, [(0, False, "Canary in an answer")])
        assert b"Canary" not in place.raw()
        ended = kept.claims.finish(held, "completed")
        assert b"Canary" not in place.raw()
        assert b"batch_1" in place.raw()
        assert content(kept, ended.output_file_id) == b"Canary in an answer\n"
        assert kept.file("ann", file.id).filename == "Canary.jsonl"
        # Sealed with another key, nothing of it is there; bytes of files cannot be exchanged either.
        other = place.batches(codec=AesGcmCodec(AesGcmCodec.new_secret()))
        assert not other.files("ann", after=None, limit=9, newest_first=True, purpose=None)
        assert refused(lambda: other.batch("ann", "batch_1")) == (404, "batch_not_found")
        with kept._place.transaction("") as execute:
            execute("DELETE FROM contents WHERE file = %s", file.id)
            execute("UPDATE contents SET file = %s WHERE file = %s", file.id, ended.output_file_id)
        assert refused(lambda: content(kept, file.id)) == (503, "storage_failed")


def test_a_folder_of_an_older_gateway_is_gone_on_with(tmp_path: Path) -> None:
    """It has no claims, and texts where now are bytes."""
    place = StatePlace("folder", tmp_path)
    kept = place.batches()
    made = batch(kept, add(kept))
    held = claim(kept)
    kept.claims.add_answers(held, [(0, False, "zero")])
    with kept._place.transaction("") as execute:
        execute("UPDATE batches SET object = CAST(object AS text)")
        execute("UPDATE files SET object = CAST(object AS text)")
        execute("UPDATE answers SET text = CAST(text AS text)")
        for table in ("claims", "losses"):
            execute(f"DROP TABLE {table}")
    kept.close()
    found = place.batches()
    assert found.batch("ann", made.id).input_file_id == made.input_file_id
    held = claim(found)
    found.claims.add_answers(held, [(1, False, "one")])
    assert content(found, found.claims.finish(held, "completed").output_file_id) == b"zero\none\n"
    place.close()
