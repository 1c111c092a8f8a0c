"""Server that compiles guides in worker processes, under limits: a client may send one that takes seconds, or GB.

    python grammar_server.py TOKENIZER END_ID MEMORY_MIB

Standard input is a Unix socket. Each message on it is another socket, for one worker: a fork of this process, which has
read the tokenizer. The kernel holds a worker to its processor time by ITIMER_PROF, whose signal no library can put off,
and to its memory by RLIMIT_AS.

    engine    {"kind": "json_schema", "text": "…", "cpu_s": 1.0, "nice": 5}    until the end of the stream
    worker    .                                                                 the work begins
              {"grammar": "…", "memory_bytes": 4096}                            the grammar as llguidance takes it
              {"error": "…"}                                                    it is no form, or cannot be held to

A worker that is ended says nothing. `grammars` is the other end: it compiles what a worker could compile. This file is
run by itself, so it imports nothing of the engine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Half of llguidance's own or less: what is so ambiguous that a token costs milliseconds would hold up everybody else.
# Fuel is also what nested repetitions burn: of (a{1000}){1000}, llguidance's own amount makes ten seconds.
_LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=100_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)
BEGUN = b"."
_COMPACT: JsonCompileOptions = {"whitespace_flexible": False}
# As models write the arguments of calls, and as they do not have to.
_SPACED = {**_COMPACT, "item_separator": ", ?", "key_separator": ": ?"}
# With these beside its properties, what an object may have is said in several places.
_OPEN = {
    "additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf", "if",
}  # fmt: skip


def make_tokenizer(path: Path, end_id: int) -> LLTokenizer:
    """Read a tokenizer.json.

    Raises:
        ValueError: llguidance does not know this kind of tokenizer.
    """
    return LLTokenizer(path.read_text(encoding="utf-8"), eos_token=end_id)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Compile a grammar, and compute the tokens that may come first, which later matchers of it need not do again.

    Raises:
        ValueError: The guide is malformed, or no text matches it.
    """
    made = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    if made.is_error():
        raise ValueError(made.get_error())
    first = made.deep_copy()
    tokens = bytearray(first.compute_bitmask())
    if first.is_error() and "NoExtension" not in first.get_error():
        raise ValueError(first.get_error().removesuffix("\n<non-verbose/>"))
    end = tokenizer.eos_token
    tokens[end // 8] &= ~(1 << end % 8)
    if first.is_stopped() or not (any(tokens) or first.is_accepting()):
        raise ValueError("no text has this form; it may refer to itself without an end")
    return made


def grammar_of(kind: str, text: str, tokenizer: LLTokenizer) -> str:
    """Write a guide as the grammar that llguidance takes.

    Raises:
        ValueError: It is no guide of its kind.
    """
    match kind:
        case "json":
            return _json_schema('{"type": "object"}')
        case "json_schema":
            return _json_schema(text)
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "structural_tag":
            return str(LLMatcher.grammar_from_lark(StructuralTag(tokenizer).write(json.loads(text))))
        case _:
            return str(grammar_from("ebnf", text))


def _json_schema(text: str) -> str:
    return str(LLMatcher.grammar_from_json_schema(json.dumps(_closed(json.loads(text))), defaults=_COMPACT))


def _closed(schema: Any) -> dict[str, Any]:
    """Close the objects of a schema to properties that it does not name, unless it speaks of others."""
    if not isinstance(schema, dict):
        raise ValueError("a schema is a JSON object")
    # Parts that are to hold together would each forbid what the others ask for.
    parts = list(_schemas(schema))
    if not any(isinstance(part.get("allOf"), list) and len(part["allOf"]) > 1 for part in parts):
        for part in parts:
            if part.get("properties") and not _OPEN & part.keys():
                part["additionalProperties"] = False
    return schema


def _schemas(part: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all within it; not what stands in the place of values."""
    if isinstance(part, list):
        for item in part:
            yield from _schemas(item)
    elif isinstance(part, dict):
        yield part
        for name, item in part.items():
            if name in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
                yield from _schemas(list(item.values()) if isinstance(item, dict) else [])
            elif name not in ("const", "default", "enum", "examples"):
                yield from _schemas(item)


class StructuralTag:
    """Writes a structural tag, in the form of xgrammar 0.1.25, as a Lark grammar of llguidance.

    Text is free until a trigger comes, with which a tag begins. Special tokens are no text to llguidance: the text of a
    tag is cut at them, and free text may have all but those that a trigger holds. Spelled out in text, the end of free
    text counts as well: whoever reads an answer sees text alone. Of xgrammar's formats, those that a gateway writes are
    known: const_string, regex, json_schema, any_text (within a tag), sequence, or, tag,
    tags_with_separator and triggered_tags.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._special = _special_tokens(tokenizer)
        known = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, known))})" if known else r"((?!))")
        self._rules: list[str] = []

    def write(self, tag: Any) -> str:
        """Parse a structural tag. Raises ValueError if it is malformed, or has an unknown format."""
        try:
            start = self._format(tag["format"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no structural tag: {error}") from None
        return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(?s:.*)/", *self._rules])

    def _format(self, node: Mapping[str, Any]) -> str:
        match node["type"]:
            case "const_string":
                return self._literal(node["value"])
            case "regex":
                pattern = re.sub(r"\\.|/", lambda part: part[0] if part[0] != "/" else r"\/", node["pattern"])
                return f"/{pattern}/" if pattern else '""'
            case "json_schema":
                return f"%json {json.dumps(_closed(node['json_schema']) | {'x-guidance': _SPACED})}"
            case "sequence":
                return " ".join(map(self._format, node["elements"]))
            case "or":
                return self._choice(list(map(self._format, node["elements"])))
            case "tag":
                return self._tag(node)
            case "tags_with_separator" if node.get("at_least_one"):
                tags = self._choice(list(map(self._tag, node["tags"])))
                return f"{tags} ({self._literal(node['separator'])} {tags})*"
            case "triggered_tags":
                return self._triggered(node)
        raise ValueError(f"format {str(node['type'])[:64]} is not known here")

    def _tag(self, tag: Mapping[str, Any], done: str = "") -> str:
        """Write a tag of which the first characters, `done`, have come."""
        begin = self._literal(tag["begin"][len(done) :])
        if tag["content"]["type"] == "any_text":
            return f"{begin} {self._until(tag['end'])}"
        return f"{begin} {self._format(tag['content'])} {self._literal(tag['end'])}"

    def _triggered(self, node: Mapping[str, Any]) -> str:
        tags, triggers = node["tags"], [self._first(trigger) for trigger in node["triggers"]]
        taken = {id for trigger in triggers for id in self._ids(trigger)}
        free = [id for id in self._special.values() if id not in taken]
        items = [
            f"{self._until(trigger)} {self._choice(list(self._begun(tags, trigger)))}"
            for trigger in dict.fromkeys(triggers)
        ]
        text = f"(TEXT <[{','.join(map(str, free))}]>)" if free else None
        ends = bool(node.get("stop_after_first"))
        many = self._choice([part for part in (text, *(() if ends else items)) if part])
        last = self._choice(["TEXT", *(items if ends else ())])
        further = f"{many}* {last}" if many else last
        if not node.get("at_least_one"):
            return further
        first = self._choice(list(map(self._tag, tags)))
        return first if ends else f"{first} {further}"

    def _begun(self, tags: Sequence[Mapping[str, Any]], trigger: str) -> Iterator[str]:
        yield from (self._tag(tag, trigger) for tag in tags if tag["begin"].startswith(trigger))

    def _first(self, trigger: str) -> str:
        """Cut a trigger after its first special token, which identifies it."""
        token = self._cut.search(trigger)
        return trigger[: token.end()] if token else trigger

    def _ids(self, text: str) -> Iterator[int]:
        yield from (self._special[token] for token in self._cut.findall(text))

    def _until(self, end: str) -> str:
        """Rule for any text up to and including a non-empty end."""
        if not end:
            raise ValueError("what may hold any text needs an end")
        before, *ending = self._cut.split(end, maxsplit=1)
        # One lexeme, as lazy rules are: else TEXT would take the beginning of the end, too.
        spelled = self._rule(f"TEXT {_quoted(''.join([before, *ending[:1]]))}", "[lazy]")
        if not ending:
            return spelled
        text = self._rule(f"TEXT {_quoted(before)}", kind="R") if before else "TEXT"
        return f"{self._choice([f'{text} {self._literal(ending[0])}', spelled])} {self._literal(ending[1])}"

    def _literal(self, text: str) -> str:
        parts = [part for part in self._cut.split(text) if part]
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else _quoted(part) for part in parts
        )

    def _choice(self, options: list[str]) -> str:
        return self._rule(" | ".join(option.strip() or '""' for option in options)) if options else ""

    def _rule(self, body: str, option: str = "", kind: str = "r") -> str:
        """Add a rule, or by an upper case `kind` a lexeme."""
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}{option}: {body}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


