"""Reads untrusted files within limits, and writes files atomically.

Reading accepts regular files only (a pipe or a device could block forever), has a size limit that also applies to the
decompressed data, and reports errors in one sentence that names the file. Writing creates a file with an unpredictable
name, so that an existing link is never followed, syncs it to disk and renames it.
"""

from __future__ import annotations

import json
import lzma
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

COMPRESSED = ".xz"
LARGEST_JSON = 128 * 2**20  # bytes of one JSON document, decompressed
LARGEST_LOG = 512 * 2**20  # bytes of a jsonl file, decompressed
UNPACKING = 256 * 2**20  # memory limit of the decompressor in bytes
PIECE = 2**20
TEMPORARY_FILE = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)(-[0-9a-f]{8})?\.tmp")


def expanded(path: str | Path, what: str) -> Path:
    """The path with `~` expanded; raises ValueError for an empty path or an unknown user."""
    if not str(path).strip():
        raise ValueError(f"{what} must not be an empty string; is a variable unset?")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError(f"{what} {str(path)!r} has an unknown home folder; write the full path") from None


def is_there(path: Path) -> bool:
    """True if the file exists, plain or compressed."""
    return path.is_file() or path.with_name(path.name + COMPRESSED).is_file()


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Opens a regular file for reading; raises for a pipe, a socket or a device instead of blocking."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(f"{path} must be a file, got a folder")
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} must be a regular file, got a pipe, a socket or a device")
    except BaseException:
        os.close(handle)
        raise
    with open(handle, "rb") as file:
        yield file


def read_bytes(path: Path, limit: int = LARGEST_JSON) -> bytes:
    """The content of a file, plain or compressed; raises if it has more than `limit` bytes."""
    packed = path.with_name(path.name + COMPRESSED)
    if path.is_file() or not packed.is_file():
        with open_regular(path) as file:
            return _at_most(file.read(limit + 1), limit, path)
    with open_regular(packed) as file:
        try:
            return _unpacked(file, limit, packed)
        except lzma.LZMAError as error:
            raise ValueError(f"{packed} cannot be decompressed ({error}); is it truncated?") from error


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
    """Parses JSON; errors are one sentence that names `where`."""
    try:
        return json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON (line {error.lineno}: {error.msg}); was it edited or truncated?"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not JSON (byte {error.start} is not UTF-8); was it damaged?") from error
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply; was it edited?") from None
    except ValueError as error:  # a number with more digits than Python converts
        raise ValueError(f"{where} cannot be parsed ({error})") from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a jsonl file; an incomplete last line is skipped, any other broken line raises."""
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
    """The type of a JSON value, for error messages."""
    words = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces `path` atomically, after it was synced to disk, if the block succeeds."""
    if path.exists() and not path.is_file():  # as root, os.replace would replace /dev/null
        raise ValueError(f"{path} must be a regular file or a new one, got a folder, a pipe or a device")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # "x": an existing file or link raises.
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def creating_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path`, after all of its files were synced to disk, if the block succeeds.

    Raises FileExistsError if `path` exists. If the block raises, nothing is left behind.
    """
    check_new_folder(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        check_new_folder(path)  # os.rename replaces an empty folder
        os.rename(temporary, path)
        sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: Path) -> None:
    """Raises FileExistsError if the path exists, also as an empty folder or a broken link."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} already exists and is not overwritten; choose a new folder, or remove it")


def sync_folder(folder: Path) -> None:
    """Syncs a folder and the files in it to disk, and gives the files the permissions of the process's umask."""
    for path in (*folder.iterdir(), folder):
        if path.is_file():
            path.chmod(0o666 & ~_umask())  # safetensors creates files that only their owner can read
        sync(path)


def sync(path: Path) -> None:
    """fsync of a file, or of the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    """The umask of the process, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def existing_parent(path: Path) -> Path:
    """The path, or its closest parent that exists: the folder whose disk it would be written to."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically: a reader sees the old file or the new one."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes strict JSON: numbers that JSON lacks become null."""
    write_text(path, json.dumps(plain_numbers(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def plain_numbers(value: Any) -> Any:
    """The value for strict JSON: NaN and infinities become None, tensors become lists, paths become text."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_numbers(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # a byte-level tokenizer can produce a lone surrogate, which is not valid UTF-8
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return plain_numbers(value.tolist())
    return value


def open_for_appending(path: Path) -> BinaryIO:
    """Opens a file for appending, unbuffered; raises for a link or a pipe."""
    # O_NONBLOCK: opening a pipe would block until it has a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} must be a regular file, got a link to {os.readlink(path)}") from error
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} must be a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} must be a regular file")
    return open(descriptor, "ab", buffering=0)


def _at_most(content: bytes, limit: int, path: Path) -> bytes:
    if len(content) > limit:
        raise ValueError(f"{path} must have at most {limit:,} bytes, got more")
    return content


def _unpacked(file: BinaryIO, limit: int, path: Path) -> bytes:
    """Decompresses in pieces, because a small file can expand to gigabytes."""
    parts, size = list[bytes](), 0
    decompressor = lzma.LZMADecompressor(memlimit=UNPACKING)
    while not decompressor.eof:
        packed = file.read(PIECE) if decompressor.needs_input else b""
        if decompressor.needs_input and not packed:
            raise lzma.LZMAError("the end is missing")
        part = decompressor.decompress(packed, max_length=PIECE)
        parts.append(part)
        size += len(part)
        if size > limit:
            raise ValueError(f"{path} must have at most {limit:,} bytes decompressed, got more")
    return b"".join(parts)
