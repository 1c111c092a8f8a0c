"""What every backend finds near: within one scope only, and what other processes put there or removed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.support.cache_asking import entry, question, unit
from tests.support.cache_places import Place

EYE = np.eye(8, dtype=np.float32)


def test_the_nearest_come_first_with_their_cosines(place: Place) -> None:
    backend = place.open()
    for n in range(3):
        backend.put(question(str(n)), entry("x"), EYE[n])
    backend.put(question("none"), entry("x"))
    found = backend.near(question("").scope, unit(EYE[1] + 0.1 * EYE[2]), 2)
    assert [candidate.turn for candidate in found] == ["1", "2"]
    assert [candidate.key for candidate in found] == [question("1").key, question("2").key]
    assert found[0].similarity == pytest.approx(0.995, abs=2e-3)
    assert found[1].similarity == pytest.approx(0.0995, abs=2e-3)
    assert backend.usage().with_vectors == 3


@pytest.mark.parametrize(
    ("least", "expected"), [(0.9, []), (0.8, ["1"]), (0.4, ["1", "2"]), (-1.0, ["1", "2", "0"])]
)
def test_what_is_less_near_than_asked_for_is_left_out(
    place: Place, least: float, expected: list[str]
) -> None:
    backend = place.open()
    for n in range(3):
        backend.put(question(str(n)), entry("x"), EYE[n])
    asked = unit(2 * EYE[1] + 1.1 * EYE[2] - 0.1 * EYE[0])  # cosines 0.87, 0.48 and -0.04
    assert [found.turn for found in backend.near(question("").scope, asked, 4, least)] == expected


def test_no_tenant_sees_another_ones_nor_is_kept_from_its_own_by_them(place: Place) -> None:
    backend = place.open()
    rng = np.random.default_rng(0)
    for n in range(200):
        backend.put(
            question(str(n), tenant="crowd"), entry("x"), unit(EYE[0] + 0.05 * rng.standard_normal(8))
        )
    backend.put(question("mine", tenant="me"), entry("x"), unit(EYE[0] + EYE[1]))
    assert [found.turn for found in backend.near(question("", tenant="me").scope, EYE[0], 4)] == ["mine"]
    assert backend.near(question("", tenant="nobody").scope, EYE[0], 4) == []
    crowd = backend.near(question("", tenant="crowd").scope, unit(EYE[0] + EYE[1]), 4)
    assert len(crowd) == 4
    assert "mine" not in {found.turn for found in crowd}


def test_what_others_put_and_removed_is_seen(place: Place) -> None:
    first, second = place.open(), place.open()
    scope = question("").scope
    assert first.near(scope, EYE[0], 1) == []
    second.put(question("a"), entry("x"), EYE[0])
    assert [found.turn for found in first.near(scope, EYE[0], 1)] == ["a"]
    first.put(question("b"), entry("x"), EYE[0])
    assert {found.turn for found in second.near(scope, EYE[0], 2)} == {"a", "b"}
    second.remove([question("a").key])
    assert [found.turn for found in first.near(scope, EYE[0], 2)] == ["b"]
    second.purge()
    assert first.near(scope, EYE[0], 2) == []


def test_an_entry_that_was_replaced_often_is_found_once(place: Place) -> None:
    backend = place.open()
    for n in range(20):
        backend.put(question("a"), entry(f"answer {n}"), EYE[0])
        assert len(backend.near(question("").scope, EYE[0], 4)) == 1
    backend.put(question("b"), entry("x"), EYE[1])
    assert [found.turn for found in backend.near(question("").scope, EYE[0], 4)] == ["a", "b"]


def test_embeddings_of_another_length_are_another_matter(place: Place) -> None:
    backend = place.open()
    backend.put(question("short"), entry("x"), EYE[0])
    backend.put(question("long"), entry("x"), np.eye(16, dtype=np.float32)[0])
    assert [found.turn for found in backend.near(question("").scope, EYE[0], 4)] == ["short"]


def test_many_threads_at_once(place: Place) -> None:
    backend = place.open()
    vectors = np.random.default_rng(0).standard_normal((80, 16)).astype(np.float32)
    wrong: list[object] = []

    def work(part: int) -> None:
        for n in range(part, 80, 4):
            backend.put(question(str(n)), entry("x"), unit(vectors[n]))
            found = backend.near(question("").scope, unit(vectors[n]), 1)
            if [candidate.turn for candidate in found] != [str(n)]:
                wrong.append((n, found))

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert backend.usage().entries == 80
