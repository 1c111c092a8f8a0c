"""What a question says, taken apart for comparison; read once and kept for the questions read last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipeline.cache.semantic.verification.lexicon import Lexicon, lexicon
from pipeline.cache.semantic.verification.numbers import Number, number_at, number_words
from pipeline.cache.semantic.verification.rewording import active, joined_verbs, told_first, told_last
from pipeline.cache.semantic.verification.stems import stem
from pipeline.cache.semantic.verification.tokens import Token, plain, quoted, read_phrases, tokens

_KEPT = 8192  # readings, about 3 KB each
_CODE = re.compile(r".*\d|.*[_@#/\\]|.*\w\.\w|.*\+\+|.*[a-z][A-Z]")
ARTICLES = frozenset(
    ("a", "an", "the", "my", "your", "our", "his", "her", "their", "this", "that", "these", "those")
)
_BE = frozenset(("is", "are", "was", "were", "am", "be", "been", "being", "get", "got"))
_NUMBER = "#"
_POINTING = frozenset(
    ("what", "which", "the", "this", "that", "any", "every", "no")
)  # "which one": a pronoun
_PERSONS = frozenset(("i", "you", "me"))
_ASKING = frozenset(
    ("when", "where", "who", "whom", "whose", "how-long", "how-many", "how-much", "how-often", "how-far")
)
_PEOPLE = frozenset(
    ("person", "people", "man", "men", "woman", "women", "someone", "somebody", "anyone", "one", "those")
)
_NOT_NAMES = frozenset(("i", "i'm", "ok", "pls", "asap"))


@dataclass(frozen=True, slots=True)
class Word:
    """A word that carries meaning."""

    stem: str
    role: str  # the preposition that gives it its part; "~" for one that only attaches it, "" without one
    name: bool  # written as a name or a code


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """A question. Compared by identity: a text is read once."""

    words: tuple[Word, ...]  # in their order, numbers left out
    counted: tuple[tuple[str, Number], ...]  # (role, number) in their order
    runs: tuple[int, ...]  # which of those have only "and" between them
    numbers: tuple[Number, ...]  # sorted
    names: frozenset[str]  # stems of what is capitalised within a sentence
    codes: frozenset[str]
    quotes: frozenset[str]
    negations: int
    frames: frozenset[str]  # how the question opens: why, when, how-to
    telling: tuple[str, ...]  # words whose presence changes the answer, in their order
    pronouns: tuple[str, ...]  # of others: m, f, p, in their order
    owners: frozenset[str]  # mine, yours
    persons: tuple[str, ...]  # i, you, me, in their order
    to_me: bool  # it says "me" or "us"
    light: frozenset[str]  # verbs that say little, such as "get"
    limited: frozenset[str]  # what "only" stands before
    tenses: frozenset[str]
    joined: frozenset[str]  # which of "and", "or"
    chooses: bool  # it asks which of two is more: "which is heavier, gold or lead"
    symmetric: bool  # it speaks of a relation that holds in both directions
    said: frozenset[str]  # all words, whatever they are
    sequence: tuple[str, ...]  # and as they follow each other


@lru_cache(_KEPT)
def read(text: str) -> Reading:
    """Take a question apart."""
    known = lexicon()
    flat = told_last(plain(text))
    written = tokens(flat)
    given = told_first(active(read_phrases(joined_verbs(written, known), known)))
    reader, counting = _Reader(known), number_words()
    listed = any(
        token.text[0].isdigit()
        or (token.text in counting and token.text not in ARTICLES and token.text != "one")
        for token in given
    )
    at = 0
    while at < len(given):
        text = given[at].text
        found = number_at(given, at, known) if text in counting or text[0].isdigit() else None
        if found is not None:
            reader.count(found[0])
            at += found[1]
        elif text == "one" and listed and not (at and given[at - 1].text in _POINTING):
            # beside another number: "two adults and one child", but "which one has 8 GB"
            reader.count(Number("1", ""))
            at += 1
        else:
            reader.word(given[at])
            at += 1
    names, codes = _named(written, known)
    names &= {form for form, _ in reader.pairs}  # not what the phrases took, such as "Thanks"
    return Reading(
        words=tuple(Word(form, role, form in names) for form, role in reader.pairs),
        counted=tuple(reader.counted),
        runs=tuple(reader.runs),
        numbers=tuple(sorted((number for _, number in reader.counted), key=lambda n: (n.value, n.unit))),
        names=names,
        codes=codes,
        quotes=quoted(flat),
        negations=reader.negations,
        frames=_opening(reader.frames),
        telling=tuple(reader.telling),
        pronouns=tuple(reader.pronouns),
        owners=frozenset(reader.owners),
        persons=tuple(reader.persons),
        to_me=reader.to_me,
        light=frozenset(reader.light),
        limited=frozenset(reader.limited),
        tenses=frozenset(reader.tenses),
        joined=frozenset(reader.joined),
        chooses=_chooses(given),
        symmetric=any(form in known.symmetric for form, _ in reader.pairs),
        said=frozenset([token.text for token in written] + [token.text for token in given]),
        sequence=tuple(token.text for token in given),
    )


class _Reader:
    """Sorts the words of one text."""

    def __init__(self, known: Lexicon) -> None:
        self._known = known
        self._role = ""
        self._before, self._earlier = "", ""  # the last words
        self.runs: list[int] = []
        self.pairs: list[tuple[str, str]] = []  # (stem, role)
        self.counted: list[tuple[str, Number]] = []
        self.negations = 0
        self.frames: list[str] = []
        self.telling: list[str] = []
        self.pronouns: list[str] = []
        self.owners: list[str] = []
        self.persons: list[str] = []
        self.to_me = False
        self.light: list[str] = []
        self.limited: list[str] = []
        self._only = False
        self.tenses: list[str] = []
        self.joined: list[str] = []

    def count(self, number: Number) -> None:
        """A number has a part of its own only right after its preposition: "from 5 to 10"."""
        near = self._before in self._known.roles or self._before in ARTICLES
        self.counted.append((self._role if near else "", number))
        joined = self._before in ("and", "or") and self._earlier == _NUMBER
        self.runs.append(self.runs[-1] if joined else len(self.runs))
        self._before = _NUMBER

    def word(self, token: Token) -> None:
        self._sort(token.text)
        self._before, self._earlier = token.text, self._before

    def _sort(self, word: str) -> None:
        known = self._known
        if word in known.negations:
            self.negations += 1
        if word in known.pronouns:
            self.pronouns.append(known.pronouns[word])
        if word in known.owners:
            self.owners.append(known.owners[word])
        if word in _PERSONS:
            self.persons.append(word)
        self.to_me = self.to_me or word in ("me", "us")
        if word in known.tenses:
            self.tenses.append(known.tenses[word])
        if word in known.joining:
            self.joined += [word] if word in ("or", "and") else []
            return
        if word in known.frames:
            if not (word == "who" and self._before in _PEOPLE):  # "a person who …"
                self.frames.append(word)
            self._role = ""
        elif word in known.telling:
            self.telling.append(word)
            self._only = self._only or word == "only"
            self._role = word if word in known.roles else self._role
        elif word in known.roles or word in known.attaching:
            self._role = word if word in known.roles else "~"
        elif (form := stem(word)) in known.light:
            self.light.append(form)
        elif not self._passes(word):
            self.pairs.append((form, self._role))
            if self._only:
                self.limited.append(form)
                self._only = False

    def _passes(self, word: str) -> bool:
        """Whether the word says nothing by itself; an auxiliary begins a new clause."""
        known = self._known
        if word in _BE or word in known.tenses:
            self._role = ""
            return True
        return (
            word in known.fillers
            or word in known.negations
            or word in known.pronouns
            or word in ("what", "%")
        )


def _opening(frames: Sequence[str]) -> frozenset[str]:
    """ "where can I find", "where do I find": where is what is asked."""
    asked = frozenset(frames)
    return asked & _ASKING or asked


def _chooses(given: Sequence[Token]) -> bool:
    words = [token.text for token in given]
    return (
        words[:1] in (["what"], ["which"], ["who"])
        and "or" in words
        and "than" not in words
        and any(word.endswith("er") for word in words[1 : words.index("or")])
    )


def _named(written: Sequence[Token], known: Lexicon) -> tuple[frozenset[str], frozenset[str]]:
    """Names by their stems; codes, and options such as -rf, as they are."""
    words = [token for token in written if token.raw[:1].isalpha()]
    small = known.fillers | known.roles | known.attaching | known.joining
    titled = len(words) > 3 and all(
        token.raw[0].isupper() or (len(token.raw) <= 3 and token.text in small) for token in words
    )
    names, codes = set(), {token.text for token in written if token.raw.startswith("-")}
    for token in words:
        if _CODE.match(token.raw):
            codes.add(token.text)
        elif token.raw[0].isupper() and not titled and token.text not in _NOT_NAMES:
            shout = len(token.raw) > 1 and token.raw.isupper()
            calendar = token.text in known.months or token.text in known.weekdays
            if (shout or not token.opens) and not calendar and token.text not in known.fillers:
                names.add(stem(token.text))
    return frozenset(names), frozenset(codes)
