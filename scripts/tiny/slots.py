"""Slots: the values that a customer puts into a question and that the answer has to copy.

Two kinds. A closed list (names, cities) is the same in both splits. Values with numbers are split: those that
`is_reserved` are drawn for held-out dialogues only, so that a model cannot have learnt them by heart.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

RESERVED_SHARE = 8  # one value in eight is reserved for held-out dialogues


def is_reserved(value: str) -> bool:
    return zlib.crc32(value.encode()) % RESERVED_SHARE == 0


@dataclass(frozen=True)
class Slot:
    draw_any: Callable[[random.Random], str]
    is_closed: bool = False

    def draw(self, rng: random.Random, split: Split) -> str:
        value = self.draw_any(rng)
        while not self.is_closed and is_reserved(value) != (split == "heldout"):
            value = self.draw_any(rng)
        return value


def closed(*values: str) -> Slot:
    return Slot(lambda rng: rng.choice(values), is_closed=True)


def _order(rng: random.Random) -> str:
    # Three different pairs of digits: the tokenizer makes one token of each pair.
    return "TP-" + "".join(str(pair) for pair in rng.sample(range(10, 100), 3))


def _amount(rng: random.Random) -> str:
    return f"${rng.randint(10, 99)}.{rng.choice((20, 25, 50, 75, 90, 95))}"


def _date(rng: random.Random) -> str:
    months = "January February March April May June July August September October November December".split()
    return f"{rng.randint(1, 28)} {rng.choice(months)}"


SLOTS: dict[str, Slot] = {
    "order": Slot(_order),  # TP-471129
    "amount": Slot(_amount),  # $42.50
    "date": Slot(_date),  # 14 March
    "data": Slot(lambda rng: f"{rng.randint(2, 60)} GB"),
    "code": Slot(lambda rng: f"E{rng.randint(10, 99)}"),
    "name": closed(
        *"Mina Jonas Aisha Lucas Sofia Noah Emma Yuki Priya Omar Clara Felix Hana Diego Lena Tom Ines Max".split(),
        *"Zoë José Jürgen Søren 민준 서연 지우".split(),
    ),
    "city": closed(
        *"Berlin Hamburg Madrid Sevilla Paris London Vienna Boston Chicago Oslo Dublin Lisbon".split(),
        *"Zürich München Málaga Seoul Busan".split(),
    ),
    "country": closed(*"Spain Germany Korea France Italy Norway Portugal Canada Mexico Japan Greece Ireland".split()),
    "product": closed(
        *"router headset phone tablet charger keyboard speaker camera smartwatch printer laptop microphone".split(),
        "power bank",
        "desk lamp",
    ),
    "plan": closed(*"Coral Lagoon Reef Harbor Tidal Ocean".split()),
}
