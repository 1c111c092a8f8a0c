"""Keys, and what each tenant may use."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import openai
import pytest

from pipeline.errors import InvalidInput
from pipeline.gateway.errors import ApiError
from pipeline.gateway.tenants import Limits, Tenant, Tenants
from tests.gateway.conftest import Start

QUESTION = [{"role": "user", "content": "Hi"}]


def load(tmp_path: Path, text: str) -> Tenants:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return Tenants.load(path)


def test_keys_in_the_clear_and_hashed(tmp_path: Path) -> None:
    digest = sha256(b"secret").hexdigest()
    tenants = load(tmp_path, f"tenants:\n  a: {{keys: [plain]}}\n  b: {{keys: ['sha256:{digest}']}}\n")
    assert tenants.of("Bearer plain").name == "a"
    assert tenants.of("bearer secret").name == "b"
    for wrong in (None, "Bearer nobody", "Basic plain", "plain"):
        with pytest.raises(ApiError) as refused:
            tenants.of(wrong)
        assert refused.value.status == 401


def test_a_file_with_faults_lists_them_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as refused:
        load(tmp_path, "tenants:\n  a: {keys: []}\n  b: {keys: [x], limits: {concurrency: 0, other: 1}}\n")
    text = str(refused.value)
    assert all(
        key in text for key in ("tenants.a.keys", "tenants.b.limits.concurrency", "tenants.b.limits.other")
    )


def test_requests_a_minute_fill_up_again() -> None:
    now = [0.0]
    tenant = Tenant("t", Limits(requests_per_minute=2), clock=lambda: now[0])
    for _ in range(2):
        tenant.admit()
    with pytest.raises(ApiError, match="2 requests a minute") as refused:
        tenant.admit()
    assert refused.value.retry_after_s == pytest.approx(30)
    now[0] = 30.0
    tenant.admit()


def test_tokens_a_minute_and_concurrency() -> None:
    tenant = Tenant("t", Limits(tokens_per_minute=100, concurrency=1), clock=lambda: 0.0)
    with tenant.request(60), pytest.raises(ApiError, match="At most 1 requests at once"), tenant.request(1):
        pass
    with pytest.raises(ApiError, match="100 tokens a minute"), tenant.request(60):
        pass


def test_what_is_refused_costs_no_more_than_a_minute() -> None:
    now = [0.0]
    tenant = Tenant("t", Limits(tokens_per_minute=100), clock=lambda: now[0])
    tenant.charge(1_000_000)
    with pytest.raises(ApiError, match="100 tokens a minute") as refused, tenant.request(50):
        pass
    assert refused.value.retry_after_s == pytest.approx(90)


def test_tenants_share_no_answers(start: Start, tmp_path: Path) -> None:
    running = start(cached=True, tenants=load(tmp_path, "tenants:\n  a: {keys: [ka]}\n  b: {keys: [kb]}\n"))
    for key in ("ka", "kb", "ka"):
        running.client(key).chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    assert len(running.upstream.requests) == 2
    with pytest.raises(openai.AuthenticationError):
        running.client("other").chat.completions.create(model="tiny", messages=QUESTION)
