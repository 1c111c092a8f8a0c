"""The identity of a request for the cache: the scope of a conversation, and the question asked in it.

The scope is a digest of everything that can change an answer but the last user turn: engine, tokenizer and chat
template, system prompt, history, tools, sampling parameters, limits, tenant. The key adds that turn. What cannot change
an answer (order of keys and of stop words, 1 or 1.0, the seed of a greedy request) changes neither.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

from pipeline.client.prompt import Prompt, prompt_token_ids
from pipeline.client.sampling import is_neutral

# Of scopes and keys: 128 bits.
DIGEST_BYTES = 16
# Of engines and tenants.
ID_BYTES = 8
Message = Mapping[str, Any]

# Parameters that only sampling reads; num_draft_tokens changes how fast a greedy answer comes, not the answer.
_OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "num_draft_tokens")
_WITHOUT_EFFECT = ("priority",)
_SETS = ("stop", "bad_words", "stop_token_ids")
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Origin:
    """Source and owner of answers: a rebuilt engine never answers from the cache of an older one.

    Attributes:
        deployment: digest of the packaged repository: engines, tokenizer, chat template.
        model: name of the model, where a server has several.
        tenant: owner of the answers.
    """

    deployment: str
    model: str = ""
    tenant: str = ""


@dataclass(frozen=True)
class Question:
    """One request, as the cache sees it.

    Attributes:
        scope: 16 bytes.
        engine: see `engine_id`.
        tenant: see `tenant_id`.
        turn: the last user turn, or the prompt.
        comparable: whether the turn may be compared by meaning: the request ends with it.
        repeatable: whether the answer is the same each time: greedy, or with a seed.
    """

    scope: bytes
    engine: bytes
    tenant: bytes
    turn: str
    comparable: bool
    repeatable: bool

    @cached_property
    def key(self) -> bytes:
        """The exact identity, 16 bytes. Defined for every text, also for one that cannot be encoded as UTF-8."""
        turn = self.turn.encode("utf-8", "surrogatepass")
        return blake2b(self.scope + turn, digest_size=DIGEST_BYTES).digest()


def make_question(
    origin: Origin,
    prompt: Prompt,
    sampling: Mapping[str, Any],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> Question:
    """Make the question that a request asks.

    Args:
        origin: source and owner of the answer.
        prompt: text, token ids, or chat messages.
        sampling: parameters as `pipeline.client.Sampling` names them; None is the same as left out.
        tools: function definitions that the chat template is given.
        variables: values that the chat template is given besides messages and tools.

    >>> a = make_question(Origin("d"), "Hi", {"temperature": 0, "seed": 1, "stop": ["a", "b"]})
    >>> b = make_question(Origin("d"), "Hi", {"stop": ["b", "a"], "top_k": 1})
    >>> a.key == b.key, a.repeatable
    (True, True)
    """
    history, turn = _split(prompt)
    present = {name: value for name, value in sampling.items() if value is not None}
    greedy = present.get("temperature") == 0 or present.get("top_k") == 1
    scope = {
        "origin": [origin.deployment, origin.model, origin.tenant],
        "history": history,
        "tools": [_clean(tool) for tool in tools],
        "variables": _clean(variables or {}),
        "sampling": _sampling(present, greedy=greedy),
    }
    digest = blake2b(_canonical(scope), digest_size=DIGEST_BYTES).digest()
    return Question(
        scope=digest,
        engine=engine_id(origin.deployment, origin.model),
        tenant=tenant_id(origin.tenant),
        turn=turn or "",
        comparable=turn is not None,
        repeatable=greedy or present.get("seed") is not None,
    )


@lru_cache
def engine_id(deployment: str, model: str = "") -> bytes:
    """Return the identifier by which all answers of an engine are found and removed, 8 bytes."""
    return blake2b(_canonical([deployment, model]), digest_size=ID_BYTES).digest()


@lru_cache
def tenant_id(tenant: str) -> bytes:
    """Return the identifier by which all answers of a tenant are found and removed, 8 bytes."""
    return blake2b(tenant.encode(), digest_size=ID_BYTES).digest()


def _split(prompt: Prompt) -> tuple[Any, str | None]:
    """Split off the last user turn; None if the prompt does not end with one in plain text."""
    if isinstance(prompt, str):
        return "prompt", prompt
    if (ids := prompt_token_ids(prompt)) is not None:
        return ["token ids", *ids], None
    messages = [_clean(message) for message in prompt]
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and isinstance(last.get("content"), str):
        return [*messages[:-1], {**last, "content": None}], last["content"]
    return messages, None


def _sampling(present: Mapping[str, Any], *, greedy: bool) -> dict[str, Any]:
    ignored = (*_WITHOUT_EFFECT, *(_OF_SAMPLING if greedy else ()))
    kept = {name: value for name, value in present.items() if name not in ignored}
    canonical: dict[str, Any] = {"greedy": True} if greedy else {}
    for name, value in kept.items():
        if name in _SETS:
            values = sorted({value} if isinstance(value, str) else set(value))
            if values:
                canonical[name] = values
        elif not is_neutral(name, value):
            canonical[name] = _clean(value)
    return canonical


def _clean(value: Any) -> Any:
    """Leave out keys that are None, all the way down."""
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_clean(item) for item in value]
    return _number(value)


def _number(value: Any) -> Any:
    """Write 1.0 as 1, so that a number has one form."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _canonical(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "surrogatepass")
