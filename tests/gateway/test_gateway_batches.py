"""/v1/files and /v1/batches as OpenAI's client uses them: beside online requests, through deaths and a full disk."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from socket import create_connection
from typing import Any

import openai
import pytest
from openai.types import Batch

from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway.api.batches.objects import InputFile
from pipeline.gateway.api.batches.places import BatchFolder
from pipeline.gateway.api.batches.storage import BatchStorage, StorageLimits
from tests.gateway.conftest import Running, Start
from tests.support.http_clients import http, openai_client
from tests.support.scripted_model import Upstream
from tests.support.state_gateway import gateway_process
from tests.support.waiting import wait_for
from tests.support.worker_gateway import worker_gateway

pytestmark = pytest.mark.usefixtures("short_polls")

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "cancelled", "expired")
HANG = Reply([], ending=Ending.HANG)


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"r{index}",
            "method": "POST",
            "url": CHAT,
            "body": {"model": "tiny", "messages": [{"role": "user", "content": f"line{index}."}], **body},
        }
        for index in range(count)
    ]


def upload(client: openai.OpenAI, requests: Sequence[Any]) -> str:
    text = "\n".join(request if isinstance(request, str) else json.dumps(request) for request in requests)
    return client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def create(client: openai.OpenAI, requests: Sequence[Any], **more: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, requests), endpoint=CHAT, completion_window="24h", **more
    )


def wait_until(client: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    wait_for(lambda: client.batches.retrieve(batch.id).status in statuses, f"one of {statuses}", 60)
    return client.batches.retrieve(batch.id)


def answered(client: openai.OpenAI, batch: Batch, count: int) -> None:
    def holds() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= count

    wait_for(holds, f"{count} answers", 60)


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def asked(upstream: Upstream) -> Counter[str]:
    """How often the model was asked each line."""
    return Counter(request.prompt.rpartition("user: ")[2].strip() for request in upstream.requests)


def test_a_batch_from_its_upload_to_its_output(start: Start, tmp_path: Path) -> None:
    running = start(
        Reply(["On", " its way."]), batches=BatchStorage(BatchFolder(tmp_path / "batches")), aliases=("gpt",)
    )
    client = running.client()
    requests = [*lines(3, model="gpt"), *lines(1, model="gpt", temperature=-1)]
    requests[3]["custom_id"] = "refused"
    batch = create(client, requests, metadata={"job": "nightly"})
    assert (batch.status, batch.metadata, batch.output_file_id) == ("validating", {"job": "nightly"}, None)
    done = wait_until(client, batch, *FINAL)
    assert (done.status, done.model, done.errors) == ("completed", "gpt", None)
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 4, "completed": 3, "failed": 1}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at  # type: ignore[operator]
    output, (error,) = read(client, done.output_file_id), read(client, done.error_file_id)
    assert [line["custom_id"] for line in output] == ["r0", "r1", "r2"]
    for line in output:
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        assert line["response"]["body"]["choices"][0]["message"]["content"] == "On its way."
    assert (error["custom_id"], error["response"]["status_code"]) == ("refused", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert len({line["id"] for line in (*output, error)}) == 4
    # Metrics and log have the model's own name.
    assert (
        f'{{adapter="",endpoint="{CHAT}",model="tiny",status="200"}} 3.0'
        in http.get(f"{running.url}/metrics").text
    )


def test_lists_in_pages_and_what_is_deleted_is_gone(start: Start, tmp_path: Path) -> None:
    running = start(batches=BatchStorage(BatchFolder(tmp_path / "batches")))
    client = running.client()
    files = [upload(client, lines(1)) for _ in range(3)]
    batches = [
        client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h").id for file in files
    ]
    assert [batch.id for batch in client.batches.list(limit=2)] == batches[::-1], "all pages"
    assert [file.id for file in client.files.list(limit=2, order="asc", purpose="batch")] == files
    for id in batches:
        wait_until(client, client.batches.retrieve(id), "completed")
    assert client.files.delete(files[0]).deleted
    with pytest.raises(openai.NotFoundError, match="No such File"):
        client.files.content(files[0])
    assert len(list(client.files.list())) == 5
    contents = {path.name for path in (tmp_path / "batches" / "contents").iterdir()}
    assert contents == {file.id for file in client.files.list()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "batches" / "contents").iterdir())


FAULTY = [
    "{",
    *lines(1),
    *lines(1),
    {**lines(1)[0], "custom_id": "url", "url": "/v1/completions"},
    {**lines(1)[0], "custom_id": "other", "body": {"model": "other"}},
    {**lines(1, stream=True)[0], "custom_id": "stream"},
    {"custom_id": "bare"},
]


@pytest.mark.parametrize(
    ("requests", "faults"),
    [
        (
            FAULTY,
            [
                (1, "invalid_json_line", None),
                (3, "duplicate_custom_id", "custom_id"),
                (4, "mismatched_endpoint", "url"),
                (5, "mismatched_model", "body.model"),
                (6, "invalid_request", "body.stream"),
                (7, "invalid_request", "method"),
                (7, "invalid_request", "url"),
                (7, "invalid_request", "body"),
            ],
        ),
        ([""], [(None, "empty_file", None)]),
        (lines(1, model="none"), [(1, "model_not_found", "body.model")]),
    ],
)
def test_a_file_with_faults_fails_with_all_of_them(
    refusing_batches: Running, requests: Sequence[Any], faults: list[Any]
) -> None:
    client = refusing_batches.client()
    failed = wait_until(client, create(client, requests), *FINAL)
    assert (failed.status, failed.output_file_id, failed.error_file_id) == ("failed", None, None)
    assert failed.errors is not None
    assert [(fault.line, fault.code, fault.param) for fault in failed.errors.data or []] == faults


@pytest.fixture(scope="module")
def refusing_batches(shared_start: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with small limits, whose model must never be asked."""
    limits = StorageLimits(file_bytes=100_000, tenant_bytes=250_000)
    running = shared_start(batches=BatchStorage(BatchFolder(tmp_path_factory.mktemp("batches")), limits))
    yield running
    assert not running.upstream.requests


