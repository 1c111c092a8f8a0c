"""Attacks by the form of an answer: schemas, expressions and grammars that are dear to compile or to follow."""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.attacks import Target, attack

MULTIPLE = {"type": "integer", "multipleOf": 999983, "minimum": 0, "maximum": 10**18}


def held_to(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}}


@attack("form-multiple", "three integers that are multiples of 999983, one after the other and at once")
async def multiple(target: Target) -> None:
    for _ in range(3):
        await target.chat(**held_to(MULTIPLE))
    await target.chat(**held_to(MULTIPLE), times=8)


@attack("form-chain", "an EBNF grammar of 52 KB in which each rule names the next two")
async def chain(target: Target) -> None:
    rules = 1_700
    text = "\n".join(
        f'r{at} ::= "a" r{at + 1} | "b" r{min(at + 2, rules)} | r{at + 1}' for at in range(rules)
    )
    await target.chat(guided_grammar=f'root ::= r0\n{text}\nr{rules} ::= "c"\n', times=3)


@attack("form-repeats", "nested repetitions and large counts, as expressions, grammars and schemas")
async def repeats(target: Target) -> None:
    for expression in (
        "((a{1000}){1000}){1000}",
        "(a|aa)+" * 200 + "b",
        "(.*a.*b.*c){40}",
        "[a-z]{1,100000}x",
    ):
        await target.chat(guided_regex=expression)
    await target.chat(guided_grammar='root ::= ("a" ("b"){1,100000}){1,100000}')
    await target.chat(
        **held_to({"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9})
    )
    await target.chat(**held_to({"type": "string", "pattern": "^(a+)+(b+)+(c{1,1000}){1,1000}$"}))


@attack("form-wide", "enums, alternatives and references by the thousand")
async def wide(target: Target) -> None:
    await target.chat(**held_to({"enum": [f"value-{number:06}" for number in range(20_000)]}))
    await target.chat(
        **held_to(
            {"anyOf": [{"type": "object", "properties": {f"p{n}": {"const": n}}} for n in range(2_000)]}
        )
    )
    links = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, {"$ref": f"#/$defs/d{n + 2}"}]}
        for n in range(1_000)
    }
    ends = {"d1000": {"type": "null"}, "d1001": {"type": "integer"}}
    await target.chat(**held_to({"$ref": "#/$defs/d0", "$defs": links | ends}))
    await target.chat(guided_choice=["x" * 2_000 + str(number) for number in range(1_000)])


@attack("form-flood", "64 different forms at once")
async def flood(target: Target) -> None:
    await asyncio.gather(
        *(target.chat(**held_to({**MULTIPLE, "multipleOf": 999_000 + number})) for number in range(64))
    )
