"""Keys, and what each tenant may use."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path

import openai
import pytest

from pipeline.client.testing import Received, Reply
from pipeline.errors import InvalidInput
from pipeline.gateway.errors import ApiError
from pipeline.gateway.limits import Tenant, TenantLimits
from pipeline.gateway.tenants import Tenants
from tests.gateway.conftest import Start, keyed
from tests.support.waiting import wait_for

QUESTION = [{"role": "user", "content": "Hi"}]


def load(tmp_path: Path, text: str) -> Tenants:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return Tenants.load(path)


def test_keys_in_the_clear_and_hashed(tmp_path: Path) -> None:
    digest = sha256(b"secret").hexdigest()
    tenants = load(tmp_path, f"tenants:\n  a: {{keys: [plain]}}\n  b: {{keys: ['sha256:{digest}']}}\n")
    assert tenants.authenticate({"authorization": "Bearer plain"}).name == "a"
    assert tenants.authenticate({"authorization": "bearer secret"}).name == "b"
    for header in ("api-key", "x-api-key"):
        assert tenants.authenticate({header: "plain"}).name == "a"
    for wrong in (
        {},
        {"api-key": "nobody"},
        *({"authorization": text} for text in ("Bearer nobody", "Basic plain", "plain")),
    ):
        with pytest.raises(ApiError) as refused:
            tenants.authenticate(wrong)
        assert refused.value.status == 401


SECRET = "sk-SECRET-9f"
FAULTY = f"""tenants:
  a: {{keys: []}}
  b: {{keys: [{SECRET}], limits: {{concurrency: 0, {SECRET}: 1}}}}
  c:
    keys:
    - ""
    - "  "
    - {SECRET}
    - sha256:{sha256(SECRET.encode()).hexdigest().upper()}
    - sha256:{SECRET}
    - sha256:{sha256(b"").hexdigest()}
    - " {SECRET}2"
    - 17
  "": {{keys: [{SECRET}3]}}
  a: {{keys: [{SECRET}4]}}
{SECRET}: 1
"""


def test_a_file_with_faults_lists_them_all_and_no_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(tmp_path, FAULTY)
    path, (head, *faults) = tmp_path / "keys.yaml", str(refused.value).splitlines()
    assert head == f"{path}: 14 faults"
    assert [fault.strip().removeprefix(f"{path}:").partition(" (")[0] for fault in faults] == [
        "2: tenants.a.keys: is empty",
        "3: tenants.b.limits.concurrency: must be at least 1",
        "3: tenants.b.limits: has a key that is not known",
        "6: tenants.c.keys[0]: is empty",
        "8: tenants.c.keys[2]: is the same key as tenants.b.keys[0] on line 3",
        "9: tenants.c.keys[3]: is the same key as tenants.b.keys[0] on line 3",
        "10: tenants.c.keys[4]: begins with sha256: and is no SHA-256",
        "12: tenants.c.keys[6]: cannot be sent in a header",
        "13: tenants.c.keys[7]: must be text",
        "14: tenants: a tenant without a name",
        "15: stands twice; first on line 2",
        "16: has a key that is not known",
    ]
    assert "(3 times: also tenants.c.keys[1]; tenants.c.keys[5])" in faults[3]
    assert "SECRET" not in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"tenants:\n  a: {{keys: [{SECRET}: x, @{SECRET}]", ":2: is not YAML"),
        (f"tenants:\n  a: {{keys: !{SECRET} x}}", ":2: has a tag that means nothing here"),
        (f'tenants:\n  a: {{keys: ["\\{SECRET}"]}}', ":2: is not YAML"),
        (f"tenants:\n\ta: {SECRET}", ":2: is indented with a tab"),
        (f"{SECRET}", ":1: is one text, not a mapping of keys"),
        (f"tenants: {{a: {SECRET}}}", ":1: tenants.a: must be a section of keys"),
        (
            f"tenants: {{a: {{keys: [{SECRET}], limits: {{requests_per_minute: {SECRET}}}}}}}",
            "must be a whole number",
        ),
        (f"\x7fELF\x00{SECRET}", "holds the control character #x7f"),
        ("", ":1: is empty"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_in_a_line_without_a_key(
    tmp_path: Path, text: str, told: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(tmp_path, text)
    assert told in str(refused.value)
    assert "SECRET" not in str(refused.value)
    assert len(refused.value.faults) == 1


def test_a_binary_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(bytes(range(256)))
    with pytest.raises(InvalidInput, match=r"keys: 1 fault\n.*is not UTF-8 text"):
        Tenants.load(tmp_path / "keys")


def test_keys_that_every_account_may_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, "tenants: {a: {keys: [k]}}")
    (tmp_path / "keys.yaml").chmod(0o640)
    caplog.clear()
    Tenants.load(tmp_path / "keys.yaml")
    assert not caplog.text
    (tmp_path / "keys.yaml").chmod(0o644)
    Tenants.load(tmp_path / "keys.yaml")
    assert "every account of this machine may read the API keys (mode 0644): run chmod 600" in caplog.text


def test_requests_a_minute_fill_up_again() -> None:
    now = [0.0]
    tenant = Tenant("t", TenantLimits(requests_per_minute=2), clock=lambda: now[0])

    async def ask() -> None:
        for _ in range(2):
            await tenant.count_request()
        with pytest.raises(ApiError, match="2 requests a minute") as refused:
            await tenant.count_request()
        assert refused.value.retry_after_s == pytest.approx(30)
        now[0] = 30.0
        await tenant.count_request()

    asyncio.run(ask())


def test_tokens_a_minute_and_concurrency() -> None:
    tenant = Tenant("t", TenantLimits(tokens_per_minute=100, concurrency=1), clock=lambda: 0.0)

    async def ask() -> None:
        async with tenant.enforce_limits(60):
            with pytest.raises(ApiError, match="1 requests at once"):
                await tenant.enforce_limits(1).__aenter__()
        with pytest.raises(ApiError, match="100 tokens a minute"):
            await tenant.enforce_limits(60).__aenter__()
        assert tenant.running == 0

    asyncio.run(ask())


def test_what_is_refused_costs_no_more_than_a_minute() -> None:
    now = [0.0]
    tenant = Tenant("t", TenantLimits(tokens_per_minute=100), clock=lambda: now[0])

    async def ask() -> None:
        await tenant.charge_tokens(1_000_000)
        with pytest.raises(ApiError, match="100 tokens a minute") as refused:
            await tenant.enforce_limits(50).__aenter__()
        assert refused.value.retry_after_s == pytest.approx(90)

    asyncio.run(ask())


def test_tenants_share_no_answers(start: Start, tmp_path: Path) -> None:
    running = start(cached=True, tenants=load(tmp_path, "tenants:\n  a: {keys: [ka]}\n  b: {keys: [kb]}\n"))
    for key in ("ka", "kb", "ka"):
        running.client(key).chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    assert len(running.upstream.requests) == 2
    with pytest.raises(openai.AuthenticationError):
        running.client("other").chat.completions.create(model="tiny", messages=QUESTION)


def test_each_choice_is_a_request(start: Start) -> None:
    limits = TenantLimits(concurrency=4, requests_per_minute=8)
    tenants = Tenants({sha256(b"k").hexdigest(): Tenant("t", limits, clock=lambda: 0.0)})
    running = start(Reply(["x"] * 100, delay_s=0.05), places=16, tenants=tenants)
    client = running.client("k")
    ask = partial(client.completions.create, model="tiny", max_tokens=30)
    with pytest.raises(
        openai.BadRequestError, match=r"n: 32 choices, .* this key may have 4 at once"
    ) as refused:
        ask(prompt=["a", "b"], n=16)
    assert refused.value.param == "n"
    with ask(prompt=["a", "b"], stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="Limit of 4 requests at once"):
            ask(prompt="a", n=3)
        with ask(prompt="a", n=2, stream=True) as other:
            next(iter(other))
            # The other choice may not have been sent when the first one has a token.
            wait_for(lambda: len(running.upstream.requests) == 4, "both choices to be sent")
    # 1 + 2 + 1 + 2 of 8 are used up: what was refused counts once
    wait_for(lambda: not running.served.queue.running, "the end of both streams")
    with pytest.raises(openai.RateLimitError, match="Limit of 8 requests a minute"):
        ask(prompt="a", n=3)
    assert len(running.upstream.requests) == 4


def test_a_tenant_does_not_wait_for_all_choices_of_another(start: Start) -> None:
    released = threading.Event()

    def answer(_: Received) -> Reply:
        released.wait(30)
        return Reply(["x"])

    running = start(answer, places=4, max_waiting=64, tenants=keyed("a", "b"))
    ask = {
        name: partial(running.client(name).completions.create, model="tiny", max_tokens=30) for name in "ab"
    }
    with ThreadPoolExecutor(2) as threads:
        many = threads.submit(ask["a"], prompt=["many"] * 2, n=16)
        wait_for(lambda: running.served.queue.waiting == 28, "28 choices that wait")
        begun = threads.submit(ask["b"], prompt="one")
        wait_for(lambda: running.served.queue.waiting == 29, "one more")
        released.set()
        assert (len(many.result(30).choices), len(begun.result(30).choices)) == (32, 1)
    # at most the first four places are given anew together
    assert [request.prompt for request in running.upstream.requests].index("one") < 8
