"""Anthropic's SDK: what is not a plain answer. Each object is held to the SDK's own types, strictly.

Prints what it got, for the test to judge; the gateway's model is scripted.
"""

import json
import os
import time

import anthropic
from anthropic.types import Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse
from pydantic import BaseModel, TypeAdapter

client = anthropic.Anthropic(base_url=os.environ["GATEWAY_URL"], api_key="none", max_retries=0)
MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
EVENT = TypeAdapter(RawMessageStreamEvent)


UNKNOWN = set()  # fields of answers that the SDK's types do not have


def judged(kind, made):
    """An object, held to its type: the client itself takes any JSON."""
    found = kind.model_validate(made.to_dict())
    note_unknown(found)
    return found


def note_unknown(value):
    if isinstance(value, BaseModel):
        UNKNOWN.update(f"{type(value).__name__}.{name}" for name in value.model_extra or ())
        value = list(vars(value).values())
    for item in value if isinstance(value, list) else ():
        note_unknown(item)


def message(**fields):
    return {"model": MODEL, "max_tokens": 16, "messages": QUESTION, **fields}


def stopped():
    raw = client.messages.with_raw_response.create(**message(stop_sequences=["STOP"]))
    parsed = raw.parse()
    made = judged(Message, parsed)
    with client.messages.stream(**message(stop_sequences=["STOP"])) as stream:
        streamed = stream.get_final_message()
    ends = [
        [message.content[0].text, message.stop_reason, message.stop_sequence] for message in (made, streamed)
    ]
    return {"ends": ends, "request_id": bool(raw.request_id) and raw.request_id == parsed._request_id}


def events():
    """Every event of a stream, held to its type; the client itself leaves out `ping`."""
    with client.messages.with_streaming_response.create(**message(stream=True)) as answer:
        datas = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
    found = [None if data["type"] == "ping" else EVENT.validate_python(data) for data in datas]
    note_unknown(found)
    return [data["type"] for data in datas]


def models():
    listed = [judged(ModelInfo, model).id for model in client.models.list(limit=1)]
    return {"listed": listed, "one": judged(ModelInfo, client.models.retrieve(listed[-1])).display_name}


def too_long():
    long = [{"role": "user", "content": "word " * 200}]
    try:
        client.messages.create(**message(messages=long))
    except anthropic.BadRequestError as error:
        return [
            error.type,
            error.message.partition("prompt is too long: ")[2].split(" ")[1:3],
            bool(error.request_id),
        ]


def document():
    source = {"type": "text", "media_type": "text/plain", "data": "Tea: 2"}
    block = {"type": "document", "source": source, "title": "Prices"}
    asked = [{"role": "user", "content": [block, {"type": "text", "text": "Tea?"}]}]
    count = judged(MessageTokensCount, client.messages.count_tokens(model=MODEL, messages=asked))
    return count.input_tokens


def batch():
    batches = client.messages.batches
    requests = [
        {"custom_id": "good", "params": message()},
        {"custom_id": "bad", "params": message(temperature=-1)},
    ]
    made = judged(MessageBatch, batches.create(requests=requests))
    deadline = time.monotonic() + 60
    while judged(MessageBatch, batches.retrieve(made.id)).processing_status != "ended":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    results = [judged(MessageBatchIndividualResponse, result) for result in batches.results(made.id)]
    listed = [judged(MessageBatch, batch).id == made.id for batch in batches.list(limit=1)]
    deleted = judged(DeletedMessageBatch, batches.delete(made.id)).id == made.id
    return {
        "results": {result.custom_id: result.result.type for result in results},
        "listed": listed,
        "deleted": deleted,
    }


asked = (stopped, events, models, too_long, document, batch)
said = {check.__name__: check() for check in asked}
print(json.dumps({**said, "unknown": sorted(UNKNOWN)}))
