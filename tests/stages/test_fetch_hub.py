"""Fetching from a hub on loopback: the way that works, and every way that does not."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from pipeline.errors import SourceError
from pipeline.progress import Silent, Task
from pipeline.recipe import HubSource
from pipeline.stages.fetch import HubCheckpoint, failures, fetch, resolve, transfer
from pipeline.store import ArtifactKey, Store
from tests.support.checkpoints import CONFIG, index, sharded, weights, whole
from tests.support.hub import LoopbackHub

REPO = "org/name"
SOURCE = HubSource(REPO)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@dataclass(frozen=True)
class Asked:
    """As a recipe's `model` section."""

    source: HubSource = SOURCE
    revision: str | None = None
    allow_pickle: bool = False


class Recorder(Silent):
    """Keeps what is reported."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.tasks: list[Recorder.Recorded] = []

    @dataclass
    class Recorded:
        label: str
        total: float | None
        done: float = 0

        def advance(self, amount: float = 1) -> None:
            self.done += amount

    def say(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def task(self, label: str, total: float | None = None, unit: str = "") -> Iterator[Task]:  # noqa: ARG002
        self.tasks.append(self.Recorded(label, total))
        yield self.tasks[-1]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    with LoopbackHub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url + "/")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(failures, "WAITS_S", (0.01, 0.01, 0.01))
        yield running


@pytest.fixture
def into(tmp_path: Path) -> Path:
    folder = tmp_path / "into"
    folder.mkdir()
    return folder


def get(into: Path, asked: Asked = Asked(), progress: Silent | None = None) -> dict[str, object]:
    return fetch(resolve(asked), into, progress=progress or Silent())  # type: ignore[return-value]


def held(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(into: Path, asked: Asked = Asked()) -> str:
    with pytest.raises(SourceError) as caught:
        get(into, asked)
    assert caught.value.exit_code == 2
    return str(caught.value)


# the way that works


def test_revisions_become_commits(hub: LoopbackHub) -> None:
    old = hub.add(REPO, whole(rows=1), branch="v1.0")
    new = hub.add(REPO, whole(rows=2))
    assert resolve(Asked()) == HubCheckpoint(REPO, new)
    assert resolve(Asked(revision="main")) == HubCheckpoint(REPO, new)
    assert resolve(Asked(revision="v1.0")).identity == {"source": "hf:org/name", "commit": old}
    assert resolve(Asked(allow_pickle=True)).identity["allow_pickle"] is True


def test_a_full_commit_is_taken_without_asking(hub: LoopbackHub) -> None:
    assert resolve(Asked(revision="a" * 40)) == HubCheckpoint(REPO, "a" * 40)
    assert hub.requests == []


def test_only_what_is_needed_is_fetched(hub: LoopbackHub, into: Path) -> None:
    wanted = whole() | {
        "chat_template.jinja": b"{{ messages }}",
        "generation_config.json": b"{}",
        "merges.txt": b"a b",
    }
    others = {
        "README.md": b"#",
        "modeling_llama.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "consolidated.safetensors": b"another copy",
        "adapter_model.safetensors": b"not the model",
        "model.gguf": b"gguf",
        "original/params.json": b"{}",
        "onnx/model.safetensors": b"nested",
    }
    commit = hub.add(REPO, wanted | others)
    facts = get(into)
    assert held(into) == wanted
    assert hub.fetched() == set(wanted)
    others_asked = [request.path for request in hub.requests if "/resolve/" not in request.path]
    assert others_asked == ["/api/models/org/name", f"/api/models/org/name/tree/{commit}"]
    assert facts == {
        "source": "hf:org/name",
        "revision": None,
        "commit": commit,
        "pickled": False,
        "architectures": ["LlamaForCausalLM"],
        "tensors": 2,
        "parameters": 2048,
        "dtypes": {"F32": 2},
    }


def test_shards_follow_their_index_and_lists_come_in_pages(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded() | {"model-00003-of-00002.safetensors": b"left over"})
    hub.faults.page_size = 2
    get(into)
    assert held(into) == sharded()


def test_large_files_come_from_another_host_which_gets_no_token(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    hub.add(REPO, sharded(), gated=True)
    hub.faults.redirect = True
    get(into)
    assert held(into) == sharded()
    at = {server: [r for r in hub.requests if r.server == server] for server in ("hub", "cdn")}
    assert {request.authorization for request in at["hub"]} == {"Bearer hf_secret"}
    assert [request.authorization for request in at["cdn"]] == ["", ""]


def test_without_a_token_none_is_sent(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    get(into)
    assert {request.authorization for request in hub.requests} == {""}


def test_progress_counts_bytes(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded())
    hub.faults.break_once = {SHARDS[0]: 1000}
    progress = Recorder()
    get(into, progress=progress)
    small, large = progress.tasks
    assert large.label == "download org/name"
    assert large.total == large.done == sum(len(sharded()[name]) for name in SHARDS)
    assert small.done == small.total


# transfers that break


def test_a_broken_transfer_goes_on_where_it_broke(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_once = {"model.safetensors": 1000}
    progress = Recorder()
    get(into, progress=progress)
    assert hub.ranges("model.safetensors") == ["", "bytes=1000-"]
    assert held(into) == whole()
    (line,) = progress.lines
    assert line.startswith("hf:org/name: ")
    assert line.endswith("trying again in 0.01 s")


def test_a_broken_transfer_from_another_host_goes_on_too(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.redirect = True
    hub.faults.break_once = {"model.safetensors": 1000}
    get(into)
    assert [request.range for request in hub.requests if request.server == "cdn"] == ["", "bytes=1000-"]
    assert held(into) == whole()


def test_the_next_process_asks_only_for_the_rest(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 0}
    hub.faults.break_once = {"model.safetensors": 3000}
    assert "cannot be reached" in refused(into)
    assert (into / ".partial" / "model.safetensors").stat().st_size == 3000
    hub.faults.break_always = {}
    hub.requests.clear()
    progress = Recorder()
    get(into, progress=progress)
    assert hub.fetched() == {"model.safetensors"}, "the small files were there"
    assert hub.ranges("model.safetensors") == ["bytes=3000-"]
    assert held(into) == whole()
    assert progress.lines[-1] == "hf:org/name: 2.9 KiB of 8.1 KiB are here from an earlier try"
    task = progress.tasks[-1]
    assert task.total == task.done == len(whole()["model.safetensors"]) - 3000


def test_progress_made_earns_patience(hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More breaks than retries in a row, but each try brings enough bytes."""
    monkeypatch.setattr(transfer, "_PROGRESS_BYTES", 1000)
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 1000}
    get(into)
    assert len(hub.ranges("model.safetensors")) == -(-len(whole()["model.safetensors"]) // 1000)
    assert held(into) == whole()


def test_a_server_that_trickles_is_given_up(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.break_always = {"model.safetensors": 10}
    assert "cannot be reached (peer closed connection" in refused(into)
    assert hub.ranges("model.safetensors") == ["", "bytes=10-", "bytes=20-", "bytes=30-"]


@pytest.mark.parametrize("fault", ["ignore_range", "shift_range"])
def test_a_server_that_does_not_resume_properly(hub: LoopbackHub, into: Path, fault: str) -> None:
    hub.add(REPO, whole())
    hub.faults.break_once = {"model.safetensors": 1000}
    setattr(hub.faults, fault, 7)
    progress = Recorder()
    get(into, progress=progress)
    assert held(into) == whole()
    assert progress.tasks[-1].done == progress.tasks[-1].total


def test_a_stalled_transfer_is_given_up_and_taken_up_again(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.add(REPO, whole())
    hub.faults.stall_once = {"model.safetensors": 500}
    start = time.monotonic()
    get(into)
    assert time.monotonic() - start < 1.9
    assert hub.ranges("model.safetensors") == ["", "bytes=500-"]
    assert held(into) == whole()


def test_a_damaged_part_is_thrown_away(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    (into / ".partial").mkdir()
    (into / ".partial" / "model.safetensors").write_bytes(b"x" * 700)
    (into / ".partial" / "config.json").write_bytes(b"x" * 7000)
    get(into)
    assert hub.ranges("model.safetensors") == ["bytes=700-", ""]
    assert held(into) == whole()


@pytest.mark.parametrize("statuses", [[503], [500, 502, 504], [429, 408]])
@pytest.mark.parametrize("subject", ["model.safetensors", "tree", "revision"])
def test_a_server_out_of_order_is_asked_again(
    hub: LoopbackHub, into: Path, subject: str, statuses: list[int]
) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses = {subject: list(statuses)}
    get(into)
    assert held(into) == whole()


@pytest.mark.parametrize("subject", ["config.json", "tree", "revision"])
def test_a_server_that_stays_out_of_order(hub: LoopbackHub, into: Path, subject: str) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses = {subject: [503] * 99}
    assert (
        refused(into)
        == f"hf:org/name: {hub.url} is out of order (503, several times in a row); try again later"
    )


def test_a_server_may_ask_for_more_time(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole())
    hub.faults.statuses, hub.faults.retry_after = {"tree": [429]}, "1"
    progress = Recorder()
    start = time.monotonic()
    get(into, progress=progress)
    assert time.monotonic() - start >= 1
    assert progress.lines == ["hf:org/name: answer 429; trying again in 1 s"]


def test_the_first_failure_stops_the_other_files(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, sharded(rows=20_000))
    hub.faults.bytes_per_s = 500_000
    hub.faults.statuses = {SHARDS[1]: [404]}
    start = time.monotonic()
    assert f"{SHARDS[1]} is not there (404)" in refused(into)
    assert time.monotonic() - start < 2
    assert (into / ".partial" / SHARDS[0]).exists(), "what came of the other stays for the next time"


# refusals


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
    assert message.endswith("what the store has already can be built with --offline")
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


# disks


def test_too_small_a_disk_is_found_before_the_weights(
    hub: LoopbackHub, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, sharded())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    message = refused(into)
    assert "hf:org/name: 8.1 KiB are to be downloaded" in message
    assert "has 4.0 KiB free; make room (`pipeline store gc`)" in message
    assert not hub.fetched() & set(SHARDS)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no small filesystem can be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_too_small(hub: LoopbackHub, small_disk: Path) -> None:
    hub.add(REPO, sharded(rows=20_000))
    assert "2.4 MiB are to be downloaded" in refused(small_disk)
    assert not hub.fetched() & set(SHARDS)


# content


def test_pickled_weights_are_refused(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, {"config.json": CONFIG, "pytorch_model.bin": b"pickle"})
    message = refused(into)
    assert "has only pickled weights (pytorch_model.bin), which can run code when they are read" in message
    assert "set allow_pickle: true beside its source" in message
    assert hub.fetched() == set()


def test_safetensors_go_before_pickles(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole() | {"pytorch_model.bin": b"pickle"})
    get(into, Asked(allow_pickle=True))
    assert held(into) == whole()


class Mischief:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path(__file__).with_name("mischief"),))  # type: ignore[return-value]


def test_code_in_pickled_weights_does_not_run(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, {"config.json": CONFIG, "pytorch_model.bin": pickle.dumps({"a": Mischief()}, 2)})
    assert "pytorch_model.bin is not a file of plain tensors" in refused(into, Asked(allow_pickle=True))
    assert not Path(__file__).with_name("mischief").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(b"{", "Expecting property name"), (b"[]", "it is not an object"), (b"", "Expecting value")],
)
def test_a_damaged_configuration(hub: LoopbackHub, into: Path, text: bytes, reason: str) -> None:
    hub.add(REPO, whole() | {"config.json": text})
    assert f"hf:org/name: config.json is damaged: {reason}" in refused(into)


