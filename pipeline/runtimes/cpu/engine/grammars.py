"""From what an answer is to look like to a matcher that says which tokens may come next.

Guides mean what they mean to TensorRT-LLM (`guided_decoding_guide_type` and `guided_decoding_guide`, release 1.2), but
that `json` is an object, and that JSON has no white space between its parts, as in OpenAI's own answers: a small model
would never come to an end of it, and each space would cost a token. As there (xgrammar's strict mode), an object has no
properties but those that its schema names, unless the schema speaks of others. The work is llguidance's.
"""

from __future__ import annotations

import json
from collections import OrderedDict, abc
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from .request import Guide, InvalidRequest

# Half of llguidance's own or less: what is so ambiguous that a token costs milliseconds would hold up everybody else.
# Fuel is also what nested repetitions burn: of (a{1000}){1000}, llguidance's own amount makes ten seconds.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
_KEPT = 64  # grammars that are ready for the next request


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as text."""

    tokenizer: Path  # tokenizer.json
    end_id: int  # a token that ends texts


class Grammars:
    """The forms that answers of one model can be held to. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size`: tokens that the model has logits for.

        Raises:
            ValueError: llguidance does not know this kind of tokenizer.
        """
        content = vocabulary.tokenizer.read_text(encoding="utf-8")
        self._tokenizer = LLTokenizer(content, eos_token=vocabulary.end_id)
        self._vocab_size, self._end_id = vocab_size, vocabulary.end_id
        self._ready: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._lock = Lock()  # guards _ready

    def check(self, guide: Guide) -> None:
        """Make the grammar of a guide, and keep it for `matcher`.

        Raises:
            InvalidRequest: it is none, or has something that cannot be held to.
        """
        self._grammar(guide)

    def matcher(self, guide: Guide, ends: Collection[int]) -> Matcher:
        """At the beginning of an answer, which the tokens `ends` end where the form allows.

        Raises:
            InvalidRequest: as `check`.
        """
        return self._matcher(self._grammar(guide), ends)

    def is_special(self, token: int) -> bool:
        """Whether a token is no text, as those that end a turn."""
        return token < self._tokenizer.vocab_size and self._tokenizer.is_special_token(token)

    def _matcher(self, grammar: LLMatcher, ends: Collection[int]) -> Matcher:
        return Matcher(
            grammar.deep_copy(),
            size=self._tokenizer.vocab_size,
            vocab_size=self._vocab_size,
            end=self._end_id,
            ends=ends,
        )

    def _grammar(self, guide: Guide) -> LLMatcher:
        with self._lock:
            if guide in self._ready:
                self._ready.move_to_end(guide)
                return self._ready[guide]
        made = LLMatcher(self._tokenizer, _text_of(guide), log_level=0, limits=_LIMITS)
        if made.is_error():
            raise _refused(guide, made.get_error())
        if self._matcher(made, [self._end_id]).allowed([]) is None:
            raise _refused(guide, "no text has this form; it may refer to itself without an end")
        with self._lock:
            self._ready[guide] = made
            while len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return made


def _text_of(guide: Guide) -> str:
    """The grammar as llguidance takes it."""
    try:
        match guide.kind:
            case "json":
                return _json_schema('{"type": "object"}')
            case "json_schema":
                return _json_schema(guide.text)
            case "regex":
                return LLMatcher.grammar_from_regex(guide.text)
            case _:
                return grammar_from("ebnf", guide.text)
    except (ValueError, RecursionError) as error:
        raise _refused(guide, str(error)) from None


# With these beside its properties, what an object may have is said in several places.
_OPEN = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if",
}  # fmt: skip


def _json_schema(text: str) -> str:
    schema = json.loads(text)
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    # Parts that are to hold together would each forbid what the others ask for.
    parts = list(_schemas(schema))
    if not any(isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1 for part in parts):
        for part in parts:
            if part.get("properties") and not _OPEN & part.keys():
                part["additionalProperties"] = False
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_flexible": False})


def _schemas(part: Any) -> Iterator[dict[str, Any]]:
    """A schema and all within it; not what stands in the place of values."""
    if isinstance(part, list):
        for item in part:
            yield from _schemas(item)
    elif isinstance(part, dict):
        yield part
        for name, item in part.items():
            if name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                yield from _schemas(list(item.values()) if isinstance(item, dict) else [])
            elif name not in ("const", "default", "enum", "examples"):
                yield from _schemas(item)


def _refused(guide: Guide, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"guided_decoding_guide: cannot be held to as {guide.kind}: {' '.join(why.split())}"
    )


Mask = npt.NDArray[np.bool_]


class Matcher:
    """
    >>> matcher = Grammars(vocabulary, 2048).matcher(Guide("regex", "[0-9]+"), ends=[2])   # doctest: +SKIP
    >>> matcher.allowed([]).nonzero()                                                     # doctest: +SKIP
    """

    __slots__ = ("_ahead", "_ends", "_inner", "_masks", "_size", "_special", "_vocab_size", "fault")

    def __init__(
        self, inner: LLMatcher, *, size: int, vocab_size: int, end: int, ends: Collection[int]
    ) -> None:
        """
        Args:
            inner: at the beginning of the form.
            size: tokens that `inner` knows; `vocab_size`: tokens that the model has logits for.
            end: the token with which `inner` says that the answer may end.
            ends: the tokens that end this answer.
        """
        self._inner = inner
        self._size, self._vocab_size = size, vocab_size
        self._ends = list(ends)
        self._special = frozenset((end, *ends))
        self._ahead: list[int] = []  # drafts that `inner` has taken, after the answer
        self._masks: dict[tuple[int, ...], Mask | None] = {}  # by drafts, for the answer as it is
        self.fault: str | None = None  # why the answer cannot go on

    def allowed(self, ahead: abc.Sequence[int]) -> Mask | None:
        """[vocab_size], true for the tokens that may follow the answer and the drafts `ahead` of it.

        None where those drafts themselves may not come, so that they will not be kept; or where nothing may follow.
        """
        key = tuple(ahead)
        if key not in self._masks:
            self._masks[key] = self._mask() if self._go(ahead) else None
        return self._masks[key]

    def append(self, token: int) -> None:
        """The answer got one more token; `fault` is set if it may not come."""
        self._masks.clear()
        if self._ahead[:1] == [token]:
            del self._ahead[0]
            return
        self._back(0)
        fits = self._inner.is_accepting() if token in self._ends else self._take(token)
        if not fits:
            why = " ".join(self._inner.get_error().split()).removesuffix(" <non-verbose/>")
            why = why or "no token that the model may choose keeps to the form"
            self.fault = f"guided_decoding_guide: the answer cannot go on: {why}"

    @property
    def complete(self) -> bool:
        """Whether the form is whole, and nothing can follow."""
        return not self._ahead and self._inner.is_stopped()

    def _go(self, ahead: abc.Sequence[int]) -> bool:
        common = next(
            (at for at, (one, other) in enumerate(zip(ahead, self._ahead, strict=False)) if one != other),
            min(len(ahead), len(self._ahead)),
        )
        self._back(common)
        for token in ahead[common:]:
            if not self._take(token):
                return False
            self._ahead.append(token)
        return True

    def _back(self, kept: int) -> None:
        """To after the first `kept` of the drafts."""
        if len(self._ahead) > kept:
            self._inner.rollback(len(self._ahead) - kept)
            del self._ahead[kept:]

    def _take(self, token: int) -> bool:
        return token not in self._special and self._inner.try_consume_tokens([token]) == 1

    def _mask(self) -> Mask | None:
        if self._inner.is_stopped():
            self.fault = self._inner.get_error() or self.fault
            return None
        bits = np.zeros(-(-self._size // 32), np.uint32)
        self._inner.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        known = min(self._size, self._vocab_size)
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[:known] = np.unpackbits(bits.view(np.uint8), count=known, bitorder="little")
        mask[list(self._special)] = False
        mask[self._ends] = self._inner.is_accepting()
        return mask if mask.any() else None
