"""Several gateways of one deployment: each has what another was given; what none of them may keep is refused."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.cache.encryption import KEY, AesGcmCodec
from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway import database
from pipeline.gateway.api.batches import runner
from pipeline.gateway.api.batches.storage import BatchStorage
from pipeline.gateway.api.responses.redis import RedisStoredResponses
from pipeline.gateway.api.responses.stored import (
    NoStoredResponses,
    SqlStoredResponses,
    StoredResponses,
)
from pipeline.gateway.database import PostgresDatabase
from pipeline.gateway.settings import GatewaySettings
from pipeline.gateway.state import open_state
from pipeline.recipe import CacheSettings
from tests.gateway.conftest import Start, opened_place, places
from tests.gateway.test_gateway_batches import (
    CHAT,
    FINAL,
    answered,
    asked,
    create,
    lines,
    read,
    upload,
    wait_until,
)
from tests.gateway.test_gateway_responses import create as respond
from tests.gateway.test_gateway_responses import events_of
from tests.support.http_clients import http
from tests.support.scripted_model import Upstream
from tests.support.servers import Servers
from tests.support.state_gateway import gateway_process
from tests.support.state_places import StatePlace
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("short_polls")

HANG = Reply([], ending=Ending.HANG)
PGVECTOR = {"backend": {"kind": "pgvector", "url": "postgresql://db/x"}}
REDIS = {"backend": {"kind": "redis", "url": "redis://cache"}}
FILE: dict[str, Any] = {"backend": {"kind": "sqlite"}}
LIMITS = "redis://limits"


@pytest.fixture(params=places("folder", "postgres"))
def place(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[StatePlace]:
    with opened_place(request.param, tmp_path, servers) as place:
        yield place


def opened(
    caches: Sequence[dict[str, Any]],
    redis: str | None = None,
    folder: Path | None = None,
    count: int = 10,
) -> tuple[BatchStorage | None, StoredResponses]:
    settings = GatewaySettings(limits_redis=redis, batch_folder=folder, stored_responses=count)
    parsed = [CacheSettings.model_validate(cache) for cache in caches]
    return open_state(parsed, settings, own_folder=Path("own"))


@pytest.mark.parametrize(
    ("caches", "redis", "folder", "batches", "responses"),
    [
        ([FILE], None, None, "own", "memory"),
        ([FILE], None, "/named", "/named", "memory"),
        ([FILE], LIMITS, None, None, "limits:6379/0"),
        ([FILE], LIMITS, "/named", "/named", "limits:6379/0"),
        ([FILE, REDIS], None, None, "own", "cache:6379/0"),
        ([REDIS], LIMITS, None, None, "cache:6379/0"),
        ([FILE, REDIS, PGVECTOR], LIMITS, None, "db:5432/x", "db:5432/x"),
        ([PGVECTOR], None, None, "db:5432/x", "db:5432/x"),
        ([PGVECTOR], None, "/named", "/named", "db:5432/x"),
    ],
)
def test_state_lies_in_what_the_deployment_has(
    caches: Sequence[dict[str, Any]],
    redis: str | None,
    folder: str | None,
    batches: str | None,
    responses: str,
) -> None:
    kept, stored = opened(caches, redis, None if folder is None else Path(folder))
    assert (None if kept is None else place_of(kept._place)) == batches
    assert place_of(stored) == responses
    assert isinstance(opened(caches, redis, count=0)[1], NoStoredResponses)


def place_of(opened: Any) -> str:
    if isinstance(opened, RedisStoredResponses):
        return str(opened._server.address)
    if isinstance(opened, SqlStoredResponses) and not isinstance(opened._database, PostgresDatabase):
        return "memory"
    database = getattr(opened, "_database", opened)
    return database._connections.address if isinstance(database, PostgresDatabase) else str(opened._folder)


def test_what_servers_are_given_is_sealed_as_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    monkeypatch.setenv("OWN_KEY", AesGcmCodec.new_secret())
    own = {"encryption": {"key_env": "OWN_KEY"}}
    for caches in ([{**PGVECTOR, **own}], [{**REDIS, **own}], [FILE, {**FILE, **own}]):
        stored: Any = opened(caches, LIMITS)[1]
        codec = stored._database.codec if isinstance(stored, SqlStoredResponses) else stored._codec
        assert isinstance(codec, AesGcmCodec)
    monkeypatch.delenv("OWN_KEY")
    with pytest.raises(ValueError, match="OWN_KEY holds no key"):
        opened([{**PGVECTOR, **own}])


def test_files_and_batches_without_a_place_are_refused_by_name(start: Start) -> None:
    running = start()
    client = running.client()
    batch = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    for ask in (
        lambda: upload(client, lines(1)),
        lambda: client.files.list(),
        lambda: client.files.content("file-1"),
        lambda: client.files.delete("file-1"),
        lambda: client.batches.create(**batch),  # type: ignore[arg-type]
        lambda: client.batches.list(),
        lambda: client.batches.cancel("batch_1"),
    ):
        with pytest.raises(
            openai.APIStatusError, match=r"cache\.backend of kind pgvector.*gateway.batch_folder"
        ) as refused:
            ask()
        assert (refused.value.status_code, refused.value.code) == (501, "batches_not_configured")
    assert respond(running).status == "completed"


def test_any_gateway_has_what_another_was_given(start: Start, place: StatePlace) -> None:
    """Uploads, batches and what they end in; each batch is run by one of them."""
    with Upstream(Reply(["ok"])) as upstream:
        first, second = (start(upstream=upstream, batches=place.batches()) for _ in range(2))
        clients = [first.client(), second.client()]
        batches = [create(client, lines(4)) for client in clients for _ in range(2)]
        for number, batch in enumerate(batches):
            done = wait_until(clients[number % 2], batch, *FINAL)
            assert (done.status, len(read(clients[1 - number % 2], done.output_file_id))) == ("completed", 4)
        assert asked(upstream) == {f"line{index}.": 4 for index in range(4)}
        file = upload(clients[0], lines(1))
        assert clients[1].files.content(file).text == clients[0].files.content(file).text
        assert clients[1].files.delete(file).deleted
        with pytest.raises(openai.NotFoundError):
            clients[0].files.retrieve(file)
        assert [first.id for first in clients[0].batches.list()] == [
            first.id for first in clients[1].batches.list()
        ]


def test_a_cancellation_comes_to_the_gateway_that_runs_the_batch(
    start: Start, place: StatePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which renews its claim meanwhile."""
    monkeypatch.setattr(runner, "_RENEW_S", 0.05)

    def reply(received: Received) -> Reply:
        return Reply(["ok"]) if "line0" in received.prompt else HANG

    with Upstream(reply) as upstream:
        first = start(upstream=upstream, batches=place.batches())
        batch = create(first.client(), lines(3))
        answered(first.client(), batch, 1)
        kept = place.batches()
        query = "SELECT until FROM claims WHERE batch = %s"
        until = kept._place.read(query, batch.id)
        wait_for(lambda: kept._place.read(query, batch.id) > until, "a claim that was renewed", 60)
        other = start(upstream=upstream, batches=kept)
        other.client().batches.cancel(batch.id)
        done = wait_until(other.client(), batch, *FINAL)
        assert (done.status, [line["custom_id"] for line in read(other.client(), done.output_file_id)]) == (
            "cancelled",
            ["r0"],
        )


