"""The memory of responses: conversations that go on by an id, for those whose they are, within bounds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.client.testing import Reply
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.responses.stored_responses import (
    StoredResponse,
    StoredResponseLimits,
    StoredResponses,
)
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Start
from tests.gateway.test_gateway_responses import create, events_of, judged


def test_a_conversation_goes_on_by_its_last_response(start: Start) -> None:
    """Each turn has what was said before, without the instructions of earlier turns."""
    running = start(lambda asked: Reply([f"{asked.prompt.count('user:')} "]))
    first = create(running, input="One", instructions="Count.")
    second = create(running, input=[{"role": "user", "content": "Two"}], previous_response_id=first.id)
    other = create(running, input="Other", previous_response_id=first.id)
    third = create(running, input="Three", previous_response_id=second.id, instructions="Go on.")
    assert [one.output_text for one in (first, second, other, third)] == ["1 ", "2 ", "2 ", "3 "]
    assert third.previous_response_id == second.id
    turns = "user: One\nassistant: 1 \nuser: Two\nassistant: 2 \nuser: Three\n"
    assert running.upstream.requests[-1].prompt == f"system: Go on.\n{turns}"


def test_what_is_remembered_can_be_read_and_forgotten(start: Start) -> None:
    running = start()
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


def test_nobody_is_told_of_anothers_responses(start: Start) -> None:
    tenants = {sha256(name.encode()).hexdigest(): Tenant(name, TenantLimits()) for name in ("ann", "bob")}
    running = start(tenants=Tenants(tenants))
    made = create(running, key="ann")
    bobs: Any = running.same_client("bob").responses
    for call in (bobs.retrieve, bobs.delete, bobs.input_items.list):
        with pytest.raises(openai.NotFoundError, match="not found"):
            call(made.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        create(running, key="bob", previous_response_id=made.id)
    for item in (
        made.output[0].id,
        running.same_client("ann").responses.input_items.list(made.id).data[0].id,
    ):
        with pytest.raises(openai.BadRequestError, match=r"no item .* of yours is remembered"):
            create(running, key="bob", input=[{"type": "item_reference", "id": item}])
    assert create(running, key="ann", previous_response_id=made.id).status == "completed"


def test_a_memory_that_is_off(start: Start) -> None:
    running = start(stored_responses=StoredResponseLimits(count=0))
    made = create(running, store=True)
    assert made.to_dict()["store"] is False
    with pytest.raises(openai.BadRequestError, match="this server keeps no responses"):
        create(running, previous_response_id=made.id)
    with pytest.raises(openai.NotFoundError):
        running.same_client().responses.retrieve(made.id)


def test_an_item_is_referred_to_once(start: Start) -> None:
    """Else a short request would stand for a long one."""
    running = start()
    reference = {"type": "item_reference", "id": create(running).output[0].id}
    with pytest.raises(openai.BadRequestError, match=r"input.1.id: .* it stands twice"):
        create(running, input=[reference, reference])


_STEPS = st.tuples(st.sampled_from(["put", "follow", "use", "delete", "wait"]), st.integers(0, 9))


@settings(max_examples=50)
@given(st.lists(_STEPS, max_size=60))
def test_the_memory_keeps_its_bounds(steps: list[tuple[str, int]]) -> None:
    """Never more than the limits; a conversation is there as a whole or not at all; other tenants see nothing."""
    now = 0.0
    memory = StoredResponses(StoredResponseLimits(count=5, bytes=400, age_s=10), clock=lambda: now)
    known: list[str] = []
    for number, (step, which) in enumerate(steps):
        id = known[which % len(known)] if known else "resp_none"
        there = memory.get("ann", id) is not None
        if step == "wait":
            now += which
        elif step == "use":
            used = memory.conversation("ann", id, most_items=9, most_bytes=10_000)
            assert used is None or there
        elif step == "delete":
            assert memory.delete("ann", id) == there
        else:
            previous = id if step == "follow" and memory.size("ann", id) else None
            known.append(f"resp_{number}")
            stored = StoredResponse(b'{"output": []}', b"[" + b" " * which * 10 + b"]", previous)
            memory.put("ann", known[-1], stored)
            assert memory.get("ann", known[-1]) == stored, "the newest is always kept"
        kept = {id: found for id in known if (found := memory.get("ann", id)) is not None}
        assert len(kept) <= 5
        assert sum(one.size for one in kept.values()) <= 400
        assert not any(memory.get("bob", id) or memory.size("bob", id) for id in known)


def test_a_conversation_in_use_is_not_forgotten() -> None:
    now = 0.0
    memory = StoredResponses(StoredResponseLimits(count=3, age_s=10), clock=lambda: now)
    response = StoredResponse(b'{"output": []}', b'[{"id": "msg_1"}]', None)
    memory.put("", "resp_1", response)
    memory.put("", "resp_2", response._replace(previous="resp_1"))
    for other in range(5):
        now += 6
        found = memory.conversation("", "resp_2", most_items=9, most_bytes=10_000)
        assert found is not None
        assert len(found.items) == 2
        memory.put("", f"resp_other{other}", response)
    assert memory.get("", "resp_other3") is None
    now += 11
    assert memory.get("", "resp_2") is None


def test_what_a_tenant_that_is_gone_has_left_is_forgotten(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "responses.sqlite"
    memory = StoredResponses(StoredResponseLimits(age_s=10), file, clock=lambda: now)
    memory.put("ann", "resp_1", StoredResponse(b"a secret", b"[]", None))
    now = 11
    memory.put("bob", "resp_2", StoredResponse(b"another", b"[]", None))
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("SELECT tenant FROM responses").fetchall() == [("bob",)]
    memory.close()


def test_processes_share_a_file(tmp_path: Path) -> None:
    """Of several that serve one gateway, each continues what another has answered, within bounds of them all."""
    limits = StoredResponseLimits(count=10)
    ones, others = (StoredResponses(limits, tmp_path / "responses.sqlite") for _ in range(2))
    response = StoredResponse(b'{"output": []}', b"[]", None)

    def put(memory: StoredResponses, name: str) -> None:
        for number in range(50):
            memory.put("ann", f"{name}_{number}", response)

    threads = [Thread(target=put, args=pair) for pair in ((ones, "one"), (others, "other"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [f"{name}_{number}" for name in ("one", "other") for number in range(50)]
    assert [id for id in ids if ones.get("ann", id)] == [id for id in ids if others.get("ann", id)]
    assert len([id for id in ids if ones.get("ann", id)]) == 10
    ones.put("ann", "last", response._replace(previous=None))
    assert others.conversation("ann", "last", most_items=9, most_bytes=99) is not None
    ones.close()
    others.close()
