"""The command line of trtllm-build: its flags by version, and whether its argument parser takes a command.

The facts are data (`data/trtllm_build.yaml`, each with its source). What the builder then makes of the values is in
`runtimes/tensorrt/build_effects`.

>>> check("1.2.1", ["--max_batch_size", "8", "--kv_cache_type", "pagd", "--gpus_per_node", "2"])
['--kv_cache_type pagd: must be one of continuous, paged, disabled', '--gpus_per_node: no such flag in 1.2.1']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from pipeline.contracts.version_range import entries_in, require_known
from pipeline.resources import parse_yaml

Kind = Literal["text", "integer", "choice", "toggle", "switch", "list"]
Value = str | int | bool | tuple[str, ...] | None
TOGGLE = ("enable", "disable")
_UNKNOWN = "no such flag in {version}"


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, in one version."""

    name: str  # without the dashes
    kind: Kind
    default: Value  # None: none, or it depends on the model
    choices: tuple[str, ...]  # empty: any
    aliases: tuple[str, ...]
    config: str | None  # where config.json says it: "build_config.max_batch_size"
    sources: tuple[str, ...]

    @property
    def in_config(self) -> tuple[str, ...]:
        """The keys that lead to it in config.json; none if it is not there."""
        return tuple(self.config.split(".")) if self.config else ()


def versions() -> tuple[str, ...]:
    """The releases whose trtllm-build is known, oldest first."""
    return tuple(data()["versions"])


def flags(version: str) -> Mapping[str, Flag]:
    """Map names to the flags of a version.

    Raises:
        UserError: the version is not known.
    """
    require_known(version, versions())
    return _flags(version)


def tunable(version: str) -> tuple[str, ...]:
    """List the flags that a recipe may give itself (`runtime.build_flags`)."""
    return tuple(name for name in data()["tunable"]["names"] if name in flags(version))


def decided(version: str) -> Mapping[str, str]:
    """Map all other flags to the reason why a recipe may not give them."""
    reasons = {name: entry["because"] for entry in data()["decided"] for name in entry["names"]}
    return {name: reasons[name] for name in flags(version) if name in reasons}


def words_of(entry: str) -> tuple[str, ...]:
    """The words of the command line for one entry of `runtime.build_flags`: `name=value`, or the name of a switch.

    >>> words_of("reduce_fusion=enable"), words_of("fast_build")
    (('--reduce_fusion', 'enable'), ('--fast_build',))
    """
    name, equals, value = entry.partition("=")
    return (f"--{name}", value) if equals else (f"--{name}",)


def entries_of(flag: Flag) -> tuple[str, ...]:
    """How `runtime.build_flags` may say a flag; of a whole number only one example.

    >>> entries_of(flags("1.2.1")["reduce_fusion"]), entries_of(flags("1.2.1")["fast_build"])
    (('reduce_fusion=enable', 'reduce_fusion=disable'), ('fast_build',))
    """
    if flag.kind == "switch":
        return (flag.name,)
    number = flag.default or data()["tunable"]["example"].get(flag.name)
    return tuple(f"{flag.name}={value}" for value in flag.choices or (number,))


def check(version: str, argv: Sequence[str]) -> list[str]:
    """List what the argument parser has against a command (without the program); empty if it takes it.

    Raises:
        UserError: the version is not known.
    """
    return [read.fault for read in _read(version, argv) if read.fault is not None]


def parse(version: str, argv: Sequence[str]) -> dict[str, Value]:
    """Read the values of a command that `check` finds nothing against: all flags, with defaults for those that are
    not given.

    A toggle is "enable" or "disable", a switch True or False; the last one counts where a flag is said twice.
    """
    values = {name: False if flag.kind == "switch" else flag.default for name, flag in flags(version).items()}
    values.update({read.flag.name: read.value for read in _read(version, argv) if read.flag is not None})
    return values


def named_flags(version: str, argv: Sequence[str]) -> frozenset[str]:
    """Return the flags that a command gives."""
    return frozenset(read.flag.name for read in _read(version, argv) if read.flag is not None)


def speculative_modes() -> Mapping[str, int]:
    """Map speculative decoding modes to the numbers that config.json has for them."""
    numbers: Mapping[str, int] = data()["speculative_modes"]["numbers"]
    return numbers


def config_value(flag: Flag, value: Value) -> Any:
    """What config.json has for a value of a flag; `alike` tells how releases differ in that.

    >>> config_value(flags("1.2.1")["kv_cache_type"], "paged"), config_value(flags("1.2.1")["gemm_plugin"], "disable")
    ('PAGED', None)
    """
    match flag.name, flag.kind, value:
        case "kv_cache_type", _, str():
            return value.upper()
        case "speculative_decoding_mode", _, _:
            return speculative_modes()[str(value or "none")]
        case _, "toggle", _:
            return value == "enable"
        case _, "choice", "disable":
            return None
    return value


