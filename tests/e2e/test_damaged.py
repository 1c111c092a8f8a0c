"""One bit of a built package has flipped, its size and its time are as before: nothing of it is served or built on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import DamagedArtifact
from pipeline.frontend.models import LocatedModel, load_served_model
from pipeline.gateway.settings import GatewayStart
from pipeline.progress import Silent
from pipeline.recipe import load_recipe
from pipeline.serving.ports import Ports
from pipeline.store import FileHashes, Manifest, Store
from pipeline.triton.repository import check_package, check_without_weights
from tests.e2e.conftest import Build, pipeline
from tests.store.test_hashes import flip_a_bit
from tests.support.hashed import HashedFiles

WEIGHTS = "model_repository/tensorrt_llm/1/target/openvino_model.bin"
TOKENIZER = "model_repository/preprocessing/1/tokenizer/tokenizer.json"


@pytest.fixture
def copied(build: Build, store: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A store of one's own, and the package of tiny-cpu in it."""
    package = Path(build("tiny-cpu")["artifact"])
    shutil.copytree(store / "artifacts", tmp_path / "store" / "artifacts")
    return tmp_path / "store", tmp_path / "store" / "artifacts" / package.name


def told_of(name: str, package: Path, done: subprocess.CompletedProcess[str]) -> None:
    published = Manifest.load(package).files[name].sha256
    assert done.returncode == 2, done.stderr
    assert f"{package}: damaged\n  {name}: has the SHA-256 " in done.stderr
    assert f", and was published with {published}\n" in done.stderr
    assert "` finds and removes what is damaged in the store; then build it again" in done.stderr
    assert "Traceback" not in done.stderr
    assert "ready after" not in done.stderr


@pytest.mark.servers
@pytest.mark.parametrize("name", [WEIGHTS, TOKENIZER])
def test_what_is_damaged_is_neither_built_on_nor_served(copied: tuple[Path, Path], name: str) -> None:
    root, package = copied
    flip_a_bit(package / name)
    told_of(name, package, pipeline("build", "tiny-cpu", store=root))
    ports = Ports.free()
    given = ("--set", f"triton={{grpc_port: {ports.grpc}, metrics_port: {ports.metrics}}}")
    told_of(name, package, pipeline("serve", "tiny-cpu", *given, store=root))
    container = subprocess.run(
        [sys.executable, "-m", "pipeline.serving.entrypoint"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ
        | {
            "PIPELINE_PACKAGE": str(package),
            "PIPELINE_ADDRESS": "127.0.0.1",
            "PIPELINE_GRPC_PORT": str(ports.grpc),
            "PIPELINE_METRICS_PORT": str(ports.metrics),
            "PIPELINE_READY_FILE": str(root / "ready.json"),
        },
    )
    told_of(name, package, container)
    assert not (root / "ready.json").exists()

    assert pipeline("store", "verify", "--remove", store=root).returncode == 1
    again = pipeline("build", "tiny-cpu", store=root)
    assert again.returncode == 0, again.stderr


def test_the_gateway_takes_no_other_tokenizer(copied: tuple[Path, Path]) -> None:
    root, package = copied
    flip_a_bit(package / TOKENIZER)
    with pytest.raises(DamagedArtifact, match=TOKENIZER):
        load_served_model(
            LocatedModel(load_recipe("tiny-cpu"), package, ("127.0.0.1:1",)),
            store=Store(root),
            start=GatewayStart(),
        )


@pytest.mark.parametrize("manifest", [True, False])
def test_weights_are_read_at_the_first_start_and_not_at_the_second(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, manifest: bool
) -> None:
    """With its manifest a package's files are judged each, without it all together."""
    monkeypatch.setattr("pipeline.store.hashes._SETTLED_S", -1.0)
    root, package = copied
    if not manifest:
        (package / "manifest.json").unlink()
    counted = HashedFiles(monkeypatch)
    for start in (1, 2):
        counted.names.clear()
        hashes = FileHashes(root / "hashes.json")
        check_without_weights(package, hashes, Silent())
        check_package(package, hashes, Silent())
        assert counted.names.count("openvino_model.bin") == (2 if start == 1 else 0), "of target and draft"
    flip_a_bit(package / WEIGHTS)
    with pytest.raises(DamagedArtifact):
        check_package(package, FileHashes(root / "hashes.json"), Silent())
