"""Turns one file into documents: text, json lines or parquet, plain or compressed.

Every error names the file, and the line, byte or column where the file is wrong.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any, Literal, get_args

from ...files import open_regular

DocumentRule = Literal["blank_line", "line", "file"]  # what ends a document in a text file
COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TEXT = (".txt", ".text")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
READABLE = TEXT + JSON_LINES + PARQUET
LONGEST_DOCUMENT = 256 * 2**20  # bytes: a longer line or document is no text, and would not fit into memory
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def kind_of(path: Path) -> str | None:
    """The extension that says how to read a file, without that of the compression; None for any other."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        if suffixes and suffixes[-1] in PARQUET:
            return None  # parquet is compressed inside
    return suffixes[-1] if suffixes and suffixes[-1] in READABLE else None


def read_file(path: Path, text_column: str = "text", documents: DocumentRule = "blank_line") -> Iterator[str]:
    """The documents of one file, in its order, stripped of surrounding white space; empty ones are left out."""
    if documents not in get_args(DocumentRule):
        raise ValueError(f"documents must be one of {', '.join(get_args(DocumentRule))}, got {documents!r}")
    kind = kind_of(path)
    if kind is None:
        raise ValueError(
            f"{path} has no extension that is read as text; give .txt, .jsonl, .json or .parquet files (text and json "
            f"also as {', '.join(COMPRESSED)}), got {''.join(path.suffixes) or 'none'}"
        )
    if kind in PARQUET:
        texts: Iterator[str] = _read_parquet(path, text_column)
    elif kind in JSON_LINES:
        texts = _read_json_lines(path, text_column)
    else:
        texts = _read_text(path, documents)
    for text in texts:
        stripped = text.strip()
        if stripped:
            yield stripped


def _read_text(path: Path, documents: DocumentRule) -> Iterator[str]:
    lines = (line for _, line in _lines(path))
    if documents == "line":
        yield from lines
        return
    paragraphs: list[str] = []
    size = 0
    for line in lines:
        if line.strip() or documents == "file":
            paragraphs.append(line)
            size += len(line) + 1
            if size > LONGEST_DOCUMENT:
                raise ValueError(
                    f"{path}: a document must have at most {LONGEST_DOCUMENT:,} characters; put empty lines between "
                    'documents, or read it with documents="line"'
                )
        elif paragraphs:
            yield "\n".join(paragraphs)
            paragraphs, size = [], 0
    yield "\n".join(paragraphs)


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON object ({error.msg} at column {error.colno})") from error
        except (RecursionError, ValueError) as error:
            raise ValueError(
                f"{path}:{number}: not a JSON object that can be read (nested or numbers too long)"
            ) from error
        if isinstance(record, list):
            raise ValueError(f"{path}:{number}: an array; write one JSON object a line")
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: must be a JSON object, got {type(record).__name__}")
        yield text_of(record, column, f"{path}:{number}")


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            check_column(column, schema.names, str(path))
            kind = schema.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {column!r} must hold text, got {kind}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                for value in batch.column(0):
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        raise ValueError(f"{path}: row {row} of column {column!r} is not UTF-8 ({error})") from error
                    row += 1
                    yield text or ""
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a whole parquet file, or damaged ({str(error).splitlines()[0]})") from error
    except OSError as error:
        raise OSError(f"{path}: cannot be read to its end ({error}); it may be cut short") from error


def text_of(record: dict[str, Any], column: str, where: str) -> str:
    """The text of one record; a record whose text is null counts as empty."""
    check_column(column, record, where)
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: column {column!r} must hold text, got {type(text).__name__}")
    if text and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can write what no UTF-8 text holds
            raise ValueError(f"{where}: column {column!r} holds half a surrogate pair at {error.start}") from error
    return text or ""


def check_column(column: str, columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    if column not in columns:
        near = get_close_matches(column, columns, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{where}: no column {column!r}, it has {', '.join(columns) or 'none'}; set text_column{hint}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends. Reads bytes, so that a wrong one can be named by its place."""
    offset = 0
    with _opened(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(LONGEST_DOCUMENT + 1), b""), 1):
            if len(raw) > LONGEST_DOCUMENT:
                raise ValueError(f"{path}:{number}: a line must have at most {LONGEST_DOCUMENT:,} bytes, got more")
            if number == 1 and raw.startswith(BYTE_ORDER_MARK):
                offset, raw = len(BYTE_ORDER_MARK), raw[len(BYTE_ORDER_MARK) :]
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                place = offset + error.start
                inside = " of its decompressed text" if path.suffix.lower() in COMPRESSED else ""
                raise ValueError(
                    f"{path}: not UTF-8 at byte {place}{inside} (line {number}, 0x{raw[error.start]:02x}); convert it, "
                    "for example with iconv -t UTF-8"
                ) from error
            offset += len(raw)
            yield number, line.rstrip("\r\n")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, decompressed. What the compression finds wrong is told with the file's name."""
    opener = COMPRESSED.get(path.suffix.lower())
    try:
        with open_regular(path) as plain:
            if opener is None:
                yield plain
            else:
                with opener(plain, "rb") as file:
                    yield file
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path}: cannot be decompressed to its end ({error}); it is damaged or cut short") from error
