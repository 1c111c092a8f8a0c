"""Header blocks that come: decoded, and not decoded again where they say the same as before."""

from __future__ import annotations

import hpack

_MULTIBYTE = b"\xff"  # an index of 127 or more
_MOST = 64  # blocks that are kept: a server says few different things


class Fields:
    """Decodes the blocks of one connection, in the order in which they come.

    A server says nearly the same for each call, hence by indexes into the table that both sides keep: two bytes for
    what took a hundred. Such a block changes no table (RFC 7541, section 6.1), and means the same until another does.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._known: dict[bytes, dict[str, str]] = {}

    def read(self, block: bytes) -> dict[str, str]:
        """The fields of a block, by name.

        Raises:
            hpack.HPACKError, IndexError: it is none.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
        if not _only_indexed(block) or len(self._known) >= _MOST:
            self._known.clear()
        else:
            self._known[block] = fields
        return fields


def _only_indexed(block: bytes) -> bool:
    """Whether all of its fields are indexes of one byte."""
    return min(block, default=0) >= 0x80 and _MULTIBYTE not in block
