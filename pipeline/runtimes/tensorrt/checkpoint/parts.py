"""Parts of a rank file: rectangles of source tensors, and scales that are taken together. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.plan.parallelism import Parallelism

FLOAT32 = "F32"


@dataclass(frozen=True, slots=True)
class Slice:
    """A rectangle of a source tensor; of a vector, its rows."""

    tensor: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None  # None: all
    alike: tuple[str, ...] = ()  # source tensors that hold the same


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a rank: slices below each other, and zeros up to its shape."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    dtype: str | None = None  # None: that of the checkpoint

    @property
    def sources(self) -> frozenset[str]:
        """Tensors that it is made of."""
        return frozenset(name for piece in self.slices for name in (piece.tensor, *piece.alike))


@dataclass(frozen=True, slots=True)
class Scale:
    """One tensor of scales: each number is the largest of a group of source scalars.

    Weights that are held with one scale must have been rounded with it: where `same`, a group whose numbers differ is a
    fault of the source. Smaller numbers than `least` become that.
    """

    name: str
    shape: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    same: bool = True
    least: float = 0.0
    dtype: str | None = FLOAT32

    @property
    def sources(self) -> frozenset[str]:
        """Tensors that it is made of."""
        return frozenset(tensor for group in self.groups for tensor in group)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the engine, numbered as upstream numbers them: tensor-parallel ranks are neighbours."""

    number: int
    sizes: Parallelism

    @property
    def tensor(self) -> int:
        """Place within the layers."""
        return self.number % self.sizes.tensor

    @property
    def stage(self) -> int:
        """Place among the groups of layers."""
        return self.number // self.sizes.tensor

    @property
    def expert(self) -> int:
        """Group of experts."""
        return self.tensor % self.sizes.expert

    @property
    def within_expert(self) -> int:
        """Part of each expert."""
        return self.tensor // self.sizes.expert
