"""Which of several servers gets a request: turns of a conversation together, within bounds of the load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client import ChatTemplate, Client, Conversation, Refused
from pipeline.client.endpoints import Endpoint, EndpointPool
from pipeline.client.spreading import (
    LOAD_BOUND,
    LOAD_FLOOR,
    HashRing,
    Spread,
    affinity_key,
    prompt_beginning,
)
from pipeline.client.testing import FakeServer, Received, Reply

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
NAMES = [f"10.0.0.{number}:8001" for number in range(8)]
KEYS = st.integers(0, 2**64 - 1)


def endpoint(name: str) -> Endpoint:
    return Endpoint(name, None, None, None, None)


@given(st.lists(st.sampled_from(NAMES), min_size=2, unique=True), st.data())
def test_a_server_that_goes_moves_only_its_own_keys(names: list[str], data: st.DataObject) -> None:
    key = data.draw(KEYS)
    order = [names[at] for at in HashRing(names).walk(key)]
    assert sorted(order) == sorted(names), "each is there once"
    gone = data.draw(st.sampled_from(names))
    left = [name for name in names if name != gone]
    assert [left[at] for at in HashRing(left).walk(key)] == [name for name in order if name != gone]


def test_servers_have_about_as_many_keys_and_their_keys_go_to_all_others() -> None:
    keys = [affinity_key(f"question {number}") for number in range(4000)]
    ring = HashRing(NAMES)
    orders = [tuple(ring.walk(key)) for key in keys]
    owned = Counter(order[0] for order in orders)
    assert all(0.7 < owned[at] / (len(keys) / len(NAMES)) < 1.3 for at in range(len(NAMES)))
    assert {order[1] for order in orders if order[0] == 0} == set(range(1, len(NAMES)))


def test_the_beginning_of_a_prompt_is_the_same_for_all_turns() -> None:
    talk, other = Conversation(system="Be brief."), Conversation(system="Be brief.")
    turns = []
    for question in ("Where is my parcel?", "And when?", "Thanks"):
        turns.append(prompt_beginning(talk.messages(question)))
        talk.add(question, "I do not know.")
    assert len(set(turns)) == 1
    # Whoever has the same system prompt and another question is somebody else.
    assert prompt_beginning(other.messages("Hi")) != turns[0]
    assert prompt_beginning([{"role": "user", "content": "Where is my parcel?"}]) != turns[0]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert prompt_beginning(parts) == prompt_beginning([*parts, {"role": "assistant", "content": None}])
    assert prompt_beginning("x" * 256 + "a") == prompt_beginning("x" * 256 + "b")
    assert prompt_beginning("a") != prompt_beginning("b")
    assert prompt_beginning([*range(64), 1]) == prompt_beginning([*range(64), 2])
    assert prompt_beginning([1, 23]) != prompt_beginning([12, 3])
    assert affinity_key("half of a character: \ud800") != affinity_key("")


@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=60),
    st.sampled_from((None, 3)),
)
def test_no_server_has_more_than_its_share_whatever_is_asked(
    servers: int, steps: list[tuple[bool, int]], slots: int | None
) -> None:
    """Few keys, so that most would go to the same server."""
    pool = EndpointPool(map(endpoint, NAMES[:servers]), slots=slots)
    held: list[Endpoint] = []
    for ends, key in steps:
        if ends and held:
            pool.release(held.pop(0))
            continue
        least = min(endpoint.outstanding for endpoint in pool.all)
        chosen = pool.acquire(key=affinity_key(str(key)))
        held.append(chosen)
        assert chosen.outstanding <= max(LOAD_FLOOR, math.ceil(LOAD_BOUND * len(held) / servers))
        if slots is not None and chosen.outstanding > slots:
            assert chosen.outstanding == least + 1, "all are full"


def test_a_key_leaves_its_server_while_that_is_ill_and_comes_back() -> None:
    pool, key = EndpointPool(map(endpoint, NAMES[:4])), affinity_key("a conversation")

    def asked(avoid: Endpoint | None = None) -> Endpoint:
        chosen = pool.acquire(avoid, key)
        pool.release(chosen)
        return chosen

    first = asked()
    assert {asked() for _ in range(20)} == {first}
    second = asked(avoid=first)
    assert second is not first
    first.ill = True
    assert {asked() for _ in range(20)} == {second}
    first.ill = False
    assert asked() is first
    # So that it is avoided for long.
    first.outstanding, first.failures = 1, 9
    pool.release(first, failed=True)
    assert asked() is second, "one that has just failed is avoided, too"
    # Every pool with the same servers agrees, in whichever order it knows them.
    assert EndpointPool(map(endpoint, reversed(NAMES[:4]))).acquire(key=key).url == first.url


def test_without_a_key_or_by_least_load_the_one_with_the_fewest_requests_is_chosen() -> None:
    for spread, key in (("affinity", None), ("least-load", 1)):
        pool = EndpointPool(map(endpoint, NAMES[:3]), spread=spread)  # type: ignore[arg-type]
        chosen = [pool.acquire(key=key) for _ in range(9)]
        assert set(Counter(chosen).values()) == {3}
        pool.release(chosen[4])
        assert pool.acquire(key=key) is chosen[4]


def test_random_uses_all_that_are_well() -> None:
    pool = EndpointPool(map(endpoint, NAMES[:4]), spread="random")
    pool.all[0].ill = True
    assert {pool.acquire().url for _ in range(200)} == set(NAMES[1:4])


@pytest.fixture
def servers() -> Iterator[list[FakeServer]]:
    def answer(received: Received) -> Reply:
        return Reply([f"answer to {len(received.prompt)} characters"])

    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer(answer)) for _ in range(3)]


def ask(urls: Sequence[str], spread: Spread, affinity: str | None) -> None:
    with Client(urls, template=TEMPLATE, spread=spread) as client:
        for number in range(12):
            talk = Conversation(system="Be brief.")
            for question in (f"I am number {number}", "And now?", "And then?"):
                answer = client.generate(talk.messages(question), max_tokens=4, affinity=affinity)
                talk.add(question, answer.text)


def test_all_turns_of_a_conversation_go_to_one_server(servers: list[FakeServer]) -> None:
    urls = [server.url for server in servers]

    def asked() -> dict[int, set[str]]:
        """Servers by conversation."""
        found: dict[int, set[str]] = {}
        for server in servers:
            for request in server.requests:
                number = int(request.prompt.partition("I am number ")[2].partition("\n")[0])
                found.setdefault(number, set()).add(server.url)
            server.requests.clear()
        return found

    ask(urls, "affinity", None)
    by_conversation = asked()
    assert {len(urls_used) for urls_used in by_conversation.values()} == {1}
    assert len({url for urls_used in by_conversation.values() for url in urls_used}) > 1, (
        "one system prompt, many servers"
    )
    # Everything that is said to belong together goes to one server.
    ask(urls, "affinity", "user-7")
    assert len({url for urls_used in asked().values() for url in urls_used}) == 1
    ask(urls, "least-load", None)
    assert {url for urls_used in asked().values() for url in urls_used} == set(urls)


def test_a_spread_that_there_is_not_is_refused() -> None:
    wrong: Any = "round-robin"
    with pytest.raises(Refused, match="spread = 'round-robin': must be one of affinity, least-load, random"):
        Client("localhost:8001", spread=wrong)
