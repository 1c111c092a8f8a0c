"""Reading the stored responses that a request continues or refers to, before its prompt is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import dropwhile, islice

from pipeline.gateway.bounds import MAX_MESSAGES, MAX_REFERRED
from pipeline.gateway.errors import ApiError
from pipeline.gateway.responses.input_items import Item, response_of_item
from pipeline.gateway.responses.request import ResponseRequest
from pipeline.gateway.responses.stored_responses import StoredConversation, StoredResponse, StoredResponses
from pipeline.gateway.state.database import known_form

_READ_AT_ONCE = 16


@dataclass(slots=True)
class RecalledResponses:
    """Stored responses that were read for one request.

    Attributes:
        before: conversation that the request continues.
        referred: responses whose items the request refers to, by id.
    """

    before: StoredConversation = field(default_factory=StoredConversation)
    referred: Mapping[str, StoredResponse] = field(default_factory=dict)
    _items: dict[str, dict[str, Item]] = field(default_factory=dict)  # by response and id

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return self.before.size + sum(one.size for one in self.referred.values())

    def take_item(self, id: str) -> Item | None:
        """Return an item of a response; None if there is none of this id, or it was taken already."""
        response = response_of_item(id)
        if response not in self._items:
            stored = self.referred.get(response)
            self._items[response] = {} if stored is None else {item["id"]: item for item in stored.items()}
        return self._items[response].pop(id, None)


def recall(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> RecalledResponses:
    """Read what a request continues and refers to. It blocks.

    Args:
        request: body of the client's request.
        tenant: name of the tenant.
        stored: responses of all tenants.
        most_bytes: most bytes of JSON that are read.

    Raises:
        ApiError: 400, if something is not stored, or too large; 501, if nothing is stored here; 503, if what stores
            responses cannot be used.
    """
    before = _conversation(request, tenant, stored, most_bytes)
    return RecalledResponses(before, _referred(request, tenant, stored, most_bytes))


def _conversation(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> StoredConversation:
    id = request.previous_response_id
    if id is None:
        return StoredConversation()
    found = stored.conversation(tenant, known_form(id), most_items=MAX_MESSAGES, most_bytes=most_bytes)
    if found is None:
        text = f"Previous response with id '{id[:64]}' not found."
        raise ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
    if found.complete:
        return found
    if request.truncation != "auto":
        text = f"The conversation has more than {MAX_MESSAGES} items or {most_bytes} bytes"
        raise ApiError(400, text, param="previous_response_id", code="context_length_exceeded")
    # The results of calls stand after the calls.
    return found._replace(items=list(dropwhile(lambda item: item.get("role") != "user", found.items)))


def _referred(
    request: ResponseRequest, tenant: str, stored: StoredResponses, most_bytes: int
) -> Mapping[str, StoredResponse]:
    ids = dict.fromkeys(known_form(response_of_item(item)) for item in request.referred_items)
    if len(ids) > MAX_REFERRED:
        raise ApiError(400, f"input: refers to items of more than {MAX_REFERRED} responses", param="input")
    found: dict[str, StoredResponse] = {}
    left = iter(ids)
    while page := tuple(islice(left, _READ_AT_ONCE)):
        found |= stored.find(tenant, page)
        if sum(one.size for one in found.values()) > most_bytes:
            raise ApiError(400, "input: refers to too many large responses", param="input")
    return found
