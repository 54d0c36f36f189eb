"""Reads files that may be hostile and writes files that others can rely on: bounded, regular files, whole or absent.

Reading takes regular files only (a pipe or a device in a file's place would block or never end), stops at a limit, also
while it decompresses, and reports what is wrong in one sentence that names the file. Writing creates a file with an
unpredictable name, so that an existing link is never written through, and renames it when it is on the disk.
"""

from __future__ import annotations

import json
import lzma
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSED = ".xz"
LARGEST_JSON = 128 * 2**20  # bytes of one JSON document, decompressed
LARGEST_LOG = 512 * 2**20  # bytes of a jsonl file, decompressed
UNPACKING = 256 * 2**20  # bytes that the decompression itself may take
PIECE = 2**20
TEMPORARY_FILE = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)(-[0-9a-f]{8})?\.tmp")


def expanded(path: str | Path, what: str) -> Path:
    """The path with `~` replaced by a home folder; an empty one or a home that is nobody's is refused."""
    if not str(path).strip():
        raise ValueError(f"{what} must be named, got an empty name; is a variable unset?")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{what} {str(path)!r} names a home folder that does not exist; write the path out") from None


def is_there(path: Path) -> bool:
    """True for a file of a run, plain or compressed."""
    return path.is_file() or path.with_name(path.name + COMPRESSED).is_file()


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file, opened for reading; a pipe, a socket or a device is refused instead of waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} must be a file, got a folder")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} must be a regular file, got a pipe, a socket or a device; put a file there")
    except BaseException:
        os.close(handle)
        raise
    with open(handle, "rb") as file:
        yield file


def read_bytes(path: Path, limit: int = LARGEST_JSON) -> bytes:
    """What is in a file of a run, plain or compressed; more than `limit` bytes are refused."""
    packed = path.with_name(path.name + COMPRESSED)
    if path.is_file() or not packed.is_file():
        with open_regular(path) as file:
            return _at_most(file.read(limit + 1), limit, path)
    with open_regular(packed) as file:
        try:
            return _unpacked(file, limit, packed)
        except lzma.LZMAError as error:
            raise ValueError(f"{packed} cannot be unpacked ({error}); was it cut off?") from error


def read_json(path: Path, limit: int = LARGEST_JSON) -> Any:
    """The JSON of a file."""
    return parse_json(read_bytes(path, limit), str(path))


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object of a file."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {kind(found)}; was it edited?")
    return found


def parse_json(content: bytes | str, where: str) -> Any:
    """JSON -> value, or one sentence that names `where`."""
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON (line {error.lineno}: {error.msg}); was it edited or cut off?"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not JSON (byte {error.start} is not UTF-8); was it damaged?") from error
    except RecursionError:
        raise ValueError(f"{where} is JSON that is nested too deeply to be read; was it edited?") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise ValueError(f"{where} is not JSON that can be read ({error})") from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file; a last line that is cut off is left out, a broken one before it is an error."""
    if not is_there(path):
        return
    lines = read_bytes(path, LARGEST_LOG).split(b"\n")
    whole, tail = lines[:-1], lines[-1]
    for number, line in enumerate(whole, start=1):
        try:
            entry = parse_json(line, f"{path}, line {number}")
        except ValueError as error:
            if number == len(whole) and not tail:
                return
            raise ValueError(f"{path}, line {number} is not JSON: {line[:80]!r}") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, line {number} must be a JSON object, got {kind(entry)}")
        yield entry


def kind(value: Any) -> str:
    """A JSON value's type in words, for messages."""
    words = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside `path`; when the block ends well it is on the disk and takes the place of `path`."""
    if path.exists() and not path.is_file():  # as root, a rename would take the place of /dev/null
        raise ValueError(f"{path} must be a regular file or a new one, got a folder, a pipe or a device")
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # "x": a file or link that is there already is an error, not a place to write to.
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes beside and renames: a reader sees the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def open_for_appending(path: Path) -> BinaryIO:
    """A file to add lines to, unbuffered; a link or a pipe in its place is refused."""
    # O_NONBLOCK: to open a pipe would wait for somebody who reads it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} must be a file of the run, got a link to {os.readlink(path)}") from error
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} must be a regular file")
    return open(descriptor, "ab", buffering=0)


def _at_most(content: bytes, limit: int, path: Path) -> bytes:
    if len(content) > limit:
        raise ValueError(f"{path} must hold at most {limit:,} bytes, got more; is it a file of a run?")
    return content


def _unpacked(file: BinaryIO, limit: int, path: Path) -> bytes:
    """Piece by piece: a few kilobytes can claim to be gigabytes."""
    parts, size = list[bytes](), 0
    machine = lzma.LZMADecompressor(memlimit=UNPACKING)
    while not machine.eof:
        packed = file.read(PIECE) if machine.needs_input else b""
        if machine.needs_input and not packed:
            raise lzma.LZMAError("the end is missing")
        part = machine.decompress(packed, max_length=PIECE)
        parts.append(part)
        size += len(part)
        if size > limit:
            raise ValueError(f"{path} must hold at most {limit:,} bytes when it is unpacked, got more")
    return b"".join(parts)
