"""Reads the documents of one file: text, json lines or parquet, plain or compressed.

Every error names the file and the line, byte or column of the problem.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, get_args

from ...files import open_regular
from ...messages import did_you_mean

DocumentRule = Literal["blank_line", "line", "file"]  # what ends a document in a text file
COMPRESSED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
TEXT = (".txt", ".text")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
READABLE = TEXT + JSON_LINES + PARQUET
LONGEST_DOCUMENT = 256 * 2**20  # bytes; a longer line or document is probably not text, and would not fit into memory
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def kind_of(path: Path) -> str | None:
    """The extension that determines how a file is read, without that of the compression; None if it is not readable."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
        if suffixes and suffixes[-1] in PARQUET:
            return None  # parquet is compressed inside
    return suffixes[-1] if suffixes and suffixes[-1] in READABLE else None


def read_file(path: Path, text_column: str = "text", documents: DocumentRule = "blank_line") -> Iterator[str]:
    """The documents of one file in order, without surrounding white space; empty documents are skipped."""
    if documents not in get_args(DocumentRule):
        raise ValueError(f"documents must be one of {', '.join(get_args(DocumentRule))}, got {documents!r}")
    kind = kind_of(path)
    if kind is None:
        raise ValueError(
            f"{path} has an unsupported extension; use .txt, .jsonl, .json or .parquet files (text and json also as "
            f"{', '.join(COMPRESSED)}), got {''.join(path.suffixes) or 'none'}"
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
                f"{path}:{number}: not a readable JSON object (nested too deeply, or a number with too many digits)"
            ) from error
        if isinstance(record, list):
            raise ValueError(f"{path}:{number}: an array; write one JSON object per line")
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
        raise ValueError(f"{path}: not a complete parquet file, or damaged ({str(error).splitlines()[0]})") from error
    except OSError as error:
        raise OSError(f"{path}: cannot be read to the end ({error}); it may be truncated") from error


def text_of(record: dict[str, Any], column: str, where: str) -> str:
    """The text of one record; null counts as empty."""
    check_column(column, record, where)
    text = record[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: column {column!r} must hold text, got {type(text).__name__}")
    if text and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can encode lone surrogates, UTF-8 cannot
            raise ValueError(f"{where}: column {column!r} has a lone surrogate at index {error.start}") from error
    return text or ""


def check_column(column: str, columns: Iterable[str], where: str) -> None:
    columns = list(columns)
    if column not in columns:
        hint = did_you_mean(column, columns, " (did you mean {!r}?)")
        raise ValueError(f"{where}: no column {column!r}, it has {', '.join(columns) or 'none'}; set text_column{hint}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without line ends. Reads bytes, so that errors can report the byte offset."""
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
                position = offset + error.start
                inside = " of its decompressed text" if path.suffix.lower() in COMPRESSED else ""
                raise ValueError(
                    f"{path}: not UTF-8 at byte {position}{inside} (line {number}, 0x{raw[error.start]:02x}); convert "
                    "it, for example with iconv -t UTF-8"
                ) from error
            offset += len(raw)
            yield number, line.rstrip("\r\n")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; decompression errors name the file."""
    opener = COMPRESSED.get(path.suffix.lower())
    try:
        with open_regular(path) as plain:
            if opener is None:
                yield plain
            else:
                with opener(plain, "rb") as file:
                    yield file
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise OSError(f"{path}: cannot be decompressed to the end ({error}); it is damaged or truncated") from error
