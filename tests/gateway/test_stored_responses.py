"""Stored responses: conversations that go on by an id, for their tenant alone, within bounds, wherever they are."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cache.encryption import AesGcmCodec
from pipeline.cache.redis_server import RedisAddress
from pipeline.client.testing import Reply
from pipeline.gateway.api.responses.stored import (
    NoStoredResponses,
    StoredResponse,
    StoredResponseLimits,
    StoredResponses,
)
from tests.gateway.conftest import Start, opened_place, places
from tests.gateway.test_gateway_responses import create, events_of, judged
from tests.support.servers import Servers
from tests.support.state_places import StatePlace
from tests.support.waiting import wait_for


def test_a_conversation_goes_on_by_its_last_response(borrow: Start) -> None:
    """Each turn has what was said before, without the instructions of earlier turns."""
    running = borrow(lambda asked: Reply([f"{asked.prompt.count('user:')} "]))
    first = create(running, input="One", instructions="Count.")
    second = create(running, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id)
    other = create(running, input="Other", previous_response_id=first.id)
    third = create(running, input="Three", previous_response_id=second.id, instructions="Go on.")
    assert [response.output_text for response in (first, second, other, third)] == ["1 ", "2 ", "2 ", "3 "]
    assert third.previous_response_id == second.id
    turns = "user: One\nassistant: 1 \nuser: Two\nassistant: 2 \nuser: Three\n"
    assert running.upstream.requests[-1].prompt == f"system: Go on.\n{turns}"


def test_what_is_remembered_can_be_read_and_forgotten(borrow: Start) -> None:
    running = borrow()
    responses: Any = running.same_client().responses
    made = create(running, input=[{"role": "user", "content": str(number)} for number in range(5)])
    assert responses.retrieve(made.id) == made
    streamed = events_of(running)[-1].response
    assert judged(responses.retrieve(streamed.id)) == streamed
    texts = [item.content[0].text for item in responses.input_items.list(made.id, order="asc", limit=2)]
    assert texts == ["0", "1", "2", "3", "4"], "page by page"
    assert [item.content[0].text for item in responses.input_items.list(made.id)] == texts[::-1]
    reference = {"type": "item_reference", "id": made.output[0].id}
    create(running, input=[{"role": "user", "content": "Hi"}, reference, {"role": "user", "content": "So?"}])
    assert running.upstream.requests[-1].prompt == "user: Hi\nassistant: Hello world\nuser: So?\n"
    follower = create(running, previous_response_id=made.id)
    responses.delete(made.id)
    for id in (made.id, follower.id):
        with pytest.raises(
            openai.BadRequestError, match=r"Previous response with id .* not found"
        ) as refused:
            create(running, previous_response_id=id)
        assert refused.value.code == "previous_response_not_found"
    for call in (responses.retrieve, responses.delete, responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
            call(made.id)
    unkept = create(running, store=False)
    assert unkept.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unkept.id)


def test_a_memory_that_is_off(start: Start) -> None:
    """Who asks for an answer gets it, also where the client says `store: true` by default; the rest is refused."""
    running = start(stored_responses=NoStoredResponses())
    responses: Any = running.same_client().responses
    for field in ({}, {"store": True}, {"store": False}):
        made = create(running, **field)
        assert (made.output_text, made.to_dict()["store"]) == ("Hello world", False)
    assert {
        event.response.to_dict()["store"] for event in events_of(running) if hasattr(event, "response")
    } == {False}
    reference = {"type": "item_reference", "id": made.output[0].id}
    for ask in (
        lambda: create(running, previous_response_id=made.id),
        lambda: create(running, input=[reference]),
        lambda: responses.retrieve(made.id),
        lambda: responses.delete(made.id),
        lambda: responses.input_items.list(made.id),
    ):
        with pytest.raises(openai.APIStatusError, match=r"gateway\.stored_responses: 0") as refused:
            ask()
        assert (refused.value.status_code, refused.value.code) == (501, "responses_not_stored")


def test_an_item_is_referred_to_once(borrow: Start) -> None:
    """Else a short request would stand for a long one."""
    running = borrow()
    reference = {"type": "item_reference", "id": create(running).output[0].id}
    with pytest.raises(openai.BadRequestError, match=r"input.1.id: .* it stands twice"):
        create(running, input=[reference, reference])


@pytest.fixture(params=places("memory", "folder", "redis", "valkey", "postgres"))
def place(request: pytest.FixtureRequest, tmp_path: Path, servers: Servers) -> Iterator[StatePlace]:
    """Each place of stored responses, one contract for all."""
    with opened_place(request.param, tmp_path, servers) as place:
        yield place


_names = count()
_STEPS = st.tuples(st.sampled_from(["put", "follow", "use", "delete", "wait"]), st.integers(0, 9))
PLAIN = StoredResponse(b'{"output": []}', b'[{"id": "msg_1"}]', None)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_STEPS, max_size=60))
def test_bounds_are_kept(place: StatePlace, steps: list[tuple[str, int]]) -> None:
    """Never more than the limits; a conversation is there as a whole or not at all; other tenants see nothing."""
    place.now = 1e9
    # One for all examples.
    stored = place.first or place.responses(StoredResponseLimits(count=5, bytes=400, age_s=10))
    ann, known = f"ann{next(_names)}", list[str]()
    for number, (step, which) in enumerate(steps):
        id = known[which % len(known)] if known else "resp_none"
        there = bool(stored.find(ann, [id]))
        if step == "wait":
            place.now += which
        elif step == "use":
            used = stored.conversation(ann, id, most_items=9, most_bytes=10_000)
            assert used is None or there
        elif step == "delete":
            assert stored.delete(ann, id) == there
        else:
            is_whole = stored.conversation(ann, id, most_items=9, most_bytes=10_000) is not None
            known.append(f"resp_{number}")
            content = StoredResponse(
                b'{"output": []}',
                b"[" + b" " * which * 10 + b"]",
                id if step == "follow" and is_whole else None,
            )
            assert stored.put(ann, known[-1], content)
            assert stored.find(ann, known[-1:]) == {known[-1]: content}, "the newest is always stored"
        kept = stored.find(ann, known)
        assert len(kept) <= 5
        assert sum(stored.size for stored in kept.values()) <= 400
        assert not stored.find("bob", known)
        assert not any(stored.conversation("bob", id, most_items=9, most_bytes=9999) for id in known)
        assert not any(stored.delete("bob", id) for id in known)


def test_a_conversation_in_use_is_not_forgotten(place: StatePlace) -> None:
    place.now = 1e9
    stored = place.responses(StoredResponseLimits(count=3, age_s=10))
    stored.put("", "resp_1", PLAIN)
    stored.put("", "resp_2", PLAIN._replace(previous="resp_1"))
    for other in range(5):
        place.now += 6
        found = stored.conversation("", "resp_2", most_items=9, most_bytes=10_000)
        assert found is not None
        assert (len(found.items), found.size, found.complete) == (2, 2 * PLAIN.size, True)
        stored.put("", f"resp_other{other}", PLAIN)
    assert not stored.find("", ["resp_other3"])
    newest = stored.conversation("", "resp_2", most_items=1, most_bytes=10_000)
    assert newest is not None
    assert (len(newest.items), newest.complete) == (1, False)
    place.now += 11
    assert not stored.find("", ["resp_2"])
    assert stored.conversation("", "resp_2", most_items=9, most_bytes=10_000) is None
    assert not stored.put("", "resp_3", PLAIN._replace(response=b" " * 40 * 2**20)), "more than all may be"
    assert not stored.find("", ["resp_3"])


def test_gateways_share_responses_within_bounds_of_them_all(place: StatePlace) -> None:
    limits = StoredResponseLimits(count=10)
    first, second = (place.responses(limits) for _ in range(2))

    def put(stored: StoredResponses, name: str) -> None:
        for number in range(50):
            stored.put("ann", f"{name}_{number}", PLAIN)

    threads = [Thread(target=put, args=pair) for pair in ((first, "one"), (second, "other"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [f"{name}_{number}" for name in ("one", "other") for number in range(50)]
    assert first.find("ann", ids) == second.find("ann", ids)
    assert len(first.find("ann", ids)) == 10
    first.put("ann", "last", PLAIN)
    assert second.conversation("ann", "last", most_items=9, most_bytes=99) is not None
    assert second.delete("ann", "last")
    assert not first.find("ann", ["last"])


def test_what_nobody_uses_any_more_is_gone(place: StatePlace) -> None:
    """Also of a tenant that asks no more."""
    place.now = time.time()
    stored = place.responses(StoredResponseLimits(age_s=5))
    if place.kind == "memory":
        pytest.skip("nothing else can look into it")
    stored.put("ann", "resp_1", PLAIN._replace(response=b'"a secret"'))
    assert b"a secret" in place.raw()
    # The server goes by its own clock.
    place.now += 6
    stored.forget_old()
    wait_for(lambda: b"a secret" not in place.raw(), "the end of what nobody uses", 60)


@pytest.mark.parametrize("kind", places("redis", "valkey", "postgres"))
def test_a_server_sees_nothing_that_was_said(kind: str, tmp_path: Path, servers: Servers) -> None:
    """Names of keys hold no text in any case; values are sealed, each to its place."""
    with opened_place(kind, tmp_path, servers) as place:
        stored = place.responses(codec=AesGcmCodec(AesGcmCodec.new_secret()))
        content = StoredResponse(
            b'{"output": [], "text": "Canary"}', b'[{"id": "1", "text": "Canary"}]', None
        )
        stored.put("ann", "resp_1", content)
        assert stored.find("ann", ["resp_1"]) == {"resp_1": content}
        assert b"Canary" not in place.raw()
        assert b"resp_1" in place.raw()
        other = place.responses(codec=AesGcmCodec(AesGcmCodec.new_secret()))
        assert not other.find("ann", ["resp_1"])
        assert other.conversation("ann", "resp_1", most_items=9, most_bytes=999) is None


@pytest.mark.servers
def test_a_server_that_evicts_forgets_and_keeps_its_bounds(tmp_path: Path, servers: Servers) -> None:
    """Redis may take any key away, also those by which the others are counted."""
    with opened_place("valkey", tmp_path, servers) as place:
        stored = place.responses(StoredResponseLimits(count=3))
        address = RedisAddress.parse(place.url)
        client = redis.Redis(host=address.host, port=address.port)
        for part in ("used", "sizes", "one:resp_2"):
            for number in range(4):
                stored.put("ann", f"resp_{number}", PLAIN)
            client.delete(f"pipeline:responses:ann:{part}")
            ids = [f"resp_{number}" for number in range(4, 8)]
            for id in ids:
                assert stored.put("ann", id, PLAIN)
            assert list(stored.find("ann", [f"resp_{number}" for number in range(8)])) == ids[1:]
            for id in ids:
                stored.delete("ann", id)
            assert not client.exists("pipeline:responses:ann:used")
        client.close()
