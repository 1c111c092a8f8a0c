"""Signed artifacts: what is signed is taken, and nothing else; by pull, by serve, and by openssl alone."""

from __future__ import annotations

import base64
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from pipeline.cli.store import command
from pipeline.errors import DamagedArtifact, UserError
from pipeline.progress import Silent
from pipeline.store import Artifact, FileHashes, verify
from pipeline.store.object_store import fetch_artifact, send_artifact
from pipeline.store.signature import VerifyKeys, sign
from pipeline.triton.repository import check_package, check_without_weights

WEIGHTS = "model_repository/tensorrt_llm/1/weights.bin"
FILES = {
    "deployment.json": b"{}",
    WEIGHTS: bytes(range(256)) * 9000,
    "model_repository/bls/1/model.py": b"x = 1\n",
}


def new_key(folder: Path, name: str) -> tuple[Path, str]:
    """A private key's file, and the public key."""
    key = Ed25519PrivateKey.generate()
    file = folder / f"{name}.key"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.fixture
def artifact(publish: Callable[..., Artifact]) -> Artifact:
    return publish(FILES)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[Path, str]]:
    return {name: new_key(tmp_path, name) for name in ("ours", "theirs")}


def loosen(folder: Path) -> None:
    """Let an attacker with the owner's rights write."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def test_a_signed_artifact_is_what_it_was(artifact: Artifact, keys: dict[str, tuple[Path, str]]) -> None:
    before = artifact.path.stat().st_mode
    file = sign(artifact.path, keys["ours"][0])
    assert artifact.path.stat().st_mode == before, "read-only again"
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert verify(artifact).ok
    VerifyKeys(keys["ours"][1], "keys").check_folder(artifact.path)
    sign(artifact.path, keys["theirs"][0])
    # Keys are exchanged one after the other.
    VerifyKeys(keys["ours"][1] + keys["theirs"][1], "keys").check_folder(artifact.path)


def test_what_is_not_signed_or_was_changed_is_refused(
    artifact: Artifact, keys: dict[str, tuple[Path, str]], tmp_path: Path
) -> None:
    """Every way in which a signature and a manifest do not fit; what is refused leaves nothing behind."""
    address = f"file://{tmp_path / 'bucket'}"
    ours, theirs = (VerifyKeys(keys[name][1], name) for name in ("ours", "theirs"))
    send_artifact(artifact, address)
    faults = {"is not signed": lambda: None}

    def refused(match: str, given: VerifyKeys = ours) -> None:
        with pytest.raises(DamagedArtifact, match=match):
            fetch_artifact(artifact.name, address, tmp_path / "pod", keys=given)
        assert not (tmp_path / "pod" / artifact.name).exists()

    for match in faults:
        refused(match)
    sign(artifact.path, keys["ours"][0])
    # Also of what is there already.
    send_artifact(artifact, address)
    assert fetch_artifact(artifact.name, address, tmp_path / "signed", keys=ours).name == artifact.name
    refused("is signed by key", theirs)
    there = tmp_path / "bucket" / artifact.name
    loosen(there)
    manifest, signature = there / "manifest.json", there / "manifest.sig"
    whole, line = manifest.read_text(), signature.read_text()
    manifest.write_text(whole.replace('"recipe": "tiny"', '"recipe": "tinY"'))
    refused("does not fit manifest.json")
    manifest.write_text(whole)
    words = line.split()
    for wrong, match in (
        ("", "is not a signature"),
        ("nonsense", "is not a signature"),
        (f"ed25519 {words[1]} {'A' * 86}==", "does not fit"),
        (f"ed25519 {words[1]} ***", "does not fit"),
        (f"rsa {words[1]} {words[2]}", "is not a signature"),
        ("x" * 5000, "more than it can have"),
    ):
        signature.write_text(wrong)
        refused(match)
    signature.write_text(line)
    # A file that is signed as something else: by its hash.
    (there / WEIGHTS).write_bytes(bytes(len(FILES[WEIGHTS])))
    refused("has not the")
    # What was there before the key was configured is not taken as signed.
    fetch_artifact(
        artifact.name,
        f"file://{tmp_path / 'bucket'}",
        tmp_path / "other",
        only=lambda name, _: name != WEIGHTS,
    )
    with pytest.raises(DamagedArtifact, match="is signed by key"):
        fetch_artifact(artifact.name, address, tmp_path / "other", keys=theirs)


def test_a_server_takes_signed_packages_only(
    artifact: Artifact, keys: dict[str, tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it runs: also code that the manifest does not name, and caches of code."""
    package = tmp_path / "package"
    shutil.copytree(artifact.path, package)
    loosen(package)
    (tmp_path / "keys.pem").write_text(keys["ours"][1])

    def check(match: str | None) -> None:
        for judge in (check_without_weights, check_package):
            if match is None:
                judge(package, FileHashes(None), Silent())
                continue
            with pytest.raises(DamagedArtifact, match=match):
                judge(package, FileHashes(None), Silent())

    check(None)
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "keys.pem"))
    check("is not signed")
    sign(package, keys["theirs"][0])
    check("is signed by key")
    sign(package, keys["ours"][0])
    check(None)
    for extra in ("model_repository/bls/1/sitecustomize.py", "model_repository/bls/1/__pycache__/model.pyc"):
        (package / extra).parent.mkdir(exist_ok=True)
        (package / extra).write_text("evil")
        check("not signed: .*" + extra.rpartition("/")[2])
        (package / extra).unlink()
    check(None)
    (package / "manifest.json").unlink()
    check("has no manifest.json that could be signed")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "holds no public key"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "cannot be read"),
        (
            generate_private_key(65537, 2048).public_key()
            .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
            "another kind than Ed25519",
        ),
    ],
)  # fmt: skip
def test_keys_that_are_none(text: str, match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys.pem").write_text(text)
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "keys.pem"))
    with pytest.raises(UserError, match=match):
        VerifyKeys.configured()
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "missing.pem"))
    with pytest.raises(UserError, match=r"\$PIPELINE_VERIFY_KEY"):
        VerifyKeys.configured()


