"""Long texts in processes of their own: what they say is what this process would, and none that is lost is missed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.client import PromptLimit
from pipeline.client.testing import Ending, Received, Reply
from pipeline.gateway.api.bounds import MAX_BODY_BYTES
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.tenants import Tenants
from pipeline.gateway.text_processes import (
    LONG_CHARS,
    CpuMeter,
    OverBudget,
    ProcessTokenizer,
    TextBudget,
    TextProcesses,
)
from pipeline.gateway.text_server import schema_faults
from pipeline.gateway.tokenizer import ModelTokenizer
from pipeline.models.chat_template import ChatTemplate, TemplateError
from pipeline.reading import read_tokenizer
from tests.gateway.conftest import Running, Start
from tests.support import nasty_tokenizers
from tests.support.http_clients import http
from tests.support.waiting import wait_for

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
STRICT_TEMPLATE = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
# A schema that takes the validator of meta-schemas seconds.
DEAR = json.dumps({"anyOf": [{"not": {}} for _ in range(3500)]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("tokenizer"))


def fill(made: Path) -> Path:
    nasty_tokenizers.byte_level().save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(STRICT_TEMPLATE)
    return made


@pytest.fixture(scope="module")
def processes(folder: Path) -> Iterator[TextProcesses]:
    with closing(TextProcesses(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def hasty(folder: Path) -> Iterator[TextProcesses]:
    """Workers that are ended after a tenth of a second."""
    with closing(TextProcesses(folder, budget=TextBudget(cpu_s=0.1, memory_mib=64))) as made:
        yield made


@settings(deadline=None, max_examples=25)
@given(
    texts=st.lists(st.sampled_from(nasty_tokenizers.TEXTS) | st.text(max_size=30), min_size=1),
    long=st.booleans(),
)
def test_a_worker_says_what_this_process_says(
    folder: Path, processes: TextProcesses, texts: Sequence[str], long: bool
) -> None:
    text = " ".join(texts) or "-"
    text *= LONG_CHARS // len(text) + 1 if long else 1
    tokenizer = read_tokenizer(folder / "tokenizer.json")
    here, there = ModelTokenizer(tokenizer), ModelTokenizer(tokenizer, processes)
    limit = PromptLimit(ProcessTokenizer(tokenizer, processes), 10**9)
    run = CpuMeter().run
    assert run(lambda: there.encode_prompt(text)) == here.encode_prompt(text)
    for special in (True, False):
        ids = here.encode(text, add_special_tokens=special)
        assert run(partial(there.encode, text, add_special_tokens=special)) == ids
    assert run(lambda: limit.check(text)) == PromptLimit(tokenizer, 10**9).check(text)
    messages = [{"role": "user", "content": text}]
    assert processes.do("render", messages=messages, settings={}) == ChatTemplate(TEMPLATE).render(messages)
    schema = json.dumps({"type": text[:3], "description": text})
    assert [tuple(fault) for fault in processes.do("schema_faults", text=schema)] == schema_faults(schema)


def test_who_may_not_wait_asks_no_worker(tmp_path: Path) -> None:
    """The event loop has no meter; here nothing could answer."""
    tokenizer = nasty_tokenizers.byte_level()
    with closing(TextProcesses(tmp_path)) as processes:
        there = ModelTokenizer(tokenizer, processes)
        assert there.encode_prompt("plain words" * LONG_CHARS) == ModelTokenizer(tokenizer).encode_prompt(
            "plain words" * LONG_CHARS
        )


def test_what_a_template_refuses_is_its_error_and_the_worker_goes_on(processes: TextProcesses) -> None:
    for _ in range(2):
        with pytest.raises(TemplateError, match="no tools"):
            processes.do("render", messages=[{"role": "tool", "content": "x"}], settings={})


def test_a_fault_of_a_worker_is_none_of_the_text(processes: TextProcesses) -> None:
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'words'"):
        processes.do("count", words="x")
    assert processes.do("count", text="plain words") > 0


def test_work_beyond_its_time_is_ended_and_charged(hasty: TextProcesses) -> None:
    meter = CpuMeter()
    with pytest.raises(
        OverBudget, match=r"takes more than 0.2 s of processor time or 64 MiB of memory to read"
    ):
        meter.run(lambda: hasty.do("schema_faults", text=DEAR))
    assert meter.used_s >= 0.1
    assert hasty.do("count", text="plain words") > 0


def test_work_beyond_its_memory_is_ended(folder: Path) -> None:
    with closing(TextProcesses(folder, budget=TextBudget(memory_mib=16))) as processes:
        with pytest.raises(OverBudget):
            processes.do("count", text="plain words, then " * 200_000)
        assert processes.do("count", text="plain words") > 0


def test_others_go_on_while_one_takes_long(hasty: TextProcesses) -> None:
    def dear() -> None:
        for _ in range(3):
            with pytest.raises(OverBudget):
                hasty.do("schema_faults", text=DEAR)

    attacker = threading.Thread(target=dear)
    attacker.start()
    counts = [hasty.do("count", text="plain words" * number) for number in range(1, 200)]
    attacker.join(60)
    assert not attacker.is_alive()
    assert counts == sorted(counts)


def test_whatever_is_killed_is_replaced(tmp_path: Path) -> None:
    with closing(TextProcesses(fill(tmp_path))) as processes:
        count = processes.do("count", text="plain words")
        for whom in ("worker", "both"):
            (server,) = text_servers(tmp_path)
            for killed in [server] * (whom == "both") + server.children():
                killed.kill()
            assert processes.do("count", text="plain words") == count
        (server,) = text_servers(tmp_path)
        made = [server, *server.children()]
        assert len(made) == 2
        # A worker that waits goes on without it.
        server.kill()
        assert processes.do("count", text="plain words") == count
    wait_for(
        lambda: not any(process.is_running() for process in made), "the end of the server and its worker"
    )


def test_without_a_tokenizer_there_is_no_worker(tmp_path: Path) -> None:
    with closing(TextProcesses(tmp_path)) as processes, pytest.raises(ApiError) as refused:
        processes.do("count", text="x")
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)


def text_servers(folder: Path) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] if str(folder) in child.cmdline() else []
    return found


def key_of(tenant: str) -> str:
    return sha256(tenant.encode()).hexdigest()


QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def guarded(shared_start: Start, folder: Path) -> Running:
    """Tenants of a gateway at which each long text has half a second, and each tenant but one a second a minute."""
    limits = {"attacker": 1, "victim": 1, "unlimited": None}
    tenants = {
        key_of(name): Tenant(name, TenantLimits(reading_seconds_per_minute=most), clock=lambda: 0.0)
        for name, most in limits.items()
    }
    budget = TextBudget(cpu_s=0.5, memory_mib=64)
    processes = TextProcesses(folder, budget=budget)
    return shared_start(tenants=Tenants(tenants), max_body_bytes=MAX_BODY_BYTES, processes=processes)


def ask(running: Running, key: str, path: str = "chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", **({"messages": QUESTION} if path == "chat/completions" else {}), **fields}
    keys = {"Authorization": f"Bearer {key}"}
    return http.post(f"{running.url}/v1/{path}", json=body, headers=keys, timeout=60)


def test_a_tenant_of_dear_texts_waits_and_others_do_not(guarded: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": json.loads(DEAR)}}
    for _ in range(3):
        refused = ask(guarded, "attacker", response_format=form)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "over_budget")
        assert "takes more than 0.6 s of processor time or 64 MiB of memory" in error["message"]
    for dear in (
        {"response_format": form},
        {"path": "completions", "prompt": "plain words " * 10_000},
        {"guided_regex": "a"},
    ):
        late = ask(guarded, "attacker", **dear)
        assert late.status_code == 429
        assert late.json()["error"]["message"] == "Limit of 1 seconds of reading a minute reached"
        assert int(late.headers["retry-after"]) > 0
    # What is cheap to read goes on.
    assert ask(guarded, "attacker").status_code == 200
    small = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    for fields in ({}, {"response_format": small}):
        assert ask(guarded, "victim", **fields).status_code == 200
    long = ask(guarded, "victim", path="completions", prompt="plain words " * 10_000)
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_beyond_its_memory_is_refused_by_its_field(guarded: Running) -> None:
    text = "\N{FACE WITH TEARS OF JOY}" * 250_000
    for path, fields, param in (
        ("completions", {"prompt": text}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("responses", {"input": text}, "input"),
        ("../tokenize", {"prompt": text}, "prompt"),
    ):
        refused = ask(guarded, "unlimited", path=path, **fields)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, param, "over_budget")


def test_a_form_that_the_engine_refuses_is_charged(start: Start) -> None:
    """By the time that it took, which is not bounded here."""
    limits = TenantLimits(reading_seconds_per_minute=1)
    unheld = Reply([], ending=Ending.ERROR, error="guided_decoding_guide: takes too long to compile")

    def compile_slowly(_: Received) -> Reply:
        time.sleep(1.5)
        return unheld

    tenants = Tenants({key_of("a"): Tenant("a", limits, clock=lambda: 0.0)})
    running = start(compile_slowly, tenants=tenants)
    refused = ask(running, "a", guided_regex="(a{1000}){1000}")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
    assert ask(running, "a", guided_regex="b").status_code == 429
    assert len(running.upstream.requests) == 1
