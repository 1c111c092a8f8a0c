"""The command line of trtllm-build: its flags by version, and whether a command is one of name, type and release.

The facts are data (`data/trtllm_build.yaml`, each with its source). What the builder then makes of the values is in
`runtimes/tensorrt/build_effects`.

>>> check("1.2.1", ["--max_batch_size", "8", "--kv_cache_type", "pagd", "--gpus_per_node", "2"])
['--kv_cache_type pagd: must be one of continuous, paged, disabled', '--gpus_per_node: no such flag in 1.2.1']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Literal

from pipeline.contracts import read_facts, record
from pipeline.contracts.version_range import entries_in

Kind = Literal["text", "integer", "choice", "toggle", "switch", "list"]
Value = str | int | bool | tuple[str, ...] | None
TOGGLE = ("enable", "disable")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, in one version."""

    name: str  # without the dashes
    kind: Kind
    default: Value = None  # None if there is none, or it depends on the model
    choices: tuple[str, ...] = ()  # empty if any value will do
    aliases: tuple[str, ...] = ()
    config: str | None = None  # path to its value in config.json, such as "build_config.max_batch_size"

    @property
    def in_config(self) -> tuple[str, ...]:
        """Keys that lead to it in config.json; none if it is not there."""
        return tuple(self.config.split(".")) if self.config else ()


def versions() -> tuple[str, ...]:
    """List the releases whose trtllm-build is known, oldest first."""
    return tuple(data()["versions"])


def flags(version: str) -> Mapping[str, Flag]:
    """Map names to the flags of a version."""
    return _flags(version)


def tunable(version: str) -> tuple[str, ...]:
    """List the flags that a recipe may give itself (`runtime.build_flags`)."""
    return tuple(name for name in data()["tunable"]["names"] if name in flags(version))


def decided(version: str) -> Mapping[str, str]:
    """Map all other flags to the reason why a recipe may not give them."""
    reasons = {name: entry["because"] for entry in data()["decided"] for name in entry["names"]}
    return {name: reasons[name] for name in flags(version) if name in reasons}


def argv_of(entry: str) -> tuple[str, ...]:
    """Return the arguments for one entry of `runtime.build_flags`: `name=value`, or the name of a switch.

    >>> argv_of("reduce_fusion=enable"), argv_of("fast_build")
    (('--reduce_fusion', 'enable'), ('--fast_build',))
    """
    name, equals, value = entry.partition("=")
    return (f"--{name}", value) if equals else (f"--{name}",)


def entries_of(flag: Flag) -> tuple[str, ...]:
    """List the entries of `runtime.build_flags` that set a flag; for a whole number only one example.

    >>> entries_of(flags("1.2.1")["reduce_fusion"]), entries_of(flags("1.2.1")["fast_build"])
    (('reduce_fusion=enable', 'reduce_fusion=disable'), ('fast_build',))
    """
    if flag.kind == "switch":
        return (flag.name,)
    number = flag.default or data()["tunable"]["example"].get(flag.name)
    return tuple(f"{flag.name}={value}" for value in flag.choices or (number,))


def check(version: str, argv: Sequence[str]) -> list[str]:
    """List the faults of a command's arguments; empty if each is a flag of the version with a value of its type."""
    return [read.fault for read in _read(version, argv) if read.fault is not None]


def parse(version: str, argv: Sequence[str]) -> dict[str, Value]:
    """Read the values of a command without faults: all flags, with defaults for those that are not given.

    A toggle is "enable" or "disable", a switch True or False; of a flag that stands twice, the last counts.
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
    """Return the value that config.json has for a value of a flag; `alike` tells how releases differ in that.

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


def alike(value: Any, wanted: Any, dtype: str | None) -> bool:
    """Tell whether a value in config.json is the wanted one. `dtype` is the model's, for which "auto" stands.

    >>> alike("paged", "PAGED", None), alike("bfloat16", "auto", "bfloat16"), alike("float16", "auto", "bfloat16")
    (True, True, False)
    """
    if isinstance(value, str) and isinstance(wanted, str):
        return value.upper() == wanted.upper() or (wanted == "auto" and value == dtype)
    return type(value) is type(wanted) and bool(value == wanted)


@dataclass(frozen=True, slots=True)
class _ReadFlag:
    """One flag of a command, or what is wrong at its place."""

    flag: Flag | None
    value: Value = None
    fault: str | None = None


def _read(version: str, argv: Sequence[str]) -> tuple[_ReadFlag, ...]:
    """Read `--flag value` and `--flag=value`, each flag by its whole name; a value does not begin with two dashes."""
    return _read_once(version, tuple(argv))


@lru_cache(maxsize=256)  # each rule of a plan reads the commands of all engines anew
def _read_once(version: str, argv: tuple[str, ...]) -> tuple[_ReadFlag, ...]:
    return tuple(_each(version, argv))


def _each(version: str, argv: Sequence[str]) -> Iterator[_ReadFlag]:
    by_name = {name: flag for flag in flags(version).values() for name in (flag.name, *flag.aliases)}
    left = list(argv)
    while left:
        name, equals, attached = left.pop(0).partition("=")
        values = [attached] if equals else []
        while left and not equals and not left[0].startswith("--"):
            values.append(left.pop(0))
        flag = by_name.get(name.removeprefix("--")) if name.startswith("--") else None
        if flag is None:
            yield _ReadFlag(None, fault=f"{name}: no such flag in {version}")
        elif (fault := _fault(flag, values)) is not None:
            yield _ReadFlag(None, fault=f"--{flag.name}{fault}")
        else:
            yield _ReadFlag(flag, _value(flag, values))


def _fault(flag: Flag, values: Sequence[str]) -> str | None:
    if flag.kind == "switch":
        return f" {values[0]}: takes no value" if values else None
    if not values:
        return ": needs a value"
    if len(values) > 1 and flag.kind != "list":
        return f" {' '.join(values)}: takes one value"
    if flag.kind == "integer" and not values[0].removeprefix("-").isdecimal():
        return f" {values[0]}: must be a whole number"
    if flag.choices and values[0] not in flag.choices:
        return f" {values[0]}: must be one of {', '.join(flag.choices)}"
    return None


def _value(flag: Flag, values: Sequence[str]) -> Value:
    match flag.kind:
        case "switch":
            return True
        case "integer":
            return int(values[0])
        case "list":
            return tuple(values)
    return values[0]


@cache
def _flags(version: str) -> Mapping[str, Flag]:
    entries = entries_in(data()["flags"], version, versions())
    return {entry["name"]: _flag(entry) for entry in entries}


def _flag(entry: Mapping[str, Any]) -> Flag:
    return record(Flag, {"choices": TOGGLE if entry["kind"] == "toggle" else (), **entry})


def data() -> Mapping[str, Any]:
    """Return the whole of data/trtllm_build.yaml."""
    return read_facts("trtllm_build.yaml")
