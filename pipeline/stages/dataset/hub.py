"""Files of a data set on the Hugging Face Hub: JSON lines, or Parquet where pyarrow is installed.

Through huggingface_hub (its cache, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE), without the `datasets`
library: no code of a repository is ever run.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import SourceError, UserError
from pipeline.extras import missing
from pipeline.stages.dataset.definition import Hub


def download(hub: Hub, file: str) -> Path:
    """The file in the hub's local cache, downloaded if need be."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise missing(_where(hub, file), error, "hub") from error
    try:
        path: str = hf_hub_download(hub.repo, file, repo_type="dataset", revision=hub.revision)
    except GatedRepoError as error:
        raise SourceError(
            f"{_where(hub, file)} is gated: accept its terms there, and set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise SourceError(f"{_where(hub, file)}: no such repository or revision") from error
    except LocalEntryNotFoundError as error:
        raise SourceError(
            f"{_where(hub, file)} is not in the local cache and the hub cannot be reached; "
            'give a file instead: dataset: "local:my-set.jsonl", one {"text": …} or {"messages": […]} a line'
        ) from error
    except EntryNotFoundError as error:
        raise SourceError(f"{_where(hub, file)}: the repository has no such file") from error
    except (HfHubHTTPError, OSError) as error:
        raise SourceError(f"{_where(hub, file)} cannot be downloaded: {error}") from error
    return Path(path)


def parquet_column(path: Path, column: str) -> list[str]:
    """One column of text of a Parquet file."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{path.name} is a Parquet file, and reading it needs pyarrow: pip install pyarrow; or give a file "
            'of JSON lines: dataset: "local:my-set.jsonl", one {"text": …} a line'
        ) from error
    from pyarrow.lib import ArrowException

    try:
        values: list[str] = parquet.read_table(path, columns=[column]).column(column).to_pylist()
    except (ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path}: is no Parquet file with a column {column!r}: {error}") from error
    if not all(isinstance(value, str) for value in values):
        raise UserError(f"{path}: column {column!r} holds other values than texts")
    return values


def _where(hub: Hub, file: str) -> str:
    return f"data set hf:{hub.repo}@{hub.revision[:8]} ({file})"
