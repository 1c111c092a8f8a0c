"""What can be said in several orders, put in one: clauses, passives, verbs of two words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipeline.cache.semantic.verification.lexicon import Lexicon
from pipeline.cache.semantic.verification.stems import is_participle
from pipeline.cache.semantic.verification.tokens import Token

_FRONTED = re.compile(
    r"""^\s*(if|when|while|because|after|before)\s+([^,.?!;]+),\s*(?:then\s+)?
    ((?:what|how|who|why|where|which|can|could|should|would|will|is|are|was|were|do|does|did|am)\b[^.!;?]*)
    ([.!?\s]*)$""",
    re.VERBOSE | re.IGNORECASE,
)
_TAG = re.compile(r",\s*(?:right|correct|yes|no|am i right)\s*(?=\?\s*$)", re.IGNORECASE)
_BE = frozenset(("is", "are", "was", "were"))
_PAST = frozenset(("was", "were"))
_ASKING = frozenset(
    ("why", "when", "where", "how", "who", "what", "which", "how-often", "how-many", "how-much")
)
_MODALS = frozenset(("can", "could", "should", "will", "would", "may", "might"))
_AFTER_AN_AGENT = frozenset(("in", "on", "at", "for", "when", "if"))
_PARTICLES = frozenset(("off", "on", "up", "out", "down"))
_BETWEEN = 4  # words that may stand within a verb of two: "turn the old fan off"


def told_last(text: str) -> str:
    """ "If it rains, what will X do?" as "what will X do if it rains?"; without ", right?"."""
    if "," not in text:
        return text
    text = _TAG.sub("", text)
    found = _FRONTED.match(text)
    if found is None:
        return text
    return f"{found[3].strip()} {found[1].lower()} {found[2].strip()}{found[4].strip()}"


def joined_verbs(given: Sequence[Token], known: Lexicon) -> list[Token]:
    """ "turn the fan off" as "turn off the fan", "30 or more" as "at least 30"."""
    words = [token.text for token in given]
    for end, word in enumerate(words):
        if word == "more" and end > 1 and words[end - 1] == "or" and words[end - 2][0].isdigit():
            at_least = Token("at", ""), Token("least", ""), given[end - 2]
            return [*given[: end - 2], *at_least, *given[end + 1 :]]
        if word in _PARTICLES and (end + 1 == len(words) or words[end + 1] in _AFTER_AN_AGENT):
            for at in range(end - 2, max(-1, end - 2 - _BETWEEN), -1):
                if (words[at], word) in known.phrases:
                    return [*given[: at + 1], given[end], *given[at + 1 : end], *given[end + 1 :]]
    return list(given)


def told_first(given: list[Token]) -> list[Token]:
    """ "who is the best according to Y" as "who Y think is the best"."""
    words = [token.text for token in given]
    at = next((at for at in range(1, len(words) - 2) if words[at : at + 2] == ["according", "to"]), None)
    if at is None:
        return given
    return [given[0], *given[at + 2 :], Token("think", ""), *given[1:at]]


def active(given: list[Token]) -> list[Token]:
    """ "is X blamed by Y" as "Y blamed X": who does what to whom is then told by the order."""
    words = [token.text for token in given]
    by = words.index("by") if "by" in words else 0
    if by < 3 or not is_participle(words[by - 1]):
        return given
    verb, rest = given[by - 1], given[by + 1 :]
    if words[0] in _MODALS and words[by - 2] == "be":  # "can X be caused by Y"
        opening, patient = given[:1], given[1 : by - 2]
    else:
        at = next((at for at, word in enumerate(words[: by - 2]) if word in _BE), None)
        if at is None or not _ASKING.issuperset(words[: min(at, 1)]) or at > 2:
            return given
        left_out = at > 0 and words[at] in _PAST  # the verb tells it
        opening, patient = given[: at + (not left_out)], given[at + 1 : by - 1]
    if not rest:  # "who is X liked by"
        return [opening[0], verb, *patient] if words[0] in ("who", "what") else given
    end = next((at for at, token in enumerate(rest) if token.text in _AFTER_AN_AGENT), len(rest))
    return [*opening, *rest[:end], verb, *patient, *rest[end:]] if end and patient else given
