"""Where torch computes: on a GPU if there is one; and with how many threads.

One thread for small models: they gain nothing from more, and on a busy machine threads that wait for each other cost
minutes (12 samples of W4A8 on two of two busy cores: 42 s with two threads, 1 s with one). One thread also gives the
same bytes on every number of cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_SMALL_PARAMETERS = 50_000_000


def torch_device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def torch_threads_for(parameters: int) -> Iterator[None]:
    """Set how many threads torch uses for a model of so many parameters; as before afterwards."""
    import torch

    before = torch.get_num_threads()
    if parameters <= _SMALL_PARAMETERS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
