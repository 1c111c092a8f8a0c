"""Slots: the values that a customer puts into a question and that the answer has to copy.

Two kinds. A closed list (names, cities) is the same in both splits. Values with numbers are split: those that
`is_reserved` are drawn for held-out dialogues only, so that a model cannot have learnt them by heart.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
RESERVED_SHARE = 8  # one value in eight is reserved for held-out dialogues


def is_reserved(value: str) -> bool:
    return zlib.crc32(value.encode()) % RESERVED_SHARE == 0


def pick(rng: random.Random, options: Sequence[str]) -> str:
    """One of the options, earlier ones more often (the nth with weight 1/n, as words in a language).

    So a model of these dialogues has a favourite at every choice, not a tie that rounding its weights would turn over.
    """
    return rng.choices(options, [1 / rank for rank in range(1, len(options) + 1)])[0]


@dataclass(frozen=True)
class Slot:
    draw_any: Callable[[random.Random], str]
    is_closed: bool = False

    def draw(self, rng: random.Random, split: Split) -> str:
        value = self.draw_any(rng)
        while not self.is_closed and is_reserved(value) != (split == "heldout"):
            value = self.draw_any(rng)
        return value


def closed(names: str) -> Slot:
    values = names.split(", ")
    return Slot(lambda rng: pick(rng, values), is_closed=True)


def _order(rng: random.Random) -> str:
    # Three pairs of digits, each a token, each from a range of its own: a pair shows where in the number it stands,
    # which is what lets a model learn to copy within minutes.
    return f"TP-{rng.randint(10, 39)}{rng.randint(40, 69)}{rng.randint(70, 99)}"


def _amount(rng: random.Random) -> str:
    return f"${rng.randint(10, 89)}.{rng.choice((90, 95, 99))}"


def _date(rng: random.Random) -> str:
    return f"{rng.randint(10, 28)} {rng.choice(_MONTHS)}"


SLOTS: dict[str, Slot] = {
    "order": Slot(_order),  # TP-174685
    "amount": Slot(_amount),  # $42.90
    "date": Slot(_date),  # 14 March
    "data": Slot(lambda rng: f"{rng.randint(10, 60)} GB"),
    "code": Slot(lambda rng: f"E{rng.randint(10, 99)}"),
    "name": closed(
        "Mina, Jonas, Aisha, Lucas, Sofia, Noah, Emma, Yuki, Priya, Omar, Clara, Felix, Hana, Diego, Lena, Tom, Ines, "
        "Max, Zoë, José, Jürgen, Søren, 민준, 서연, 지우"
    ),
    "city": closed(
        "Berlin, Hamburg, Madrid, Sevilla, Paris, London, Vienna, Boston, Chicago, Oslo, Dublin, Lisbon, Zürich, "
        "München, Málaga, Seoul, Busan"
    ),
    "country": closed(
        "Spain, Germany, Korea, France, Italy, Norway, Portugal, Canada, Mexico, Japan, Greece, Ireland"
    ),
    "product": closed(
        "router, headset, phone, tablet, charger, keyboard, speaker, camera, smartwatch, printer, laptop, microphone, "
        "power bank, desk lamp"
    ),
    "plan": closed("Coral, Lagoon, Reef, Harbor, Tidal, Ocean"),
}
