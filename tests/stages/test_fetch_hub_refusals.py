"""What a hub refuses, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fetching import REPO, Asked, get, held, refused
from tests.support.hub import CONFIG, LoopbackHub, whole


def test_a_gated_model_without_a_token(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole(), gated=True)
    assert refused(into) == (
        f"hf:org/name is gated, and HF_TOKEN is not set: accept its licence at {hub.url}/org/name, "
        "then set HF_TOKEN to a token of the account that did"
    )
    assert hub.fetched() <= {"config.json", "tokenizer.json", "tokenizer_config.json"}, (
        "no weights were asked for"
    )


def test_a_gated_model_with_a_token_without_access(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, whole(), gated=True)
    hub.members = ("hf_other",)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    message = refused(into)
    assert "is gated, and the account of HF_TOKEN has no access: accept its licence at" in message
    assert hub.token not in message
    hub.members = (hub.token,)
    get(into)


@pytest.mark.parametrize("token", ["", "hf_secret"])
def test_a_repository_that_is_not_there(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hope = "the account of HF_TOKEN cannot see it" if token else "it is private: set HF_TOKEN"
    assert refused(into) == f"hf:org/name does not exist on {hub.url}, or {hope}"


def test_a_private_repository(hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, whole(), private=True)
    assert "or it is private: set HF_TOKEN" in refused(into)
    monkeypatch.setenv("HF_TOKEN", hub.token)
    get(into)


@pytest.mark.parametrize("revision", ["v9", "f" * 40])
def test_a_revision_that_is_not_there(hub: LoopbackHub, into: Path, revision: str) -> None:
    hub.add(REPO, whole())
    message = refused(into, Asked(revision=revision))
    assert (
        message == f"hf:org/name has no revision {revision!r}; {hub.url}/org/name/commits lists what it has"
    )


def test_a_token_that_is_refused(hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, whole())
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    message = refused(into)
    assert message == f"hf:org/name: {hub.url} refuses HF_TOKEN: it has expired or is mistyped"


@pytest.mark.parametrize("token", ["hf_größe", "hf_a\x07b"])
def test_what_is_no_token_is_not_sent(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    message = refused(into)
    assert "HF_TOKEN is not a token" in message
    assert token not in message
    assert hub.requests == []


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_wrong_bytes_are_refused(hub: LoopbackHub, into: Path, name: str) -> None:
    hub.add(REPO, whole())
    right = whole()[name]
    hub.faults.content = {name: right[:-1] + bytes([right[-1] ^ 1])}
    message = refused(into)
    assert f"hf:org/name: {name} arrives with the hash" in message
    assert "a proxy or mirror alters it" in message
    assert not (into / name).exists()
    hub.faults.content = {}
    get(into)
    assert held(into) == whole()


def test_a_file_that_is_too_long_is_refused(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.content = {"config.json": CONFIG + b" "}
    assert f"config.json is longer than the {len(CONFIG)} bytes of the Hub's list" in refused(into)


@pytest.mark.usefixtures("hub")
def test_no_network(into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    message = refused(into)
    assert message.startswith(
        "hf:org/name: http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)"
    )
    assert message.endswith("what the store has already can be built with HF_HUB_OFFLINE=1")
    monkeypatch.setenv("HF_ENDPOINT", "somewhere")
    assert "somewhere cannot be reached" in refused(into)


def test_what_is_no_hub(hub: LoopbackHub, into: Path) -> None:
    hub.faults.html = True
    message = refused(into)
    assert f"{hub.url} does not answer like a Hugging Face Hub (JSONDecodeError: Expecting value" in message
    assert message.endswith("check HF_ENDPOINT")
    assert "does not answer like a Hugging Face Hub" in refused(into, Asked(revision="a" * 40))


def test_a_password_in_the_endpoint_is_not_shown(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http://", "http://user:password@"))
    message = refused(into)
    assert f"does not exist on {hub.url}" in message
    assert "password" not in message
