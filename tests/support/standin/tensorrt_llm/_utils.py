"""What MPI would say."""

import os


def global_mpi_rank() -> int:
    return 0


def global_mpi_size() -> int:
    return int(os.environ.get("STANDIN_RANKS", "1"))
