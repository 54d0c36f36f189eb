"""Reads documents from sources: files, folders, glob patterns and Hugging Face datasets.

| source | documents |
|---|---|
| `corpus/a.txt`, `b.jsonl.gz`, `c.parquet` | one file (readers.py) |
| `corpus/` | every readable file below it, sorted by name |
| `corpus/*.train.txt.xz` | the matching files, sorted by name |
| a folder that `Dataset.save_to_disk` wrote | its rows |
| `hf:NAME[:CONFIG][@SPLIT]` | a dataset on the hub or in a folder; the default split is "train" |
| `embedded:gutenberg` | children's prose in the public domain, included in this package |
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...files import expanded, read_table
from ...messages import did_you_mean
from ..fingerprint import hash_file_once
from ..recipe import MOST_FILES
from .readers import PARQUET, DocumentRule, check_column, kind_of, read_file, text_of

HUB = "hf:"
EMBEDDED = {"embedded:gutenberg": Path(__file__).parent.parent / "embedded" / "gutenberg_pd_mini.txt"}


class Layout(NamedTuple):
    """How to find the text in a source."""

    text_column: str = "text"
    documents: DocumentRule = "blank_line"


class Source(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str: ...

    def identity(self) -> dict[str, Any]:
        """JSON that changes if and only if the content changes."""
        ...

    def read(self, layout: Layout) -> Iterator[str]:
        """Every document, in a fixed order."""
        ...

    def stream(self, layout: Layout, seed: int, rank: int, ranks: int) -> DocumentStream:
        """The documents of one rank as a resumable stream."""
        ...


class DocumentStream(Protocol):
    """A resumable stream of documents."""

    def start(self, epoch: int, position: Any = None) -> Iterator[str]: ...

    def position(self) -> Any:
        """The position of the next document; JSON."""
        ...

    def check_position(self, position: Any) -> None:
        """Raises ValueError for a position that this stream cannot have."""
        ...


def find_sources(names: str | Path | Iterable[str | Path]) -> list[Source]:
    """The sources with these names; raises if a source does not exist or is named twice."""
    listed = [names] if isinstance(names, str | Path) else list(names)
    if not listed:
        raise ValueError("no data: give at least one file, folder, pattern or hf:NAME")
    found: list[Source] = []
    for name in listed:
        found += _find(name)
    seen: set[str] = set()
    for source in found:
        key = str(source.path.resolve()) if isinstance(source, _LocalSource) else source.name
        if key in seen:
            raise ValueError(f"{source.name} is given twice, so its text would count twice")
        seen.add(key)
    return found


def read_documents(
    source: str | Path | Iterable[str | Path], *, text_column: str = "text", documents: DocumentRule = "blank_line"
) -> Iterator[str]:
    """The documents of one or several sources, read lazily.

    Args:
        source: files, folders, patterns, `hf:NAME[:CONFIG][@SPLIT]`; see the table at the top of this file.
        text_column: the text column of json lines, parquet and datasets.
        documents: what ends a document in a text file: "blank_line", "line" or "file".
    """
    for found in find_sources(source):
        yield from found.read(Layout(text_column, documents))


@dataclass(frozen=True)
class _LocalSource:
    """A file or folder on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path)

    def identity(self) -> dict[str, Any]:
        raise NotImplementedError

    def read(self, layout: Layout) -> Iterator[str]:
        raise NotImplementedError

    def stream(self, layout: Layout, seed: int, rank: int, ranks: int) -> DocumentStream:
        return CountedStream(self, layout, rank, ranks)


class TextFile(_LocalSource):
    """A text, jsonl or parquet file."""

    def identity(self) -> dict[str, Any]:
        return _file_identity(self.path)

    def read(self, layout: Layout) -> Iterator[str]:
        yield from read_file(self.path, *layout)