def test_a_gateway_that_drains_leaves_its_batch_to_another(start: Start, place: StatePlace) -> None:
    """Lines that it does not ask any more are not missing in the end."""

    def reply(received: Received) -> Reply:
        # An answer that is waited for as long as the gateway may drain.
        return (
            Reply(["a"], ending=Ending.HANG)
            if "stay" in received.prompt
            else Reply(["ok"], first_delay_s=0.05)
        )

    with Upstream(reply) as upstream:
        first = start(upstream=upstream, batches=place.batches(), places=4)
        next(first.client().completions.create(model="tiny", prompt="stay", stream=True))
        batch = create(first.client(), lines(60))
        answered(first.client(), batch, 5)
        first.server.should_exit = True
        kept = place.batches()
        wait_for(
            lambda: [found.batch.id for found in kept.claims.claimable()] == [batch.id], "a free batch", 60
        )
        assert kept.batch("", batch.id).status == "in_progress"
        other = start(upstream=upstream, batches=kept)
        done = wait_until(other.client(), batch, *FINAL)
        assert done.status == "completed"
        assert [line["custom_id"] for line in read(other.client(), done.output_file_id)] == [
            f"r{number}" for number in range(60)
        ]


def test_a_killed_gateway_is_gone_on_with_by_another(place: StatePlace) -> None:
    """No answer is lost, none is there twice, and what was answered is not asked again."""
    hangs = True

    def reply(received: Received) -> Reply:
        return HANG if hangs and received.prompt.strip().endswith(("3.", "4.", "5.")) else Reply(["ok"])

    where: dict[str, Any] = (
        {"folder": place.folder / "batches"} if place.kind == "folder" else {"postgres": place.url}
    )
    with Upstream(reply) as upstream, ExitStack() as stack:
        killed, client = stack.enter_context(gateway_process(upstream, **where, claim_s=2.0))
        batch = create(client, lines(6))
        answered(client, batch, 3)
        _, other = stack.enter_context(gateway_process(upstream, **where, claim_s=2.0))
        before = asked(upstream)
        killed.send_signal(signal.SIGKILL)
        killed.wait(20)
        hangs = False
        done = wait_until(other, batch, *FINAL)
        assert done.status == "completed"
        assert [line["custom_id"] for line in read(other, done.output_file_id)] == [f"r{n}" for n in range(6)]
        assert done.request_counts is not None
        assert done.request_counts.completed == 6
        assert set(asked(upstream) - before) == {"line3.", "line4.", "line5."}


