"""Large files of an object store: in parts, several at once, resumed after a cut and after a kill, in little memory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import DamagedArtifact, StoreError, UserError
from pipeline.store import Artifact, ranged_fetch
from pipeline.store.object_store import content_digest, fetch_artifact, send_artifact
from tests.support.object_server import ObjectServer
from tests.support.waiting import wait_for

PART = 1 << 18
WEIGHTS = random.Random(7).randbytes(24 * PART + 12345)
FILES = {"weights.bin": WEIGHTS, "config.json": b"{}", "empty": b""}


@pytest.fixture
def artifact(publish: Callable[..., Artifact]) -> Artifact:
    return publish(FILES)


@pytest.fixture
def server(artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """With the artifact, in small parts."""
    monkeypatch.setattr(ranged_fetch, "PART", PART)
    monkeypatch.setattr(ranged_fetch, "_PAUSE_S", 0.001)
    send_artifact(artifact, f"file://{tmp_path / 'bucket'}")
    with ObjectServer(tmp_path / "bucket") as server:
        yield server


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("manifest")}


def test_parts_come_at_once_and_each_byte_once(
    artifact: Artifact, server: ObjectServer, tmp_path: Path
) -> None:
    server.pause_s = 0.005
    got = fetch_artifact(artifact.name, server.url, tmp_path / "pod")
    assert content(got.path) == FILES
    assert not [path for path in got.path.iterdir() if path.name.startswith(".")]
    assert server.served["weights.bin"] == len(WEIGHTS)
    assert len(server.ranges["weights.bin"]) == 25
    assert "config.json" not in server.ranges
    assert server.most_at_once >= 2


@pytest.mark.parametrize("cut_after", [0, 70_000, PART - 1])
def test_a_part_goes_on_where_it_was_cut(
    artifact: Artifact, server: ObjectServer, tmp_path: Path, cut_after: int
) -> None:
    """What came before a cut is not fetched again, but for what the transport had not handed over yet."""
    server.cut_after, server.cuts = cut_after, 12
    got = fetch_artifact(artifact.name, server.url, tmp_path / "pod")
    assert content(got.path) == FILES
    assert server.served["weights.bin"] <= len(WEIGHTS) + 12 * PART


def test_a_server_that_always_cuts_is_given_up(
    artifact: Artifact, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The transport tries again by itself, too.
    monkeypatch.setattr(ranged_fetch, "_ATTEMPTS", 1)
    server.cut_after = 0
    with pytest.raises(StoreError, match="cannot be read"):
        fetch_artifact(artifact.name, server.url, tmp_path / "pod")
    assert not (tmp_path / "pod" / artifact.name).exists()


def test_what_a_killed_process_had_is_not_fetched_again(
    artifact: Artifact, server: ObjectServer, tmp_path: Path
) -> None:
    """Killed without a word; whole parts are known by the journal beside the draft."""
    server.pause_s = 0.02
    code = (
        "import sys; from pathlib import Path; from pipeline.store import ranged_fetch; "
        f"ranged_fetch.PART = {PART}; from pipeline.store.object_store import fetch_artifact; "
        "fetch_artifact(sys.argv[1], sys.argv[2], Path(sys.argv[3]))"
    )
    line = [sys.executable, "-c", code, artifact.name, server.url, str(tmp_path / "pod")]
    journal = tmp_path / "pod" / f".{artifact.name}.part" / ".weights.bin.parts"
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: journal.is_file() and len(journal.read_text().split()) >= 10, "ten parts", 60)
        os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: server.open == 0, "the end of its connections", 60)
    had = len(journal.read_text().split())
    assert had < 25
    server.served.clear()
    server.pause_s = 0.0
    got = fetch_artifact(artifact.name, server.url, tmp_path / "pod")
    assert content(got.path) == FILES
    assert server.served["weights.bin"] <= len(WEIGHTS) - (had - 1) * PART


def test_a_draft_that_was_changed_meanwhile_is_noticed(
    artifact: Artifact, server: ObjectServer, tmp_path: Path
) -> None:
    part = tmp_path / "pod" / f".{artifact.name}.part"
    part.mkdir(parents=True)
    (part / ".weights.bin.draft").write_bytes(bytes(len(WEIGHTS)))
    (part / ".weights.bin.parts").write_text("0\n1\nnonsense\n999\n")
    with pytest.raises(DamagedArtifact, match=r"weights\.bin: has not the"):
        fetch_artifact(artifact.name, server.url, tmp_path / "pod")
    assert content(fetch_artifact(artifact.name, server.url, tmp_path / "pod").path) == FILES


def test_memory_does_not_grow_with_files(artifact: Artifact, server: ObjectServer, tmp_path: Path) -> None:
    """The file is written as it arrives, and not kept in memory."""
    code = (
        "import sys, resource; from pathlib import Path; from pipeline.store import ranged_fetch; "
        f"ranged_fetch.PART = {PART}; from pipeline.store.object_store import fetch_artifact; "
        "fetch_artifact(sys.argv[1], sys.argv[2], Path(sys.argv[3]) / 'first'); "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
        "[fetch_artifact(sys.argv[1], sys.argv[2], Path(sys.argv[3]) / str(n)) for n in range(8)]; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    line = [sys.executable, "-c", code, artifact.name, server.url, str(tmp_path / "pod")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 16 << 10, "KiB, after 48 MiB more"


# By content, and by a server of one's own.


def test_an_artifact_is_named_by_its_content(
    artifact: Artifact, server: ObjectServer, tmp_path: Path
) -> None:
    """Another content under the same name, consistent in itself, is refused; so is one that lies there already."""
    named = f"{artifact.name}@sha256:{content_digest(artifact.path)}"
    assert content(fetch_artifact(named, server.url, tmp_path / "pod").path) == FILES
    assert fetch_artifact(named, "file:///nowhere", tmp_path / "pod").name == artifact.name
    file = tmp_path / "bucket" / artifact.name / "manifest.json"
    file.chmod(0o644)
    file.write_text(file.read_text().replace('"host": "', '"host": "other-'))
    for folder in ("other", "pod"):
        with pytest.raises(DamagedArtifact, match="was named with"):
            fetch_artifact(f"{artifact.name}@sha256:{'0' * 64}", server.url, tmp_path / folder)
    with pytest.raises(DamagedArtifact, match="was named with"):
        fetch_artifact(named, server.url, tmp_path / "other")
    assert fetch_artifact(artifact.name, server.url, tmp_path / "other").name == artifact.name


def test_a_server_that_speaks_s3_is_named_beside_the_bucket(
    publish: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "minio")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with ObjectServer(tmp_path / "s3") as server:
        address = f"s3://models/packages?endpoint={server.url}"
        # In one request each: parts of uploads are S3's own.
        small = {**FILES, "weights.bin": b"w" * 1000}
        place = send_artifact(publish(small), address)
        assert place.startswith("s3://models/packages/package-")
        name = place.rpartition("/")[2]
        assert (tmp_path / "s3/models/packages" / name / "manifest.json").is_file()
        assert content(fetch_artifact(name, address, tmp_path / "pod").path) == small


@pytest.mark.parametrize(
    "address", ["s3://models?endpoint=", "s3://models?region=x", "gs://models?endpoint=http://a:1"]
)
def test_what_no_address_takes(address: str) -> None:
    with pytest.raises(UserError, match=r"takes \?endpoint="):
        fetch_artifact("package-0", address, Path("/nonexistent"))
