"""instructor: an answer in the form of a pydantic model, in each of its modes; whole, and partial while it streams.

Prints {mode: the answer's fields}; of JSON, which asks for any object and checks its form afterwards, how it ended.
"""

import json
import os
import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field

Mode = instructor.Mode


class Parcel(BaseModel):
    """Where a parcel is."""

    place: Literal["depot", "van", "door"]
    days: int = Field(ge=0, le=30)


ask = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": sys.argv[1]}],
    "temperature": 0,
    "max_retries": 0,
}
said = {}
for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    said[mode.name] = client.chat.completions.create(response_model=Parcel, **ask).model_dump()
    partials = list(client.chat.completions.create_partial(response_model=Parcel, **ask))
    # The form of partial answers has another name in the prompt, so another answer may be the likeliest.
    Parcel.model_validate(partials[-1].model_dump())

endings = []
client = instructor.from_openai(OpenAI(), mode=Mode.JSON)
client.on("completion:response", lambda response: endings.append(response.choices[0]))
try:
    client.chat.completions.create(response_model=Parcel, **ask)
# A small model does not know the form: its object may have other fields.
except Exception as error:
    print(error, file=sys.stderr)
(ending,) = endings
said["JSON"] = [ending.finish_reason, type(json.loads(ending.message.content)).__name__]
print(json.dumps(said))