@pytest.mark.parametrize("kind", places("redis", "valkey", "postgres"))
def test_a_conversation_goes_on_at_any_gateway(
    kind: str, tmp_path: Path, servers: Servers, start: Start
) -> None:
    with opened_place(kind, tmp_path, servers) as place:
        one_gateway, other_gateway = (
            start(
                lambda asked: Reply([f"{asked.prompt.count('user:')} "]), stored_responses=place.responses()
            )
            for _ in range(2)
        )
        first = respond(one_gateway, input="One")
        second = respond(other_gateway, input="Two", previous_response_id=first.id)
        reference = {"type": "item_reference", "id": second.output[0].id}
        third = respond(
            one_gateway,
            input=[{"role": "user", "content": "Three"}, reference],
            previous_response_id=second.id,
        )
        assert [turn.output_text for turn in (first, second, third)] == ["1 ", "2 ", "3 "]
        responses: Any = other_gateway.same_client().responses
        assert responses.retrieve(first.id) == first
        responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            one_gateway.same_client().responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            respond(one_gateway, previous_response_id=second.id)


@pytest.mark.parametrize("kind", places("redis", "postgres"))
def test_a_server_that_is_away_fails_what_needs_it_and_nothing_else(
    kind: str, tmp_path: Path, servers: Servers, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_ANSWER_S", 2.0)
    with opened_place(kind, tmp_path, servers) as place, ExitStack() as stack:
        batches = place.batches() if kind == "postgres" else None
        running = start(Reply(["ok"]), batches=batches, stored_responses=place.responses())
        client, responses = running.client(), running.same_client().responses
        made = respond(running)
        file = upload(client, lines(2)) if batches else ""
        assert place.server is not None
        place.server.pause()
        stack.callback(place.server.resume)
        needing: list[Any] = [
            lambda: respond(running, previous_response_id=made.id),
            lambda: respond(running, input=[{"type": "item_reference", "id": made.output[0].id}]),
            lambda: responses.retrieve(made.id),
            lambda: responses.delete(made.id),
        ]
        if batches:
            needing += [
                lambda: upload(client, lines(1)),
                lambda: client.files.list(),
                lambda: client.files.content(file),
                lambda: client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
                lambda: client.batches.list(),
            ]
        for ask in needing:
            with pytest.raises(openai.InternalServerError, match="the server's log says why") as refused:
                ask()
            assert (refused.value.status_code, refused.value.code) == (503, "storage_failed")
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == "ok"
        unstored = respond(running)
        assert (unstored.output_text, unstored.to_dict()["store"]) == ("ok", False)
        streamed = events_of(running)[-1].response
        assert (streamed.status, streamed.to_dict()["store"]) == ("completed", False)
        assert http.get(f"{running.url}/healthz").status_code == 200
        place.server.resume()
        wait_for(lambda: respond(running).to_dict()["store"], "the server, which is back", 60)
        assert respond(running, previous_response_id=made.id).status == "completed"
        if batches:
            # The connections of batches are others than those of responses, and come back by themselves.
            wait_for(lambda: lists_files(client), "its files, which are back", 60)
            monkeypatch.undo()
            batch = client.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h")
            assert wait_until(client, batch, *FINAL).status == "completed"


def lists_files(client: openai.OpenAI) -> bool:
    try:
        client.files.list()
    except openai.InternalServerError:
        return False
    return True


@pytest.mark.servers
def test_a_batch_outlives_a_crash_of_the_server(tmp_path: Path, servers: Servers, start: Start) -> None:
    """It waits, goes on where it was, and asks nothing again that was answered."""
    with opened_place("postgres", tmp_path, servers) as place:
        running = start(Reply(["ok"], first_delay_s=0.05), batches=place.batches(), places=2)
        batch = create(running.client(), lines(40))
        answered(running.client(), batch, 5)
        assert place.server is not None
        place.server.stop()
        with pytest.raises(openai.InternalServerError):
            running.client().batches.retrieve(batch.id)
        place.server.start()

        def is_over() -> bool:
            try:
                return running.client().batches.retrieve(batch.id).status in FINAL
            except openai.InternalServerError:
                return False

        wait_for(is_over, "the end of the batch", 60)
        done = running.client().batches.retrieve(batch.id)
        assert (done.status, [line["custom_id"] for line in read(running.client(), done.output_file_id)]) == (
            "completed",
            [f"r{number}" for number in range(40)],
        )
        assert asked(running.upstream) == {f"line{number}.": 1 for number in range(40)}


def test_a_server_that_was_never_there_is_said_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    batches, responses = opened(
        [{"backend": {"kind": "pgvector", "url": f"postgresql://127.0.0.1:{port}/x"}}]
    )
    running = start(batches=batches, stored_responses=responses)
    for _ in range(3):
        assert respond(running).to_dict()["store"] is False
        with pytest.raises(openai.InternalServerError):
            running.same_client().files.list()
    assert len([line for line in caplog.messages if "cannot be used" in line]) == 1
