"""The form that an answer must have, as TensorRT-LLM's tensors tell it: a kind, and a text that depends on it.

guided_decoding_guide_type    json, json_schema, regex, ebnf_grammar or, beyond TensorRT-LLM's models, structural_tag
guided_decoding_guide         the schema, expression, grammar or tag (JSON); `json` has none
"""

from __future__ import annotations

from typing import Literal

from shared.refusal import RequestRefused

TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
Kind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag"]


def guide_of(kind: str | None, text: str | None) -> tuple[Kind, str] | None:
    """Guide of the two tensors; None where there are none.

    Raises:
        RequestRefused: One is missing, or the kind is not known.

    >>> guide_of("regex", "[0-9]+")
    ('regex', '[0-9]+')
    """
    match kind:
        case None if text is None:
            return None
        case None:
            raise RequestRefused(f"{TYPE}: is missing, but there is a {GUIDE}")
        case "json":
            return kind, ""
        case "json_schema" | "regex" | "ebnf_grammar" | "structural_tag" if text is not None:
            return kind, text
        case "json_schema" | "regex" | "ebnf_grammar" | "structural_tag":
            raise RequestRefused(f"{GUIDE}: is missing, and {kind} needs one")
    raise RequestRefused(f"{TYPE} = {kind}: must be json, json_schema, regex, ebnf_grammar or structural_tag")
