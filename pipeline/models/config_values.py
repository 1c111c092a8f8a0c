"""Values of a config.json by key, wherever they stand in it, and every fault of those that were asked for.

A composed model (text and images) describes its decoder in `text_config`; keys are looked for there first. What both
leave out is as the library would have it: defaults of transformers' configuration classes, by `model_type`, are data
(`data/config_defaults.yaml`). `hidden_size` and `num_hidden_layers` have none: a config without them describes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from pipeline.errors import Fault
from pipeline.resources import parse_yaml

# Above every published model: lists as long as a model is deep are made from its config.json.
MAX_LAYERS, MAX_SIZE = 10_000, 2**31 - 1
_TEXT = ("text_config", "llm_config")
# Keys by which a config says how its decoder is built; of each set a family has to look at one that is there.
_STRUCTURE = (
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), ("kv_lora_rank",),
    ("index_head_dim", "sparse_attention_config"), ("hybrid_override_pattern", "layers_block_type"),
    ("block_configs",), ("linear_attn_config",), ("linear_num_key_heads",), ("mamba_num_heads", "mamba_n_heads"),
    ("compress_ratios",), ("hidden_size_per_layer_input",), ("num_kv_shared_layers",), ("attention_chunk_size",),
    ("cross_attention_layers",),
)  # fmt: skip
_NEVER_DEFAULT = ("hidden_size", "num_hidden_layers")


class ConfigValues:
    """A config.json, or an object in a config.json.

    A value that is missing or of the wrong kind is replaced by the smallest that is allowed, and noted in `faults`; so
    that all of them are found at once. Whoever reads looks at `faults` before using anything.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        library: str = "",
        *,
        place: str = "",
        faults: dict[str, Fault] | None = None,
    ) -> None:
        """Read the values of a model's text part.

        Args:
            library: `model_type` whose defaults hold where the config names none that is among the data.
            place: Key of the object within the config.json, with a dot behind it.
        """
        text = next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), None)
        self._config = config
        self._maps = (config,) if text is None else (text, config)
        self._place = place
        self.faults: dict[str, Fault] = {} if faults is None else faults
        self._read_keys: set[str] = set()
        types = [level.get("model_type") for level in self._maps]
        known = _defaults()
        named = next((name for name in types if isinstance(name, str) and name in known), library)
        self._defaults: Mapping[str, Any] = known.get(named, {})

    def get(self, key: str) -> Any:
        """Return what the config says, or None; defaults are not looked at."""
        self._read_keys.add(key)
        return next((level[key] for level in self._maps if level.get(key) is not None), None)

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number by the first of `keys` that is there."""
        for key in keys:
            if (value := self.get(key)) is not None:
                return self._number(key, value, least, most)
        return self._number(keys[0], self._default(keys, default), least, most)

    def says(self, key: str) -> bool:
        """Whether the config gives a value, and not null."""
        return self.get(key) is not None

    def number(self, key: str) -> float:
        """Return a positive number."""
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
            self._fault(key, value, "must be a positive number")
            return 1.0
        return float(value)

    def choice(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """Return one of some words."""
        value = self.word(key, default)
        if value not in allowed:
            self._fault(key, value, "is not known", f"one of {', '.join(allowed)}")
            return default
        return value

    def flag(self, key: str, default: bool = False, *, outer: bool = False) -> bool:
        """Return a truth value; with `outer` that of the whole model, before its decoder's."""
        value = self._config.get(key) if outer else None
        value = self.get(key) if value is None else value
        value = self._default((key,), default) if value is None else value
        if not isinstance(value, bool):
            self._fault(key, value, "must be true or false")
            return default
        return value

    def word(self, key: str, default: str = "") -> str:
        """Return a text."""
        value = self.get(key)
        value = self._default((key,), default) if value is None else value
        if not isinstance(value, str):
            self._fault(key, value, "must be a text")
            return default
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; empty where there is none."""
        return self._list(key, str)

    def sizes(self, key: str) -> list[int]:
        """Return a list of whole numbers, none negative; empty where there is none."""
        numbers = self._list(key, int)
        if any(not 0 <= size <= MAX_SIZE for size in numbers):
            self._fault(key, numbers[:8], f"must be numbers from 0 to {MAX_SIZE}")
            return []
        return numbers

    def inner(self, key: str, library: str = "") -> ConfigValues:
        """Return an object within; an empty one where there is none."""
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            self._fault(key, value, "must be an object")
            value = None
        return ConfigValues(value or {}, library, place=f"{self._place}{key}.", faults=self.faults)

    def inners(self, key: str) -> list[ConfigValues]:
        """Return a list of objects; empty where there is none."""
        objects = self._list(key, Mapping)
        return [
            ConfigValues(item, place=f"{self._place}{key}[{index}].", faults=self.faults)
            for index, item in enumerate(objects)
        ]

    def refuse_unread(self, name: str) -> None:
        """Note a fault if the config sets keys of decoder parts that nothing has read: `name` is built otherwise."""
        for keys in _STRUCTURE:
            present = [key for key in keys if any(level.get(key) for level in self._maps)]
            if present and self._read_keys.isdisjoint(present):
                problem = f"is not known of a {name}: the model would be taken for another one"
                self._fault(
                    present[0],
                    next(level[present[0]] for level in self._maps if level.get(present[0])),
                    problem,
                )

    def refuse(self, key: str, problem: str, fix: str = "") -> None:
        """Note that the value of a key is not understood."""
        self._fault(key, self.get(key), problem, fix)

    def _default(self, keys: tuple[str, ...], value: Any) -> Any:
        if any(keys[0] in level for level in self._maps):
            # Null, which is not the same as leaving a key out.
            return value
        defaults = (self._defaults.get(key) for key in keys if self._place or key not in _NEVER_DEFAULT)
        return next((value for value in defaults if value is not None), value)

    def _number(self, key: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            kind = f"a number from 0 to {most}" if not least else f"a positive number of at most {most}"
            self._fault(key, value, f"must be {kind}")
            return least
        return value

    def _list(self, key: str, kind: type) -> list[Any]:
        value = self.get(key)
        value = [] if value is None else value
        if (
            not isinstance(value, list)
            or len(value) > MAX_LAYERS
            or not all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
        ):
            self._fault(key, value, "is not a list of the kind that it should be")
            return []
        return value

    def _fault(self, key: str, value: Any, problem: str, fix: str = "") -> None:
        name = self._place + key
        self.faults.setdefault(name, Fault(problem, key=name, value=value, fix=fix))


def class_of(config: object) -> str:
    """Return the first class that a config.json names ("LlamaForCausalLM"), or "" if it names none."""
    names = config.get("architectures") if isinstance(config, Mapping) else None
    return str(names[0]) if isinstance(names, list) and names else ""


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json as that of its decoder alone: of a composed model, with what the library has by default."""
    text = next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), None)
    if text is None:
        return config
    outer = {
        key: value for key, value in config.items() if key not in (*_TEXT, "vision_config", "model_type")
    }
    return {
        **_defaults().get(str(text.get("model_type")), {}),
        **outer,
        **text,
        "architectures": config["architectures"],
    }


def declared_dtype(config: Mapping[str, Any]) -> str:
    """Return the type that a config.json declares for the weights ("bfloat16"), or "" if it declares none."""
    text: Mapping[str, Any] = next((config[key] for key in _TEXT if isinstance(config.get(key), Mapping)), {})
    dtypes = (level.get(key) for level in (config, text) for key in ("dtype", "torch_dtype"))
    return str(next((value for value in dtypes if value), ""))


@cache
def _defaults() -> Mapping[str, Mapping[str, Any]]:
    file = resources.files("pipeline.models") / "data" / "config_defaults.yaml"
    defaults: Mapping[str, Mapping[str, Any]] = parse_yaml(file.read_text("utf-8"))["defaults"]
    return defaults
