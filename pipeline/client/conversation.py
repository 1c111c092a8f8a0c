"""A conversation: what was said so far, as messages for the next request. It sends nothing and counts no tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.models.chat_template import Message


@dataclass(slots=True)
class Conversation:
    """Turns of a question and its answer, under an optional system prompt.

    >>> talk = Conversation(system="Be brief.")
    >>> talk.add("Hi", "Hello!")
    >>> [message["role"] for message in talk.messages("How are you?")]
    ['system', 'user', 'assistant', 'user']
    """

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)  # (question, answer), oldest first

    def messages(self, question: str) -> list[Message]:
        """What to send to have `question` answered."""
        said = [({"role": "system", "content": self.system})] if self.system else []
        for asked, answered in self.turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn for what follows."""
        self.turns.append((question, answer))

    def forget_oldest(self) -> bool:
        """Drop the oldest turn, so that the prompt gets shorter; False if there is none left."""
        if self.turns:
            del self.turns[0]
            return True
        return False

    def reset(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.turns.clear()