def test_private_keys_that_are_none(artifact: Artifact, tmp_path: Path) -> None:
    """No message has anything of a key."""
    rsa = generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    locked = Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")
    )
    for content in (b"secret-text", rsa, locked):
        (tmp_path / "bad.key").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.key: is ") as caught:
            sign(artifact.path, tmp_path / "bad.key")
        assert "secret-text" not in str(caught.value)
    assert not (artifact.path / "manifest.sig").exists()


def test_the_commands(
    artifact: Artifact, keys: dict[str, tuple[Path, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, address = ["--store", str(tmp_path / "store")], f"file://{tmp_path / 'bucket'}"
    signed = CliRunner().invoke(command, ["sign", artifact.name, "--key", str(keys["ours"][0]), *store])
    assert signed.stdout == f"{artifact.path / 'manifest.sig'}\n", signed.output
    pushed = CliRunner().invoke(command, ["push", artifact.name, address, *store])
    (named,) = (word for word in pushed.output.split() if "@sha256:" in word)
    (tmp_path / "keys.pem").write_text(keys["theirs"][1])
    monkeypatch.setenv("PIPELINE_VERIFY_KEY", str(tmp_path / "keys.pem"))
    pull = ["pull", named, address, "--output", str(tmp_path / "pod")]
    assert isinstance(CliRunner().invoke(command, pull).exception, DamagedArtifact)
    (tmp_path / "keys.pem").write_text(keys["ours"][1])
    assert CliRunner().invoke(command, pull).stdout == f"{tmp_path / 'pod' / artifact.name}\n"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl")
def test_openssl_makes_keys_and_checks_signatures(artifact: Artifact, tmp_path: Path) -> None:
    """The lines of the manual, and a check without this program."""
    key, public = tmp_path / "packages.key", tmp_path / "packages.pem"

    def openssl(*words: str) -> None:
        done = subprocess.run(["openssl", *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    openssl("genpkey", "-algorithm", "ed25519", "-out", str(key))
    openssl("pkey", "-in", str(key), "-pubout", "-out", str(public))
    file = sign(artifact.path, key)
    VerifyKeys(public.read_text(), "keys").check_folder(artifact.path)
    (tmp_path / "raw").write_bytes(base64.b64decode(file.read_text().split()[2]))
    openssl(
        "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin",
        "-in", str(artifact.path / "manifest.json"), "-sigfile", str(tmp_path / "raw"),
    )  # fmt: skip
