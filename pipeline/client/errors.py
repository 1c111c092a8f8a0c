"""What can go wrong between an application and a model, as one small tree.

    ClientError
    ├── Refused                    this request cannot be answered as asked: unknown parameter, bad value, bad input
    │   └── PromptTooLong          it has more tokens than the engine takes
    ├── ModelNotFound              the server has no such model, or it is not loaded
    ├── ConnectFailed              no server there, or it was lost before the first token
    ├── DeadlineExceeded
    │   ├── FirstTokenDeadline     nothing came within `Timeouts.first_token_s`
    │   └── BetweenTokensDeadline  the answer stalled for `Timeouts.between_tokens_s`
    ├── Cancelled                  the answer was stopped, by `cancel()` or by the server
    └── ServerFailed               the server broke off: an error of the model, or the connection was lost in the answer
        └── Busy                   it has too much to do: nothing of the answer had come

Each message is one line that can be shown to a user. `request_id` finds the request in the server's log. Mistakes in
the use of the library itself (a closed client, a stream outside of its `with` block) are RuntimeError.

>>> try:
...     answer = client.generate("Hi", temprature=0.5)  # doctest: +SKIP
... except Refused as error:
...     print(error)
unknown parameter 'temprature' (did you mean 'temperature'?)
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of all failures of a request."""

    def __init__(self, message: str, *, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id


class Refused(ClientError):
    """The request cannot be answered as asked; asking differently would help. Often found before anything is sent."""


class PromptTooLong(Refused):
    """The prompt has more tokens than the engine takes; nothing was sent.

    Attributes:
        tokens: of the prompt; with `at_least`, it was not counted, and has as many or more.
        most: that the engine takes.
    """

    def __init__(self, tokens: int, most: int, *, at_least: bool = False) -> None:
        self.tokens, self.most, self.at_least = tokens, most, at_least
        super().__init__(f"the prompt has {self.count} tokens, and this model takes at most {most}")

    @property
    def count(self) -> str:
        """How many tokens the prompt has, in words."""
        return f"at least {self.tokens}" if self.at_least else str(self.tokens)


class ModelNotFound(ClientError):
    """The server is there, but has no model of that name that is ready."""


class ConnectFailed(ClientError):
    """No server could be reached, or it went away before it sent anything. It is safe to try again."""


class DeadlineExceeded(ClientError):
    """The server was too slow; the request has been cancelled."""


class FirstTokenDeadline(DeadlineExceeded):
    """Nothing came within `Timeouts.first_token_s` of sending the request."""


class BetweenTokensDeadline(DeadlineExceeded):
    """Nothing came within `Timeouts.between_tokens_s` of the chunk before."""


class Cancelled(ClientError):
    """The answer was stopped before its end, by `cancel()` on the stream or by the server."""


class ServerFailed(ClientError):
    """The server broke off: the model raised, the process died, or the answer ended without its end mark."""


class Busy(ServerFailed):
    """The server has too much to do and turned the request away. It is safe to try again, later or elsewhere."""
