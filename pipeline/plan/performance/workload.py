"""Traffic and what it may cost: lengths, GPUs, prices and the acceptance of a draft, as the command line gives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.contracts.gpus import gpu, gpus
from pipeline.errors import Fault, InvalidInput, UserError
from pipeline.recipe import Limits

_LONGEST = 10_000_000  # tokens, as a recipe's limits allow


@dataclass(frozen=True)
class Workload:
    """Requests that are all alike."""

    prompt_tokens: int
    output_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens that a sequence has behind it, on average over its answer."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Which deployments are compared, under which traffic, at which prices."""

    work: Workload
    devices: tuple[str, ...]
    prices: Mapping[str, float] = field(default_factory=dict)  # GPU -> of an hour of one
    acceptance: float | None = None  # of the draft; None: without drafts

    @property
    def priced(self) -> bool:
        """Whether every GPU has a price, so that all can be ranked by money."""
        return bool(self.devices) and all(device in self.prices for device in self.devices)


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """What a user asks about speed and cost; None and () stand for the recipe's own."""

    devices: tuple[str, ...] = ()
    prices: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    acceptance: float | None = None

    def question(self, limits: Limits) -> ComparisonSettings:
        """Complete the options by a recipe's limits.

        Without devices, all GPUs are taken that have a price, or all that are known.

        Args:
            limits: of the recipe; its longest prompt and answer stand in for lengths that are not given.

        Returns:
            The settings of a comparison, with nothing left open but prices and the acceptance of a draft.
        """
        return ComparisonSettings(
            work=Workload(
                self.prompt_tokens or limits.max_input_tokens, self.output_tokens or limits.max_output_tokens
            ),
            devices=self.devices or tuple(self.prices) or tuple(one.name for one in gpus()),
            prices=self.prices,
            acceptance=self.acceptance,
        )


def read_workload_options(
    *,
    devices: str | None = None,
    prices: Sequence[str] = (),
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    acceptance: float | None = None,
) -> WorkloadOptions:
    """Read the options of a command line.

    Args:
        devices: names of GPUs, or beginnings of names, separated by commas.
        prices: each "GPU=PRICE_PER_HOUR".
        prompt_tokens: of each request.
        output_tokens: of each request.
        acceptance: share of the draft's tokens that the target accepts, 0 to 1.

    Raises:
        InvalidInput: with everything that is wrong with them.
    """
    faults: list[Fault] = []
    names = _devices((devices or "").split(",") if devices is not None else (), faults)
    by_gpu = _prices(prices, faults)
    for option, tokens in (("--prompt-tokens", prompt_tokens), ("--output-tokens", output_tokens)):
        if tokens is not None and not 1 <= tokens <= _LONGEST:
            faults.append(Fault(f"must be 1 to {_LONGEST} tokens", key=option, value=tokens))
    if acceptance is not None and not 0 <= acceptance <= 1:
        faults.append(
            Fault("must be 0 to 1", key="--acceptance", value=acceptance, fix="0.8 is four of five tokens")
        )
    if faults:
        raise InvalidInput("command line", faults)
    return WorkloadOptions(names, by_gpu, prompt_tokens, output_tokens, acceptance)


def _devices(words: Iterable[str], faults: list[Fault]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for word in words:
        try:
            found |= dict.fromkeys(_named(word.strip()))
        except UserError as error:
            faults.append(Fault(str(error), key="--gpus", value=word))
    return tuple(found)


def _prices(words: Iterable[str], faults: list[Fault]) -> dict[str, float]:
    found: dict[str, float] = {}
    for word in words:
        name, _, price = word.partition("=")
        try:
            value = float(price)
            if not 0 < value < float("inf"):
                raise ValueError
            found |= dict.fromkeys(_named(name.strip()), value)
        except ValueError:
            fix = "write GPU=PRICE_PER_HOUR, like h100-sxm-80g=2.5"
            faults.append(Fault("is not a price above 0", key="--price", value=word, fix=fix))
        except UserError as error:
            faults.append(Fault(str(error), key="--price", value=word))
    return found


def _named(word: str) -> tuple[str, ...]:
    """A GPU by its name, or all whose names begin so: `h100` is each of three."""
    begun = tuple(one.name for one in gpus() if one.name.startswith(f"{word}-"))
    return begun or (gpu(word).name,)
