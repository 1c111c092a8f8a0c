"""Encryption at rest: AES-256-GCM if there is a key, else plaintext with a checksum.

Encrypted are questions, answers and embeddings. Each is bound to the key of its entry, so that no two can be swapped.
In the clear stay the digests by which entries are found, sizes and times.
"""

from __future__ import annotations

import base64
import os
import secrets
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.private_files import warn_if_readable

KEY = "PIPELINE_CACHE_KEY"  # environment variable: 32 bytes in base64; what is kept is then sealed
_NONCE = 12  # bytes
_CHECKSUM = struct.Struct("<I")


class UnreadableEntry(Exception):
    """The stored bytes are damaged, were written by something else, or were encrypted with another key."""


class Codec(Protocol):
    """Turns content into the bytes that are stored, and back."""

    def seal(self, content: bytes, key: bytes) -> bytes:
        """Return the bytes to store of `content`, which belongs to the entry `key`."""

    def open(self, kept: bytes, key: bytes) -> bytes:
        """Return the content. Raises UnreadableEntry if it was encrypted with another key, or changed since."""


class PlainCodec:
    """Plaintext, with a CRC-32 of the content and its key."""

    def seal(self, content: bytes, key: bytes) -> bytes:
        return content + _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(key)))

    def open(self, kept: bytes, key: bytes) -> bytes:
        content, checksum = kept[: -_CHECKSUM.size], kept[-_CHECKSUM.size :]
        if checksum != _CHECKSUM.pack(zlib.crc32(content, zlib.crc32(key))):
            raise UnreadableEntry("an entry is damaged, or was sealed")
        return content


class AesGcmCodec:
    """AES-256-GCM. Needs the distribution `cryptography`."""

    def __init__(self, secret: str) -> None:
        """`secret`: 32 bytes in base64, see `new_secret`. Raises ValueError if it is malformed."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            raw = base64.b64decode(secret, validate=True)
        except ValueError:
            raise ValueError("the key of the response cache is not base64") from None
        if len(raw) != 32:
            raise ValueError(
                f"the key of the response cache has {len(raw)} bytes: it must have 32, in base64"
            )
        self._cipher = AESGCM(raw)

    @staticmethod
    def new_secret() -> str:
        """Make a new key: 32 random bytes in base64."""
        return base64.b64encode(secrets.token_bytes(32)).decode()

    def seal(self, content: bytes, key: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher.encrypt(nonce, content, key)

    def open(self, kept: bytes, key: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(kept[:_NONCE], kept[_NONCE:], key)
        except (InvalidTag, ValueError):
            raise UnreadableEntry("an entry was sealed with another key, or not at all") from None


@dataclass(frozen=True, slots=True)
class KeySource:
    """Where the key of a cache is read from: a file, or an environment variable."""

    variable: str = KEY
    # Instead of the variable.
    file: Path | None = None
    # Whether a cache without a key is refused.
    required: bool = False

    def read(self, environ: Mapping[str, str] = os.environ) -> str:
        """Read the key; "" if there is none. Raises ValueError if one is required, or the file cannot be read."""
        if self.file is None:
            secret, place = environ.get(self.variable, ""), f"the environment variable {self.variable}"
        else:
            secret, place = _content(self.file), str(self.file)
        if self.required and not secret:
            raise ValueError(f"the answers are to be encrypted, and {place} holds no key")
        return secret


def load_codec(secret: KeySource | None = None) -> Codec:
    """Return an AES-GCM codec if a key is configured, else plaintext. Raises ValueError if the key is malformed."""
    key = (secret or KeySource()).read(os.environ)
    return AesGcmCodec(key) if key else PlainCodec()


def _content(file: Path) -> str:
    path = file.expanduser()
    try:
        secret = path.read_text(encoding="ascii").strip()
    except UnicodeDecodeError:
        raise ValueError(f"the key of the response cache: {path} is not a text in base64") from None
    except OSError as error:
        raise ValueError(f"the key of the response cache: {path}: {error.strerror}") from None
    warn_if_readable(path, "every account of this machine may read the key of the response cache", by=0o004)
    return secret
