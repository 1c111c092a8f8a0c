"""Which texts are looked up and stored by meaning: short questions in languages that the recipe lists.

Two cheap tests, both of which err to the side of the exact cache, which serves every text:

- A language is told by its letters alone. One that is not listed is noticed if it has letters that none of the listed
  ones has: other scripts, Vietnamese, Polish, Turkish or Danish. Italian and Dutch, which do with the letters of the
  measured four, and whatever is typed without its accents, are not noticed.
- Text to work on ("translate: …", code, a document) is no question. It is told by its form: more than `MAX_CHARS`
  characters, several lines, something after a colon and a space, or quotation marks or backticks around something.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from types import MappingProxyType

# ISO 639-1 -> letters in lower case besides a to z.
LETTERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "en": frozenset(),
        "de": frozenset("äöüß"),
        "fr": frozenset("àâæçéèêëîïôœùûüÿ"),
        "es": frozenset("áéíñóúü"),
    }
)
# Of 9,917 pairs of questions that people asked on Quora, 0.6 % hold a longer one.
MAX_CHARS = 200
_PAYLOAD = re.compile(
    r"""\S\s*[\n\r\v\f\x85\u2028\u2029]\s*\S|[:：]\s+\S|"[^"]+"|[“„][^“”]+[“”]|«[^»]+»|`[^`]+`"""
)


def is_shareable(text: str, languages: Sequence[str]) -> bool:
    """Whether a text is a question in one of some languages: keys of `LETTERS`, or "any".

    >>> [is_shareable(text, ["en"]) for text in ("Is it open?", "Ist es geöffnet?", "Translate: it is open")]
    [True, False, False]
    """
    if len(text) > MAX_CHARS or _PAYLOAD.search(text):
        return False
    return "any" in languages or not _has_foreign_letters(text, languages)


def _has_foreign_letters(text: str, languages: Sequence[str]) -> bool:
    """Whether a letter, a mark or a digit belongs to none of the languages."""
    others = {letter for letter in unicodedata.normalize("NFC", text).lower() if not letter.isascii()}
    known = frozenset().union(*(LETTERS[language] for language in languages))
    return any(unicodedata.category(one)[0] in "LM" or one.isdecimal() for one in others - known)
