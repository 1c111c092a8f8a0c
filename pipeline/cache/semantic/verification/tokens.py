"""A text as words: contractions written out, and phrases that say the same as something shorter put as that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.cache.semantic.verification.lexicon import Lexicon

_TOKEN = re.compile(
    r"""https?://[^\s"'<>]+ | www\.[^\s"'<>]+ | (?<![\w.+-])[\w.+-]+@[\w-]+\.[\w.]*\w
    | \d{1,3}(?:,\d{3})+(?:\.\d+)? | \d+(?:[.:/\-]\d+)+ | \d+
    | (?<!\S)--?[a-zA-Z][\w-]* | [^\W\d_]\w*(?:['\-.]\w+)*(?:\+\+|\#)? | _\w+
    | [$€£¥₹%°]""",
    re.VERBOSE,
)
_QUOTED = re.compile(r'"([^"]{1,200})"|`([^`]{1,200})`|(?<![\w])\'([^\']{1,200})\'(?!\w)')
_SENTENCE_END = re.compile(r"[.?!:;\n]\s*[\"'(]?\s*$")
_ENDINGS = {"n't": "not", "'m": "am", "'re": "are", "'ve": "have", "'ll": "will", "'d": "would"}
_IS = frozenset(
    (
        "what",
        "where",
        "who",
        "how",
        "when",
        "why",
        "which",
        "that",
        "this",
        "there",
        "here",
        "it",
        "he",
        "she",
        "let",
    )
)
_WHOLE = {
    "can't": ("can", "not"),
    "won't": ("will", "not"),
    "cannot": ("can", "not"),
    "shan't": ("will", "not"),
}
_UNMARKED = {
    "cant": "can't",
    "dont": "don't",
    "doesnt": "doesn't",
    "didnt": "didn't",
    "isnt": "isn't",
    "wont": "won't",
    "couldnt": "couldn't",
    "whats": "what's",
    "hows": "how's",
    "wheres": "where's",
    "im": "i'm",
    "ive": "i've",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a number or a sign."""

    text: str  # lower case
    raw: str  # as written; "" if it stands for a phrase
    opens: bool = False  # it begins a sentence, and its letter is a capital for no other reason


def plain(text: str) -> str:
    """Typographic quotes and dashes as ASCII."""
    return text.translate(_PLAIN)


_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "–": "-", "—": " ", "\u00a0": " "})


def quoted(text: str) -> frozenset[str]:
    """What stands in quotation marks or backticks."""
    if '"' not in text and "'" not in text and "`" not in text:
        return frozenset()
    return frozenset("".join(found).strip().lower() for found in _QUOTED.findall(text))


def tokens(text: str) -> list[Token]:
    """Words in their order, contractions written out; none of them is empty."""
    found: list[Token] = []
    end = 0
    for match in _TOKEN.finditer(text):
        raw = match[0]
        opens = not found or (
            raw[0].isupper() and _SENTENCE_END.search(text, max(end - 1, 0), match.start()) is not None
        )
        end = match.end()
        # "n't" by itself has nothing before its ending
        found += [token for token in _expanded(raw, opens) if token.text]
    return found


def read_phrases(given: Sequence[Token], lexicon: Lexicon) -> list[Token]:
    """With the lexicon's phrases put as what they are read as, the longest first."""
    found: list[Token] = []
    words = tuple(token.text for token in given)
    phrases = lexicon.phrases
    at = 0
    while at < len(words):
        for written, read_as in (*phrases.get(words[at : at + 2], ()), *phrases.get(words[at : at + 1], ())):
            if words[at : at + len(written)] == written:
                raw = given[at].raw if len(written) == len(read_as) == 1 else ""
                found += [Token(word, raw) for word in read_as]
                at += len(written)
                break
        else:
            found.append(given[at])
            at += 1
    return found


def _expanded(raw: str, opens: bool) -> list[Token]:
    text = raw.lower()
    if text.isalpha() and text not in _UNMARKED and text != "cannot":
        return [Token(text, raw, opens)]
    text = _UNMARKED.get(text, text)
    if text in _WHOLE:
        return [Token(word, word) for word in _WHOLE[text]]
    for ending, word in _ENDINGS.items() if "'" in text else ():
        if text.endswith(ending):
            return [Token(text.removesuffix(ending), raw.split("'")[0], opens), Token(word, word)]
    if text.endswith("'s") and text[:-2] in _IS:
        return [Token(text[:-2], raw[:-2], opens), Token("is", "is")]
    whole = text in _HYPHENATED or text.startswith("-")  # -rf and --force are options of a command
    if "-" in text and text.replace("-", "").isalpha() and not whole:
        parts = raw.split("-")
        return [Token(part.lower(), part, opens and not index) for index, part in enumerate(parts)]
    return [Token(text, raw, opens)]


_HYPHENATED = frozenset(("e-mail", "wi-fi", "check-in", "check-out"))
