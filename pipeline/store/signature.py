"""Signatures of artifacts: Ed25519 over `manifest.json`, which has the SHA-256 of every file.

    openssl genpkey -algorithm ed25519 -out packages.key            keep it where packages are released
    openssl pkey -in packages.key -pubout -out packages.pem         give it to whoever serves them
    pipeline store sign package-… --key packages.key
    PIPELINE_VERIFY_KEY=packages.pem pipeline serve …               takes signed packages only

`manifest.sig` beside the manifest is one line: the algorithm, the beginning of the SHA-256 of the public key, and the
signature in base64. It can be checked without this program (`openssl pkeyutl -verify -rawin`). A file of public keys
may hold several, so that keys can be exchanged one after the other.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import DamagedArtifact, UserError
from pipeline.extras import missing
from pipeline.reading import UnreadableFile, read_bytes, read_text
from pipeline.store import manifest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FILE = "manifest.sig"
MAX_BYTES = 4096
VERIFY_VARIABLE = "PIPELINE_VERIFY_KEY"
_ALGORITHM = "ed25519"
_KEY_ID_DIGITS = 16
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----", re.DOTALL)


class VerifyKeys:
    """Public keys, by one of which artifacts must be signed."""

    def __init__(self, pem: str, source: str) -> None:
        """Read the keys.

        Args:
            pem: one or several keys.
            source: name of the text in messages.

        Raises:
            UserError: there is none, one is of another kind, or `cryptography` is not installed.
        """
        self.pem, self._source = pem, source
        self._keys: Mapping[str, Ed25519PublicKey] = {
            _key_id(key): key for key in (_public_key(text, source) for text in _PEM.findall(pem))
        }
        if not self._keys:
            raise UserError(f"{source}: holds no public key (-----BEGIN PUBLIC KEY-----)")

    @classmethod
    def configured(cls) -> VerifyKeys | None:
        """Read the keys of the file that $PIPELINE_VERIFY_KEY names; None where it is not set.

        Raises:
            UserError: the file cannot be read, or as `VerifyKeys` does.
        """
        name = os.environ.get(VERIFY_VARIABLE)
        if not name:
            return None
        source = f"${VERIFY_VARIABLE} ({name})"
        try:
            return cls(read_text(Path(name)), source)
        except UnreadableFile as error:
            raise UserError(f"{source}: {error.fault.problem}") from error

    def check(self, signed: bytes, signature: bytes | None, place: str) -> None:
        """Hold a manifest against its signature.

        Args:
            signed: the bytes of manifest.json.
            signature: content of manifest.sig; None if there is none.
            place: name of the artifact in messages.

        Raises:
            DamagedArtifact: it is not signed, by none of these keys, or it was changed since.
        """
        from cryptography.exceptions import InvalidSignature

        if signature is None:
            raise DamagedArtifact(
                f"{place}: is not signed, and {self._source} asks for a signature; `pipeline store sign` makes one"
            )
        fields = signature.decode("ascii", "replace").split()
        if len(fields) != 3 or fields[0] != _ALGORITHM:
            raise DamagedArtifact(f"{place}: {FILE} is not a signature")
        key = self._keys.get(fields[1])
        if key is None:
            known = ", ".join(self._keys)
            raise DamagedArtifact(f"{place}: is signed by key {fields[1]}, and {self._source} has {known}")
        try:
            key.verify(base64.b64decode(fields[2], validate=True), signed)
        except (InvalidSignature, binascii.Error) as error:
            raise DamagedArtifact(
                f"{place}: its signature by key {fields[1]} does not fit {manifest.FILE}"
            ) from error

    def check_folder(self, folder: Path) -> None:
        """Hold the manifest of an artifact on disk against its signature.

        Raises:
            DamagedArtifact: as `check` does, or it has no manifest.
        """
        if not (folder / manifest.FILE).is_file():
            raise DamagedArtifact(
                f"{folder}: has no {manifest.FILE} that could be signed, and {self._source} asks for it"
            )
        signature = read_bytes(folder / FILE, MAX_BYTES) if (folder / FILE).exists() else None
        self.check(read_bytes(folder / manifest.FILE, manifest.MAX_BYTES), signature, str(folder))


def sign(folder: Path, key_file: Path) -> Path:
    """Write the signature of an artifact beside its manifest.

    Args:
        key_file: private key, as PEM without a password.

    Returns:
        The file.

    Raises:
        UserError: the key cannot be read, or is of another kind.
    """
    key = _private_key(key_file)
    made = key.sign(read_bytes(folder / manifest.FILE, manifest.MAX_BYTES))
    line = f"{_ALGORITHM} {_key_id(key.public_key())} {base64.b64encode(made).decode()}\n"
    file, draft = folder / FILE, folder / f".{FILE}.draft"
    mode = folder.stat().st_mode
    # An artifact is read-only, its folder included.
    folder.chmod(mode | 0o200)
    try:
        draft.write_text(line, encoding="ascii")
        draft.chmod(0o444)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
        folder.chmod(mode)
    return file


def _key_id(key: Ed25519PublicKey) -> str:
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:_KEY_ID_DIGITS]


def _public_key(pem: str, source: str) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError as error:
        raise missing("signatures", error, "objects") from error
    try:
        key = load_pem_public_key(pem.encode())
    except ValueError as error:
        raise UserError(f"{source}: a public key cannot be read: {error}") from error
    if not isinstance(key, Ed25519PublicKey):
        raise UserError(f"{source}: holds a key of another kind than Ed25519")
    return key


def _private_key(file: Path) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError as error:
        raise missing("signatures", error, "objects") from error
    try:
        key = load_pem_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    except (ValueError, TypeError) as error:
        # Never what is in it.
        raise UserError(f"{file}: is not a private key without a password") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{file}: is a key of another kind than Ed25519 (openssl genpkey -algorithm ed25519)")
    return key
