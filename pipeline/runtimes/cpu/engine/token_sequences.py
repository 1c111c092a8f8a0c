"""Stop words and bad words, which are short sequences of token ids.

A word matches at the end of the whole sequence, prompt included, as in TensorRT-LLM's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens


class WordList:
    """Words by their last token.

    >>> words = WordList([(7,), (1, 2)])
    >>> words.ends([5, 1, 2]), words.ends([5, 2]), words.completions([5, 1]), words.completions([5])
    (True, False, [7, 2], [7])
    """

    __slots__ = ("_heads", "longest")

    def __init__(self, words: Tokens[Tokens[int]]) -> None:
        self._heads: dict[
            int, list[list[int]]
        ] = {}  # last token -> what must come before it, one list a word
        self.longest = max(map(len, words), default=0)
        for *head, last in words:
            self._heads.setdefault(last, []).append(head)

    def __bool__(self) -> bool:
        return bool(self._heads)

    def ends(self, tokens: list[int]) -> bool:
        """Whether `tokens` end with one of the words."""
        heads = self._heads.get(tokens[-1])
        return heads is not None and any(_ends_with(tokens, head, len(tokens) - 1) for head in heads)

    def completions(self, tokens: list[int]) -> list[int]:
        """The tokens that, coming next, would complete a word."""
        return [
            last
            for last, heads in self._heads.items()
            if any(_ends_with(tokens, head, len(tokens)) for head in heads)
        ]


def _ends_with(tokens: list[int], head: list[int], end: int) -> bool:
    return len(head) <= end and tokens[end - len(head) : end] == head
