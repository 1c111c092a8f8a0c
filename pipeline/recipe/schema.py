"""The JSON schema of a recipe, for editors and other tools; checked in beside this file.

It has every key, type, bound and description. Rules that span fields are not in it.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic.json_schema import GenerateJsonSchema

from pipeline.recipe.recipe import Recipe

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: object) -> bool:  # noqa: ARG002
        return False


def schema_text() -> str:
    """The schema of the models as they are now."""
    schema = Recipe.model_json_schema(schema_generator=_Untitled)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe of pipeline"}
    return (
        json.dumps(head | {key: value for key, value in schema.items() if key not in head}, indent=2) + "\n"
    )


def schema_is_current() -> bool:
    """Whether the checked-in file is what the models say."""
    return SCHEMA_FILE.is_file() and SCHEMA_FILE.read_text(encoding="utf-8") == schema_text()
