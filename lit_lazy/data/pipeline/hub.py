"""Documents of the Hugging Face Hub's datasets, and what works without a network."""

import logging
import os
import re
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import huggingface_hub

from lit_lazy.data.pipeline.documents import ROWS_AT_ONCE, Document, Files, Source, extract_documents
from lit_lazy.data.pipeline.files import read_file_states
from lit_lazy.support.background import call_with_timeout
from lit_lazy.support.error_messages import one_line

HUB_SECONDS = 10.0
PATIENCE = 60.0
"""Seconds for the answer of a Hub that was reachable: the library's 10 were once too few on a busy machine."""
HUB_URL = "hf://datasets/"


@dataclass(frozen=True)
class Hub(Source):
    """One split of a dataset of the Hugging Face Hub, or of a folder with the same layout."""

    config: str | None
    revision: str | None
    split: str
    stream: bool

    def split_parts(self) -> Sequence[Source]:
        """One part per parquet file; a streamed dataset, or another format, is one part that `datasets` reads."""
        if self.stream:
            return [self]
        paths = self._list_files()
        if not all(path.endswith(".parquet") for path in paths):
            return [self]
        # A URL such as hf://datasets/NAME@COMMIT/PATH.
        addresses = [re.sub(f"^{HUB_URL}[^@]*@", "", path).partition("/") for path in paths if path.startswith(HUB_URL)]
        remote = [HubFile(self.field, self.given, self.column, commit, path) for commit, _, path in addresses]
        if remote:
            return remote if len(remote) == len(paths) else [self]
        return [Files(self.field, self.given, self.column, (Path(path),)) for path in paths] or [self]

    def _list_files(self) -> list[str]:
        """Paths or URLs of the split's files as the dataset lists them; empty if it cannot be read (reading it then
        raises the error)."""
        datasets = self._import_datasets()
        try:
            builder = datasets.load_dataset_builder(self.given, self.config, revision=self.revision)
        except (OSError, ValueError, NotImplementedError, RuntimeError, datasets.exceptions.DatasetsError):
            return []
        return [str(path) for path in (builder.config.data_files or {}).get(self.split, [])]

    def _import_datasets(self) -> Any:
        if not os.path.isdir(self.given):
            go_offline_unless_hub_answers()
        return import_datasets_quietly()

    def read_state(self) -> list[Any]:
        """Identity of the content: the name, which needs no network; for a folder its files too."""
        paths = sorted(path for path in Path(self.given).rglob("*") if path.is_file())
        return [self.given, self.config, self.revision, self.split, read_file_states(tuple(paths))]

    def documents(self) -> Iterator[Document]:
        return extract_documents(self._tables(), self.column, f"data.hub={self.given!r}")

    def _tables(self) -> Iterator[Any]:
        datasets = self._import_datasets()
        try:
            found = datasets.load_dataset(
                self.given, self.config, split=self.split, revision=self.revision, streaming=self.stream
            )
            rows = found.to_iterable_dataset() if isinstance(found, datasets.Dataset) else found
            yield from rows.with_format("arrow").iter(ROWS_AT_ONCE)
        except (OSError, ValueError, NotImplementedError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            wraps = isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__
            raise make_unreadable_error(self.given, wraps or error) from None


@dataclass(frozen=True)
class HubFile(Source):
    """Parquet file of a Hugging Face Hub dataset; the download stays in the cache of the Hub client."""

    commit: str
    path: str

    def read_state(self) -> list[Any]:
        return [self.given, self.commit, self.path]

    def documents(self) -> Iterator[Document]:
        """Documents, without empty ones; downloads the file first."""
        huggingface_hub.utils.disable_progress_bars()
        try:
            path = huggingface_hub.hf_hub_download(
                self.given, self.path, repo_type="dataset", revision=self.commit, etag_timeout=PATIENCE
            )
        except (OSError, ValueError, RuntimeError) as error:
            # Where the Hub did not answer, the library's message names no cause.
            raise make_unreadable_error(self.given, error.__cause__ or error) from None
        return Files(self.field, self.given, self.column, (Path(path),)).documents()


def make_unreadable_error(name: str, error: BaseException) -> ValueError:
    return ValueError(
        f"data.hub={name!r}: cannot be read ({one_line(error)}); check the name, data.hub_config, "
        "data.split, data.revision and the network, or use data.path"
    )


def go_offline_unless_hub_answers() -> None:
    """Avoids half a minute of retries without a network; cached data are still read."""
    config = import_datasets_quietly().config
    if not (huggingface_hub.constants.HF_HUB_OFFLINE or config.HF_HUB_OFFLINE or is_hub_reachable()):
        huggingface_hub.constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True


def is_hub_reachable() -> bool:
    """Whether the Hub answers within HUB_SECONDS, even with an HTTP error."""
    try:
        call_with_timeout(
            HUB_SECONDS, lambda: urllib.request.urlopen(huggingface_hub.constants.ENDPOINT, timeout=HUB_SECONDS)
        )
    except HTTPError:
        return True
    except OSError:
        return False
    return True


def import_datasets_quietly() -> Any:
    """Import the datasets library, late because that takes a second."""
    import datasets

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    # Its readers log errors in several lines before they raise them.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    return datasets