def alike(found: Any, wanted: Any, dtype: str | None) -> bool:
    """Whether a value in config.json is the one that is meant. `dtype`: of the model, for which "auto" stands.

    >>> alike("paged", "PAGED", None), alike("bfloat16", "auto", "bfloat16"), alike("float16", "auto", "bfloat16")
    (True, True, False)
    """
    if isinstance(found, str) and isinstance(wanted, str):
        return found.upper() == wanted.upper() or (wanted == "auto" and found == dtype)
    return type(found) is type(wanted) and bool(found == wanted)


@dataclass(frozen=True, slots=True)
class _Read:
    """One flag of a command, or what is wrong at its place."""

    flag: Flag | None
    value: Value = None
    fault: str | None = None


def _read(version: str, argv: Sequence[str]) -> Iterator[_Read]:
    """The way of Python's argparse: `--flag value` or `--flag=value`, and unambiguous beginnings of names."""
    known = flags(version)
    left = list(argv)
    while left:
        word = left.pop(0)
        if not _is_flag(known, word):
            yield _Read(None, fault=f"{word}: belongs to no flag")
            continue
        name, equals, attached = word.partition("=")
        found = _named(known, name.removeprefix("--"))
        words = [attached] if equals else []
        if isinstance(found, str):
            yield _Read(None, fault=f"{name}: {found.format(version=version)}")
            if not equals and left and not _is_flag(known, left[0]):
                left.pop(0)
            continue
        if found.kind != "switch" and not equals:
            most = len(left) if found.kind == "list" else 1
            while left and len(words) < most and not _is_flag(known, left[0]):
                words.append(left.pop(0))
        fault = _fault(found, words)
        if fault is not None:
            yield _Read(None, fault=fault)
        else:
            yield _Read(found, _value(found, words))


def _is_flag(known: Mapping[str, Flag], word: str) -> bool:
    """A negative number is a value, because no flag looks like one; so is what has a blank, unless it names a flag."""
    if not word.startswith("-") or word == "-":
        return False
    if " " in word:
        name = word.partition("=")[0].removeprefix("--")
        return word.startswith("--") and _named(known, name) != _UNKNOWN
    return not word[1:].replace(".", "", 1).isdigit()


def _named(known: Mapping[str, Flag], name: str) -> Flag | str:
    if name in known:
        return known[name]
    by_name = {named_flags: flag for flag in known.values() for named_flags in (flag.name, *flag.aliases)}
    if name in by_name:
        return by_name[name]
    near = sorted(named_flags for named_flags in by_name if name and named_flags.startswith(name))
    if len(near) == 1:
        return by_name[near[0]]
    return f"may be {', '.join(near)}" if near else _UNKNOWN


def _fault(flag: Flag, words: Sequence[str]) -> str | None:
    if flag.kind == "switch":
        return f"--{flag.name} {words[0]}: takes no value" if words else None
    if not words:
        return f"--{flag.name}: needs a value"
    if flag.kind == "integer" and not _is_integer(words[0]):
        return f"--{flag.name} {words[0]}: must be a whole number"
    if flag.choices and words[0] not in flag.choices:
        return f"--{flag.name} {words[0]}: must be one of {', '.join(flag.choices)}"
    return None


def _is_integer(word: str) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return True


def _value(flag: Flag, words: Sequence[str]) -> Value:
    match flag.kind:
        case "switch":
            return True
        case "integer":
            return int(words[0])
        case "list":
            return tuple(words)
    return words[0]


@cache
def _flags(version: str) -> Mapping[str, Flag]:
    entries = entries_in(data()["flags"], version, versions())
    return {entry["name"]: _flag(entry) for entry in entries}


def _flag(entry: Mapping[str, Any]) -> Flag:
    toggled = TOGGLE if entry["kind"] == "toggle" else ()
    return Flag(
        name=entry["name"],
        kind=entry["kind"],
        default=entry.get("default"),
        choices=tuple(entry.get("choices", toggled)),
        aliases=tuple(entry.get("aliases", ())),
        config=entry.get("config"),
        sources=tuple(entry["source"]),
    )


@cache
def data() -> Mapping[str, Any]:
    """The whole of data/trtllm_build.yaml."""
    file = resources.files("pipeline.contracts") / "data" / "trtllm_build.yaml"
    loaded: Mapping[str, Any] = parse_yaml(file.read_text("utf-8"))
    return loaded