def test_weights_whose_header_does_not_add_up(hub: LoopbackHub, into: Path) -> None:
    hub.add(REPO, whole() | {"model.safetensors": weights("a") + b"more"})
    assert "hf:org/name: model.safetensors is" in refused(into)


def test_an_index_that_names_what_is_not_there(hub: LoopbackHub, into: Path) -> None:
    files = sharded()
    del files[SHARDS[1]]
    hub.add(REPO, files)
    message = refused(into)
    assert message == f"hf:org/name: model.safetensors.index.json names files that are not there: {SHARDS[1]}"


def test_an_index_that_lies_about_its_files(hub: LoopbackHub, into: Path) -> None:
    hub.add(
        REPO,
        sharded() | {"model.safetensors.index.json": index({"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})},
    )
    assert "names tensors that its files do not hold: c" in refused(into)


# offline


def test_offline_a_branch_is_what_it_was(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.add(REPO, whole())
    store = Store(tmp_path / "store")
    for revision in (None, "main"):
        resolved = resolve(Asked(revision=revision), store=store)
        key = ArtifactKey("fetch", resolved.identity, resumable=True)
        store.obtain(key, lambda into, r=resolved: fetch(r, into, progress=Silent()), recipe="tiny")  # type: ignore[misc]
    hub.add(REPO, whole(rows=3))
    hub.requests.clear()
    assert resolve(Asked(), store=store, offline=True) == HubCheckpoint(REPO, commit)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again = resolve(Asked(), store=store)
    assert store.find(ArtifactKey("fetch", again.identity)) is not None
    for revision, store_of in (("v2", store), (None, None)):
        with pytest.raises(
            SourceError, match=r"offline, .* cannot be resolved; set revision to a full commit"
        ) as caught:
            resolve(Asked(revision=revision), store=store_of)
        assert (commit in str(caught.value)) is (store_of is not None)
    assert hub.requests == []
    store.close()


def test_offline_nothing_is_downloaded(hub: LoopbackHub, into: Path) -> None:
    commit = hub.add(REPO, whole())
    resolved = resolve(Asked(revision=commit), offline=True)
    with pytest.raises(SourceError, match="not in the store, and the Hub is not asked in offline mode"):
        fetch(resolved, into, progress=Silent())
    assert hub.requests == []