class SavedDataset(_LocalSource):
    """A folder that `Dataset.save_to_disk` wrote."""

    def identity(self) -> dict[str, Any]:
        listed = read_table(self.path / "state.json").get("_data_files")
        if not isinstance(listed, list) or not all(isinstance(entry, dict) and "filename" in entry for entry in listed):
            raise ValueError(f"{self.path / 'state.json'} must list _data_files, each with a filename; was it edited?")
        files = [_file_identity(self.path / Path(str(entry["filename"])).name) for entry in listed]
        return {"name": self.path.name, "files": files}

    def read(self, layout: Layout) -> Iterator[str]:
        from datasets import load_from_disk

        try:
            dataset = load_from_disk(str(self.path))
        except Exception as error:  # the library raises pyarrow's, json's and its own
            raise ValueError(f"{self.path}: cannot be opened as a saved dataset ({error})") from error
        yield from _rows(dataset, layout.text_column, self.name)


@dataclass(frozen=True)
class HubDataset:
    """A dataset that the `datasets` library loads by name or folder."""

    path: str
    config: str | None
    split: str

    @property
    def name(self) -> str:
        return HUB + self.path + (f":{self.config}" if self.config else "") + f"@{self.split}"

    def identity(self) -> dict[str, Any]:
        """The hashes of its files if they are on this machine, else their URLs, which include a revision."""
        builder = self._builder()
        files = [str(file) for file in (builder.config.data_files or {}).get(self.split.partition("[")[0], [])]
        if files and all(Path(file).is_file() for file in files):
            return {"name": self.name, "files": [_file_identity(Path(file)) for file in files]}
        addresses = hashlib.sha256(json.dumps([builder.hash, files]).encode()).hexdigest()
        return {"name": self.name, "number_of_files": len(files), "addresses": addresses}

    def read(self, layout: Layout) -> Iterator[str]:
        builder = self._builder()
        with _named_errors(self.name):
            builder.download_and_prepare()
            dataset = builder.as_dataset(split=self.split)
        yield from _rows(dataset, layout.text_column, self.name)

    def stream(self, layout: Layout, seed: int, rank: int, ranks: int) -> DocumentStream:
        from datasets.distributed import split_dataset_by_node

        builder = self._builder()

        def open_dataset() -> Any:
            with _named_errors(self.name):
                dataset = builder.as_streaming_dataset(split=self.split)
            # Shuffles the shards only: a larger buffer of examples would be lost on resume. StreamedDataset shuffles
            # the packed sequences.
            dataset = dataset.shuffle(seed=seed, buffer_size=1)
            return split_dataset_by_node(dataset, rank=rank, world_size=ranks) if ranks > 1 else dataset

        return HubStream(open_dataset, layout.text_column, self.name)

    def _builder(self) -> Any:
        from datasets import load_dataset_builder

        with _named_errors(self.name):
            return load_dataset_builder(self.path, self.config)


class CountedStream:
    """Documents of a local source; the position is the number of documents read."""

    def __init__(self, source: Source, layout: Layout, rank: int, ranks: int) -> None:
        self.source, self.layout, self.rank, self.ranks = source, layout, rank, ranks
        self.count = 0

    def start(self, epoch: int, position: Any = None) -> Iterator[str]:
        self.count = position or 0
        for text in islice(self.source.read(self.layout), self.count, None):
            mine = self.count % self.ranks == self.rank
            self.count += 1
            if mine:
                yield text

    def position(self) -> int:
        return self.count

    def check_position(self, position: Any) -> None:
        if type(position) is not int or not 0 <= position < 2**53:
            raise ValueError(f"the position in {self.source.name} must be a number of documents, got {position!r}")


