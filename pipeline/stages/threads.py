"""One thread for small models: they gain nothing from more, and on a busy machine threads that wait for each
other cost minutes (12 samples of W4A8 on two of two busy cores: 42 s with two threads, 1 s with one). One
thread also gives the same bytes on every number of cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

SMALL = 50_000_000  # parameters


@contextlib.contextmanager
def suited_to(parameters: int) -> Iterator[None]:
    """Torch's threads as the size of the model wants them; as before afterwards."""
    import torch

    before = torch.get_num_threads()
    if parameters <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
