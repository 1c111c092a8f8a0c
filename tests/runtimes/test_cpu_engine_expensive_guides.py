"""Guides that take too long, or too much memory, to compile: refused, and no other request notices."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest

from pipeline.runtimes.cpu.engine import Engine, EngineSettings, FinishReason, Guide, InvalidRequest
from pipeline.runtimes.cpu.engine.grammars import GrammarBudget, Grammars, GrammarsUnavailable
from pipeline.runtimes.cpu.engine.matcher import Matcher
from tests.runtimes.conftest import Pair
from tests.runtimes.test_cpu_engine_thread import Waiter
from tests.support.engine import VOCABULARY, prompts, request
from tests.support.waiting import wait_for

PROMPTS = prompts(4)
# 90 bytes that take 22 s.
EXPENSIVE = Guide(
    "json_schema", '{"type":"integer","multipleOf":999983,"minimum":0,"maximum":1000000000000000000}'
)
LINKS = range(1_700)
# 52 KB in which each rule names the next two.
CHAIN = Guide(
    "ebnf_grammar",
    "root ::= r0\n"
    + "\n".join(f'r{at} ::= "a" r{at + 1} | "b" r{min(at + 2, 1_700)} | r{at + 1}' for at in LINKS)
    + '\nr1700 ::= "c"\n',
)
USUAL = Guide("regex", "[a-c]{3,9}")


def ask(engine: Engine, name: str, guide: Guide | None) -> Waiter:
    sink = Waiter()
    engine.submit(request(name, PROMPTS[0], 16, guide=guide), sink)
    return sink


@pytest.fixture
def engine(cpu_pair: Pair) -> Iterator[Engine]:
    with Engine(cpu_pair.target, None, EngineSettings(max_concurrency=8), VOCABULARY) as made:
        yield made


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    with closing(Grammars(VOCABULARY, 2048)) as made:
        yield made


def test_others_go_on_while_a_guide_is_compiled(engine: Engine) -> None:
    ended: list[str] = []
    expensive = ask(engine, "expensive", EXPENSIVE)
    again, chain = ask(engine, "again", EXPENSIVE), ask(engine, "chain", CHAIN)
    for name, guide in (("free", None), ("usual", USUAL)):
        assert ask(engine, name, guide).wait().finish in {FinishReason.LENGTH, FinishReason.GUIDE}
        ended += [sink.outputs[-1].request_id for sink in (expensive, again, chain) if sink.done.is_set()]
    assert not ended, "a usual guide waits for no expensive one"
    for sink in (expensive, again, chain):
        assert sink.wait().finish is FinishReason.REFUSED
        assert "takes more than 1 s of processor time or 256 MiB of memory" in (sink.outputs[-1].error or "")
    assert ask(engine, "once more", EXPENSIVE).wait().finish is FinishReason.REFUSED
    assert engine.stats().running == 0


def test_a_guide_is_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise AssertionError("compiled again")

    got: list[Matcher | Exception] = []
    for guide in (USUAL, EXPENSIVE):
        grammars.prepare(guide, [2], got.append)
    wait_for(lambda: len(got) == 2, "the end of compiling")
    monkeypatch.setattr(grammars._workers, "compile", none)
    for guide in (USUAL, EXPENSIVE):
        grammars.prepare(guide, [2], got.append)
    assert [type(outcome) for outcome in got] == [Matcher, InvalidRequest] * 2


def test_one_that_is_cancelled_or_left_ends_at_once(engine: Engine) -> None:
    cancelled, left = ask(engine, "cancelled", EXPENSIVE), ask(engine, "left", CHAIN)
    engine.cancel("cancelled")
    assert cancelled.wait().finish is FinishReason.CANCELLED
    engine.close()
    assert left.wait().finish in {FinishReason.CANCELLED, FinishReason.REFUSED}


def test_memory_is_bounded() -> None:
    """A schema of 50 KB that takes 6 MiB."""
    properties = {f"p{n}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for n in range(900)}
    guide = Guide("json_schema", json.dumps({"type": "object", "properties": properties}))
    with closing(Grammars(VOCABULARY, 2048, GrammarBudget(memory_mib=2))) as grammars:
        with pytest.raises(InvalidRequest, match="or 2 MiB of memory to compile"):
            grammars.matcher(guide)
        assert grammars.matcher(USUAL).allowed([]) is not None


def test_a_guide_that_is_too_large_is_not_compiled(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="has more than 1048576 bytes"):
        grammars.matcher(Guide("regex", "a" * (2**20 + 1)))


def test_the_process_that_compiles_is_started_again(grammars: Grammars) -> None:
    grammars.start()
    for number in range(3):
        # Killed before anything was compiled, between, and while its worker is awaited.
        os.kill(_process(grammars), signal.SIGKILL)
        assert grammars.matcher(Guide("regex", f"[a-c]{{{number + 1}}}")).allowed([]) is not None
    grammars.close()
    with pytest.raises(GrammarsUnavailable):
        grammars.matcher(Guide("regex", "[a-d]"))


def _process(grammars: Grammars) -> int:
    end = grammars._workers._end
    assert end is not None
    detached = end.peek()
    assert detached is not None
    return int(detached[2][0].pid)
