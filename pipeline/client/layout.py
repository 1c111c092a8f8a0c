"""The bytes that messages of one stream repeat, so that most of them are read without being parsed.

A message that brings tokens is a `ModelStreamInferResponse` like the one before it, but for the contents of its
tensors: the name of the model, the id, names and shapes are the same bytes again. To compare these costs a fraction of
parsing them (protobuf's wire format: a field is its tag, its length as a varint, and its bytes).
"""

from __future__ import annotations

from tritonclient.grpc import service_pb2 as pb

# Tags: field number << 3 | 2, which is the wire type of bytes.
_INFER_RESPONSE = pb.ModelStreamInferResponse.INFER_RESPONSE_FIELD_NUMBER << 3 | 2
_CONTENT = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER << 3 | 2


class MessageLayout:
    """A response without the contents of its tensors, which come last in a message."""

    __slots__ = ("_head", "_tensors")

    def __init__(self, head: bytes, tensors: int) -> None:
        """`head`: all bytes of the response before these contents; `tensors`: how many there are."""
        self._head, self._tensors = head, tensors

    @classmethod
    def of(cls, raw: bytes, message: pb.ModelStreamInferResponse) -> MessageLayout | None:
        """Read the layout of a message; None if others like it have to be parsed.

        Args:
            raw: bytes of the message.
            message: the same, parsed.
        """
        contents = list(message.infer_response.raw_output_contents)
        # Each with its tag and a length of one byte; where that is not so, what follows finds it out.
        size, begin = sum(2 + len(content) for content in contents), _body_begin(raw)
        if begin is None or size > len(raw) - begin:
            return None
        layout = cls(raw[begin : len(raw) - size], len(contents))
        return layout if layout.contents(raw) == contents else None

    def contents(self, raw: bytes) -> list[bytes] | None:
        """Return the contents of the tensors of a message; None if it has another layout, or has to be parsed."""
        begin = _body_begin(raw)
        if begin is None or not raw.startswith(self._head, begin):
            return None
        contents, at, end = [], begin + len(self._head), len(raw)
        for _ in range(self._tensors):
            # Longer ones, whose length takes two bytes, are rare.
            if at + 2 > end or raw[at] != _CONTENT or raw[at + 1] >= 0x80:
                return None
            start = at + 2
            at = start + raw[at + 1]
            contents.append(raw[start:at])
        return contents if at == end else None


def _body_begin(raw: bytes) -> int | None:
    """Position of the response in a message that has nothing else; None where it has, or is longer than 16 KiB."""
    if len(raw) < 3 or raw[0] != _INFER_RESPONSE:
        return None
    size, begin = raw[1], 2
    if size >= 0x80:
        size, begin = size & 0x7F | raw[2] << 7, 3
    # A third byte of the length would make it wrong here.
    return begin if len(raw) - begin == size else None
