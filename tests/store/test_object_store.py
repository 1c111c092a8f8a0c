"""Artifacts in an object store, by a folder and by HTTP: verified while they come, whole or not there at all."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeline.cli.store import command
from pipeline.errors import DamagedArtifact, StoreError, UserError
from pipeline.store import Artifact, Store, ranged_fetch
from pipeline.store.object_store import fetch_artifact, send_artifact

FILES = {
    "deployment.json": b"{}",
    "model_repository/tensorrt_llm/1/weights.bin": bytes(range(256)) * 40_000,
    "model_repository/preprocessing/1/tokenizer/tokenizer.json": b"t" * (2 << 20),
    "model_repository/an empty file": b"",
}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_fetch, "_PAUSE_S", 0.001)


@pytest.fixture
def artifact(publish: Callable[..., Artifact]) -> Artifact:
    return publish(FILES)


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "manifest.txt")
    }


def test_what_is_sent_comes_back(artifact: Artifact, bucket: Path, tmp_path: Path) -> None:
    place = send_artifact(artifact, f"file://{bucket}")
    assert place == f"file://{bucket}/{artifact.name}"
    assert send_artifact(artifact, f"file://{bucket}/") == place, "what is there is not sent again"
    got = fetch_artifact(artifact.name, f"file://{bucket}", tmp_path / "pod")
    assert got.path == tmp_path / "pod" / artifact.name
    assert content(got.path) == FILES
    assert got.digest == artifact.digest
    assert not [path for path in (tmp_path / "pod").iterdir() if path != got.path]
    assert fetch_artifact(artifact.name, "file:///nowhere", tmp_path / "pod").path == got.path, "it is there"


class Handler(SimpleHTTPRequestHandler):
    """Files of a folder, and a record of what was asked for."""

    asked: list[str]
    # Ends a stream after so many bytes of the weights.
    cut: int | None

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.cut is not None and self.path.endswith("weights.bin"):
            path = Path(self.translate_path(self.path))
            self.send_response(200)
            self.send_header("Content-Length", str(path.stat().st_size))
            self.end_headers()
            self.wfile.write(path.read_bytes()[: self.cut])
            return
        super().do_GET()


@pytest.fixture
def web(bucket: Path) -> Iterator[tuple[str, type[Handler]]]:
    bucket.mkdir()
    handler = type("OneTest", (Handler,), {"asked": [], "cut": None})
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(bucket))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def test_a_fetch_that_broke_goes_on_where_it_was(
    artifact: Artifact, bucket: Path, web: tuple[str, type[Handler]], tmp_path: Path
) -> None:
    address, handler = web
    send_artifact(artifact, f"file://{bucket}")
    handler.cut = 1000
    with pytest.raises((StoreError, DamagedArtifact), match=r"weights\.bin|cannot be read"):
        fetch_artifact(artifact.name, address, tmp_path / "pod")
    assert not (tmp_path / "pod" / artifact.name).exists()
    handler.cut = None
    handler.asked.clear()
    got = fetch_artifact(artifact.name, address, tmp_path / "pod")
    assert content(got.path) == FILES
    fetched = {path.rpartition("/")[2] for path in handler.asked}
    assert "weights.bin" in fetched
    assert "tokenizer.json" not in fetched


def test_what_was_changed_there_is_refused(artifact: Artifact, bucket: Path, tmp_path: Path) -> None:
    send_artifact(artifact, f"file://{bucket}")
    weights = bucket / artifact.name / "model_repository/tensorrt_llm/1/weights.bin"
    weights.chmod(0o644)
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    (bucket / artifact.name / "deployment.json").unlink()
    with pytest.raises(DamagedArtifact) as caught:
        fetch_artifact(artifact.name, f"file://{bucket}", tmp_path / "pod")
    assert "weights.bin: has not the" in str(caught.value)
    assert "deployment.json: is missing" in str(caught.value)
    assert not (tmp_path / "pod" / artifact.name).exists()


@pytest.mark.parametrize("change", ["other", "outside", "settings"])
def test_a_manifest_of_something_else_is_refused(
    artifact: Artifact, bucket: Path, tmp_path: Path, change: str
) -> None:
    send_artifact(artifact, f"file://{bucket}")
    file, name = bucket / artifact.name / "manifest.json", artifact.name
    record = json.loads(file.read_text())
    if change == "other":
        name = "package-" + "0" * 20
        (bucket / artifact.name).rename(bucket / name)
        file = bucket / name / "manifest.json"
    elif change == "outside":
        record["files"]["../../evil"] = {"bytes": 1, "sha256": "0" * 64}
    else:
        record["settings"] = {"n": 2}
    file.chmod(0o644)
    file.write_text(json.dumps(record))
    with pytest.raises(DamagedArtifact, match=r"names files elsewhere|is that of"):
        fetch_artifact(name, f"file://{bucket}", tmp_path / "pod")
    assert not (tmp_path / "evil").exists()


def test_the_commands(artifact: Artifact, bucket: Path, tmp_path: Path) -> None:
    store = ["--store", str(tmp_path / "store")]
    sent = CliRunner().invoke(command, ["push", artifact.name[:12], f"file://{bucket}", *store])
    assert sent.stdout == f"file://{bucket}/{artifact.name}\n", sent.output
    words = [
        "pull",
        artifact.name,
        f"file://{bucket}",
        "--output",
        str(tmp_path / "pod"),
        "--without-weights",
    ]
    got = CliRunner().invoke(command, words)
    assert got.stdout == f"{tmp_path / 'pod' / artifact.name}\n", got.output
    assert set(content(tmp_path / "pod" / artifact.name)) == {name for name in FILES if "weights" not in name}
    other = ["--store", str(tmp_path / "other")]
    assert CliRunner().invoke(command, ["pull", artifact.name, f"file://{bucket}", *other]).exit_code == 0
    shown = CliRunner().invoke(command, ["verify", *other])
    assert "intact" in shown.stdout


def test_what_cannot_be_is_said(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not the address of an object store"):
        send_artifact(artifact, "/some/folder")
    with pytest.raises(UserError, match="`pipeline store push` sends it there"):
        fetch_artifact(artifact.name, f"file://{tmp_path / 'empty'}", tmp_path / "pod")
    with pytest.raises(StoreError, match="cannot be read"):
        fetch_artifact(artifact.name, "http://127.0.0.1:9/models", tmp_path / "pod")
    assert not list(tmp_path.rglob("*.part"))


def test_packages_that_others_serve_are_kept(publish: Callable[..., Artifact], tmp_path: Path) -> None:
    """Roll-back needs the package before: nothing removes one that is named."""
    packages = [publish({"file": b"x"}, number) for number in range(3)]
    store = Store(tmp_path / "store")
    words = ["gc", "--yes", "--keep", packages[0].name, "--store", str(store.root)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    left = {artifact.name for artifact in store.list()}
    assert packages[0].name in left
    assert len(left) == 2