def test_what_cannot_be_is_refused(refusing_batches: Running) -> None:
    client = refusing_batches.client()

    def refused(ask: Callable[[], object]) -> tuple[int, str | None]:
        with pytest.raises(openai.APIStatusError) as error:
            ask()
        return error.value.status_code, error.value.code

    kept = upload(client, lines(1))
    create: Callable[..., Batch] = client.batches.create
    assert refused(lambda: upload(client, ["x" * 200_000])) == (413, "file_too_large")
    assert refused(lambda: [upload(client, ["x" * 90_000]) for _ in range(3)]) == (413, "storage_limit")
    assert refused(lambda: client.files.create(file=b"", purpose="vision"))[0] == 400
    assert refused(lambda: client.files.retrieve("file-none")) == (404, "file_not_found")
    assert refused(lambda: client.batches.retrieve("../../etc/passwd")) == (404, "unknown_url")
    assert refused(lambda: client.batches.cancel("batch_none")) == (404, "batch_not_found")
    for wrong in ({"endpoint": "/v1/other"}, {"completion_window": "1h"}, {"metadata": {"a": "b" * 513}}):
        given = {"input_file_id": kept, "endpoint": CHAT, "completion_window": "24h", **wrong}
        assert refused(lambda given=given: create(**given))[0] == 400
    # No body, hence no content type: as curl -X POST.
    bare = http.post(f"{refusing_batches.url}/v1/batches/batch_none/cancel")
    assert (bare.status_code, bare.json()["error"]["code"]) == (404, "batch_not_found")
    missing = {"input_file_id": "file-none", "endpoint": CHAT, "completion_window": "24h"}
    assert refused(lambda: create(**missing)) == (404, "file_not_found")
    assert refused(lambda: client.post("/files", body={}, cast_to=object))[0] == 415


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        ("in.jsonl", {"purpose": "batch", "purpose[x]": "1"}, "purpose"),
        (
            "in.jsonl",
            {"purpose": "batch", "expires_after": "1", "expires_after[seconds]": "1"},
            "expires_after",
        ),
        ("x" * 256, {"purpose": "batch"}, "file"),
        # More than the form's parser takes.
        ("x" * 9000, {"purpose": "batch"}, None),
    ],
)
def test_a_form_that_is_wrong_is_answered_as_every_error(
    refusing_batches: Running, name: str, fields: dict[str, str], param: str | None
) -> None:
    url = f"{refusing_batches.url}/v1/files"
    answer = http.post(url, data=fields, files={"file": (name, b"{}")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_a_hostile_file_costs_is_bounded(tmp_path: Path) -> None:
    """Neither many lines, nor a long line, nor many values in one are parsed, and messages stay short."""

    def faults(text: str) -> list[tuple[int | None, str]]:
        (tmp_path / "in.jsonl").write_text(text)
        opened = InputFile((tmp_path / "in.jsonl").open("rb"), max_line_bytes=500_000)
        try:
            assert len(opened) <= 50_001
            _, found = opened.check(CHAT, ["tiny"])
        finally:
            opened.close()
        assert all(len(fault.message) < 300 for fault in found)
        return [(fault.line, fault.code) for fault in found]

    long = "x" * 200_000
    line = lines(1)[0]
    assert faults("{}\n" * 60_000) == [(None, "too_many_requests")]
    assert faults("\n" * 200_000) == [(None, "too_many_requests")]
    assert faults(f"{json.dumps(line)}\n{long * 3}") == [(2, "line_too_large")]
    assert faults(json.dumps({**line, "body": {"x": [[]] * 60_000}})) == [(1, "invalid_request")]
    assert faults(json.dumps({**line, "url": long, "body": {"model": long}})) == [
        (1, "mismatched_endpoint"),
        (1, "model_not_found"),
    ]
    assert faults(json.dumps({**line, long: 1})) == [(1, "invalid_request")]


def test_uploads_of_one_tenant_at_once_are_bounded(start: Start, tmp_path: Path) -> None:
    running = start(batches=BatchStorage(BatchFolder(tmp_path)))
    head = (
        b"POST /v1/files HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        b"content-length: 1000\r\n\r\n--x\r\n"
    )
    with ExitStack() as stack:
        for _ in range(4):
            slow = stack.enter_context(create_connection(("127.0.0.1", running.server.port)))
            slow.sendall(head)

        def refused() -> bool:
            with pytest.raises(openai.APIStatusError) as error:
                client.files.create(file=b"", purpose="vision")
            return error.value.code == "upload_limit"

        client = running.client()
        wait_for(refused, "four uploads under way", 60)
    wait_for(lambda: not refused(), "the clients that left", 60)


def test_online_requests_go_first(start: Start, tmp_path: Path) -> None:
    """A batch gives its slot back as soon as an online request finds none, and is gone on with afterwards."""
    batch_hangs = True

    def reply(received: Received) -> Reply:
        if "line" not in received.prompt:
            return Reply(["a"], ending=Ending.HANG)
        return HANG if batch_hangs else Reply(["ok"])

    running = start(reply, batches=BatchStorage(BatchFolder(tmp_path)), places=2)
    client, upstream = running.client(), running.upstream
    batch = create(client, lines(2))
    wait_for(lambda: len(upstream.requests) == 1, "a request of the batch, in half of the slots")
    first = client.completions.create(model="tiny", prompt="one", stream=True)
    next(first)
    assert not upstream.requests[0].cancelled.is_set(), "a slot was free"
    second = client.completions.create(model="tiny", prompt="other", stream=True)
    next(second)
    assert upstream.requests[0].cancelled.wait(20)
    batch_hangs = False
    assert len(upstream.requests) == 3, "while online requests have all slots, the batch waits"
    first.close()
    second.close()
    done = wait_until(client, batch, *FINAL)
    assert done.request_counts is not None
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    assert sorted(asked(upstream)[f"line{index}."] for index in range(2)) == [1, 2]


@pytest.mark.slow
def test_workers_share_the_slots_that_a_batch_gives_back(tmp_path: Path) -> None:
    """The batch runs in one worker, online requests come to any; places are the parent's."""
    batch_hangs = True

    def reply(received: Received) -> Reply:
        if "line" not in received.prompt:
            return Reply(["a"], ending=Ending.HANG)
        return HANG if batch_hangs else Reply(["ok"])

    with (
        Upstream(reply) as upstream,
        worker_gateway(upstream.url, 2, batches=tmp_path) as gateway,
        openai_client(gateway.url, timeout_s=60) as client,
    ):
        batch = create(client, lines(3))
        # Of the four places, half are the batch's.
        wait_for(lambda: len(upstream.requests) == 2, "two requests of the batch", 60)
        streams = []
        for _ in range(4):
            streams.append(client.completions.create(model="tiny", prompt="one", stream=True))
            next(streams[-1])
        assert all(request.cancelled.wait(20) for request in upstream.requests[:2])
        batch_hangs = False
        for stream in streams:
            stream.close()
        done = wait_until(client, batch, *FINAL)
        assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["r0", "r1", "r2"]


def test_cancel_keeps_what_was_answered(start: Start, tmp_path: Path) -> None:
    running = start(
        lambda received: Reply(["ok"]) if "line0" in received.prompt else HANG,
        batches=BatchStorage(BatchFolder(tmp_path)),
    )
    client = running.client()
    batch = create(client, lines(4))
    answered(client, batch, 1)
    with pytest.raises(openai.ConflictError, match="is not over"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait_until(client, batch, *FINAL)
    assert (done.status, done.error_file_id) == ("cancelled", None)
    assert [line["custom_id"] for line in read(client, done.output_file_id)] == ["r0"]
    hanging = [request for request in running.upstream.requests if "line0" not in request.prompt]
    assert all(request.cancelled.wait(20) for request in hanging)
    with pytest.raises(openai.ConflictError, match="Cannot cancel a batch with status 'cancelled'"):
        client.batches.cancel(batch.id)


def test_what_is_not_answered_in_time_says_so(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.gateway.api.batches.endpoints.WINDOW_S", 1)
    running = start(
        lambda got: Reply(["ok"]) if "line0" in got.prompt else HANG,
        batches=BatchStorage(BatchFolder(tmp_path)),
    )
    client = running.client()
    done = wait_until(client, create(client, lines(3)), *FINAL)
    assert done.status == "expired"
    told = read(client, done.error_file_id)
    assert {line["error"]["code"] for line in told} == {"batch_expired"}
    answers = read(client, done.output_file_id) if done.output_file_id else []
    assert sorted(line["custom_id"] for line in (*told, *answers)) == ["r0", "r1", "r2"]


def test_a_full_disk_loses_nothing(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = BatchFolder(tmp_path)
    running = start(Reply(["word "] * 40), batches=BatchStorage(folder))
    client = running.client()
    file = upload(client, lines(40))
    pages = folder.read("PRAGMA page_count")[0][0]
    folder.read(f"PRAGMA max_page_count = {pages + 2}")
    batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
    wait_for(lambda: "batches wait: The server's disk is full" in caplog.text, "a line in the log", 60)
    assert client.batches.retrieve(batch.id).status == "in_progress"
    folder.read("PRAGMA max_page_count = 100000")
    done = wait_until(client, batch, *FINAL)
    assert (done.status, len(read(client, done.output_file_id))) == ("completed", 40)
    assert asked(running.upstream) == {f"line{index}.": 1 for index in range(40)}


def test_a_disk_without_room_keeps_no_file_in_part(tmp_path: Path) -> None:
    with Upstream() as upstream, gateway_process(upstream, tmp_path) as (process, client):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        with pytest.raises(openai.APIStatusError, match="disk is full") as full:
            upload(client, ["x" * 400_000])
        assert (full.value.status_code, full.value.code) == (507, "storage_full")
        assert list((tmp_path / "contents").iterdir()) == []