class HubStream:
    """Documents of a streamed dataset; the position is the state dict of the `datasets` library."""

    def __init__(self, open_dataset: Callable[[], Any], column: str, name: str) -> None:
        self.open_dataset, self.column, self.name = open_dataset, column, name
        self.dataset: Any = None

    def start(self, epoch: int, position: Any = None) -> Iterator[str]:
        self.dataset = self.open_dataset()  # a new one: a used dataset starts at its last loaded state
        self.dataset.set_epoch(epoch)
        if position is not None:
            self.dataset.load_state_dict(position)
        for row in _without_buffer_warning(self.dataset):
            text = text_of(row, self.column, self.name).strip()
            if text:
                yield text

    def position(self) -> Any:
        return json.loads(json.dumps(self.dataset.state_dict()))

    def check_position(self, position: Any) -> None:
        if not isinstance(position, dict):
            raise ValueError(f"the position in {self.name} must be an object, got {type(position).__name__}")


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Adds the name of the source to errors of the `datasets` library."""
    try:
        yield
    except Exception as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"{name}: {error}; the format is hf:NAME[:CONFIG][@SPLIT]") from error


def _without_buffer_warning(dataset: Any) -> Iterator[dict[str, Any]]:
    """Rows of a dataset, without the warning about a lost shuffle buffer on resume: ours has a single, used example."""
    logger = logging.getLogger("datasets.iterable_dataset")
    level = logger.level
    rows = iter(dataset)
    logger.setLevel(logging.ERROR)
    try:
        first = next(rows, None)
    finally:
        logger.setLevel(level)
    if first is not None:
        yield first
        yield from rows


def _rows(dataset: Any, column: str, name: str) -> Iterator[str]:
    from pyarrow import ArrowException

    check_column(column, dataset.column_names, name)
    batches = dataset.select_columns([column]).iter(batch_size=256)
    while True:
        try:
            batch = next(batches, None)
        except (ArrowException, OSError) as error:
            raise ValueError(f"{name}: damaged ({error})") from error
        if batch is None:
            return
        for value in batch[column]:
            text = text_of({column: value}, column, name).strip()
            if text:
                yield text


def _find(name: str | Path) -> list[Source]:
    text = str(name)
    if text.startswith(HUB):
        return [_parse_hub(text)]
    if text.startswith("embedded:") and text not in EMBEDDED:
        raise ValueError(f"the embedded texts are {', '.join(EMBEDDED)}, got {text!r}")
    path = EMBEDDED.get(text) or expanded(text, "data")
    if path.is_file():
        return [_file(path)]
    if (path / "dataset_dict.json").is_file():
        splits = read_table(path / "dataset_dict.json").get("splits", [])
        named = ", ".join(map(str, splits[:20])) if isinstance(splits, list) else "none named"
        raise ValueError(f"{path} holds several splits ({named}); choose one of them, such as {path}/train")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return [SavedDataset(path)]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and kind_of(file) and not _hidden(file, path))
        if not files:
            raise ValueError(f"{path} holds no .txt, .jsonl, .json or .parquet file")
        return [_file(file) for file in files]
    if glob.has_magic(text):
        matches = _matches(path)
        if not matches:
            raise FileNotFoundError(f"no file matches {text}")
        return [_file(match) for match in matches]
    if path.exists():
        raise ValueError(f"{text} must be a file or a folder, got a device, a pipe or a socket")
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, siblings, "{}")
    raise FileNotFoundError(f"{text} does not exist" + (f"; did you mean {path.parent / near}?" if near else ""))


def _matches(pattern: Path) -> list[Path]:
    """The files that match a pattern, sorted; `**` does not follow links, which could form a cycle."""
    parts = (*pattern.parts, "*") if pattern.name == "**" else pattern.parts  # a trailing `**` matches folders only
    fixed = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:fixed]) if fixed else Path()
    found = []
    for match in base.glob(str(Path(*parts[fixed:]))):
        hidden = any(p.startswith(".") for p in match.relative_to(base).parts)
        if match.is_file() and (not hidden or any(p.startswith(".") for p in parts[fixed:])):
            found.append(match)
        if len(found) > MOST_FILES:
            raise ValueError(f"{pattern} must match at most {MOST_FILES:,} files, got more; give folders instead")
    return sorted(found)


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _file(path: Path) -> TextFile:
    if kind_of(path) is None:
        raise ValueError(
            f"{path} has an unsupported extension; use .txt, .jsonl, .json or {PARQUET[0]} files (text and json also "
            "as .gz, .xz, .bz2). Pickles are never opened"
        )
    return TextFile(path)


def _parse_hub(text: str) -> HubDataset:
    rest, _, split = text.removeprefix(HUB).partition("@")
    path, _, config = rest.partition(":")
    if not path:
        raise ValueError(f"the format of a dataset is hf:NAME[:CONFIG][@SPLIT], got {text!r}")
    return HubDataset(path, config or None, split or "train")


def _file_identity(path: Path) -> dict[str, Any]:
    """Includes the hash of the whole file, also for streams, so that every change is detected."""
    return {"name": path.name, "kind": kind_of(path), "bytes": path.stat().st_size, "sha256": hash_file_once(path)}