@cache
def _special_tokens(tokenizer: LLTokenizer) -> Mapping[str, int]:
    """Special tokens of a tokenizer, by their text."""
    ids = (id for id in range(tokenizer.vocab_size) if tokenizer.is_special_token(id))
    return {text: id for id in ids if (text := tokenizer.decode_str([id]))}


def serve(tokenizer: LLTokenizer, engine: socket.socket, memory_bytes: int) -> None:
    """Fork a worker for each socket that comes, until the engine closes its end."""
    while True:
        message, sockets, _, _ = socket.recv_fds(engine, 1, 1)
        if not message:
            return
        with socket.socket(fileno=sockets[0]) as connection:
            try:
                worker = os.fork()
            except OSError as error:
                print(f"no process to compile a form in: {error}", file=sys.stderr)
                continue
            if worker == 0:
                engine.close()
                _work(tokenizer, connection, memory_bytes)


def _work(tokenizer: LLTokenizer, connection: socket.socket, memory_bytes: int) -> None:
    """Compile one form, and end this process, which is a fork: nothing of what it forked is to be cleaned up."""
    try:
        # What is ended for want of memory would say so there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        # Where memory is short, rather this process is ended than the engine; some containers forbid to say so.
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        before = _memory_bytes()
        resource.setrlimit(resource.RLIMIT_AS, (before + memory_bytes, before + memory_bytes))
        content = b"".join(iter(lambda: connection.recv(2**18), b""))
        if not content:
            return
        request = json.loads(content)
        os.nice(request["nice"])
        connection.sendall(BEGUN)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
        answer = _compile(tokenizer, request["kind"], request["text"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        if "grammar" in answer:
            answer["memory_bytes"] = _memory_bytes() - before
        connection.sendall(json.dumps(answer).encode())
    except (MemoryError, OSError):
        # Said by silence, as by whatever the kernel ends; or the engine has gone.
        pass
    finally:
        os._exit(0)


def _compile(tokenizer: LLTokenizer, kind: str, text: str) -> dict[str, Any]:
    try:
        grammar = grammar_of(kind, text, tokenizer)
        make_matcher(tokenizer, grammar)
    except (ValueError, RecursionError) as error:
        return {"error": str(error)}
    return {"grammar": grammar}


def _memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(tokenizer: Path, end_id: int, memory_mib: int) -> None:
    # The engine ends this process, by closing the socket.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    # No worker is waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known = make_tokenizer(tokenizer, end_id)
    _special_tokens(known)
    gc.freeze()
    serve(known, socket.socket(fileno=sys.stdin.fileno()), memory_mib * 2**20)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
