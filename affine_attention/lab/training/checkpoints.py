"""Writes and finds the checkpoints of a run atomically: written under a temporary name, hashed, then renamed.

    checkpoints/
      .tmp-step-00000100-8242-1f0c2ab9/   being written, or left by a killed process; removed at the next start
      step-00000050/                      MANIFEST.json: the sha256 and size of each file, and the identity of the run
      step-00000100/

A checkpoint is renamed to its final name only after all of its bytes are on disk. It is valid only if all files match
the hashes in its manifest, and an older one is removed only after the new one has been read back. The hashes detect
damage, not tampering. Against a hostile folder: a checkpoint holds only JSON and safetensors, nothing in it is
executed, and every key, shape and dtype is checked before loading (contents.py). Other files are not touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ...files import existing_parent, open_regular, plain_numbers, read_json, sync
from ..machine import now
from .tensorfile import Written, write_bytes, write_tensors

MANIFEST = "MANIFEST.json"
SCHEMA = 1
PREFIX, TEMPORARY = "step-", ".tmp-"
OWN_TEMPORARY = re.compile(r"\.tmp-(old-)?(step-\d{8}|model)-\d+(-[0-9a-f]{8})?")  # written by this package
BLOCK = 2**20


class CheckpointError(OSError):
    """A checkpoint could not be written; earlier checkpoints are unchanged."""


class Draft:
    """A checkpoint that is being written: a temporary folder, and the expected hash and size of each file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, Written] = {}

    def write_json(self, name: str, value: Any) -> None:
        text = json.dumps(plain_numbers(value), indent=1, allow_nan=False) + "\n"
        self.files[name] = write_bytes(self.path / name, [text.encode()])

    def write_tensors(
        self, name: str, tensors: Iterable[tuple[str, Tensor]], fetch: Callable[[Tensor], Tensor]
    ) -> None:
        self.files[name] = write_tensors(self.path / name, tensors, fetch)

    def add_existing_files(self) -> None:
        """Adds files that other code has written into the folder."""
        for path in sorted(self.path.iterdir()):
            if path.name not in self.files:
                sync(path)
                self.files[path.name] = _hash_file(path)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: their folder; it need not exist.
        keep: number of checkpoints to keep.
        identity: JSON that identifies the run (settings, data, teacher); checkpoints of another run are not used.
        check: raises ValueError for a checkpoint folder whose content cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        identity: dict[str, Any],
        check: Callable[[Path, int], None] = lambda path, step: None,
    ) -> None:
        self.folder, self.keep, self.identity, self.check = folder, keep, identity, check

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def step_of(self, path: Path) -> int:
        return int(path.name.removeprefix(PREFIX))

    def steps(self) -> list[int]:
        """Steps of all checkpoint folders, valid or not, oldest first. Raises if the folder cannot be listed."""
        try:
            with os.scandir(self.folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        return sorted(int(name[len(PREFIX) :]) for name in names if re.fullmatch(f"{PREFIX}[0-9]{{8,}}", name))

    @contextmanager
    def writing(self, step: int) -> Iterator[Draft]:
        """Yields a draft, which becomes the checkpoint if the block succeeds; then old checkpoints are removed."""
        draft = Draft(self.folder / temporary_name(self.path(step).name))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.path.mkdir()
            yield draft
            self._complete(draft, step)
        except BaseException as error:
            shutil.rmtree(draft.path, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(error.errno, self._explain(step, error)) from error
            raise
        self._remove_old(step)

    def _complete(self, draft: Draft, step: int) -> None:
        manifest = {
            "schema": SCHEMA, "step": step, "made": now(), "for": self.identity,
            "files": {name: written._asdict() for name, written in sorted(draft.files.items())},
        }  # fmt: skip
        write_bytes(draft.path / MANIFEST, [(json.dumps(manifest, indent=1) + "\n").encode()])
        sync(draft.path)
        if fault := self._fault(draft.path, step, from_disk=True):
            raise OSError(None, f"the data read back differs from the data written: {fault}")
        final = self.path(step)
        if final.is_symlink() or final.exists():  # a damaged checkpoint, or this step was trained again
            self._remove(final)
        os.rename(draft.path, final)
        sync(self.folder)

    def newest(self) -> tuple[Path | None, list[str]]:
        """(newest valid checkpoint of this run or None, a line for each newer checkpoint that was skipped)."""
        skipped: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            fault = self._fault(path, step)
            if fault is None:
                return path, skipped
            skipped.append(f"{path.name}: {fault}")
        return None, skipped

    def clean(self) -> list[str]:
        """Removes temporary folders of killed processes; returns their names."""
        return remove_temporary_folders(self.folder)

    def _fault(self, path: Path, step: int, from_disk: bool = False) -> str | None:
        """Why this is not a valid checkpoint of the step, or None."""
        try:
            manifest = read_json(path / MANIFEST)
            files = manifest["files"]
            if manifest["schema"] != SCHEMA or manifest["step"] != step:
                return f"its manifest is for step {manifest['step']}, schema {manifest['schema']}"
            if manifest["for"] != plain_numbers(self.identity):
                changed = [key for key, value in self.identity.items() if manifest["for"].get(key) != value]
                return f"it belongs to another run ({', '.join(changed) or 'other settings'} differ)"
            found = {entry.name for entry in path.iterdir()} - {MANIFEST}
            if found != set(files):
                extra, missing = sorted(found - set(files)), sorted(set(files) - found)
                return f"missing {', '.join(missing)}" if missing else f"not in the manifest: {', '.join(extra)}"
            for name, expected in files.items():
                size = (path / name).stat().st_size
                if size != expected["bytes"]:
                    return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            for name, expected in files.items():
                if _hash_file(path / name, from_disk).sha256 != expected["sha256"]:
                    return f"{name} is damaged: its sha256 differs from the manifest"
        except FileNotFoundError as error:
            return f"missing {Path(error.filename or '').name}"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return f"{MANIFEST} is damaged"
        if from_disk:
            return None  # written just now
        try:
            self.check(path, step)
        except (ValueError, OSError) as error:
            return str(error).replace(f"{path}{os.sep}", "")
        return None

    def _remove_old(self, newest: int) -> None:
        older = [step for step in self.steps() if step <= newest]
        for step in older[: -self.keep]:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Renames before deleting, so that a killed process does not leave a partial checkpoint."""
        away = path.with_name(temporary_name(f"old-{path.name}"))
        os.rename(path, away)
        if away.is_dir() and not away.is_symlink():
            shutil.rmtree(away)
        else:  # a file or a link with a checkpoint's name; the target of a link is kept
            away.unlink()

    def _explain(self, step: int, error: OSError) -> str:
        reason = error.strerror or str(error)
        free = _free_bytes(self.folder)
        good, _ = self.newest()
        last = f"the last valid checkpoint is {good}" if good else "there is no earlier checkpoint"
        return f"the checkpoint of step {step} could not be written to {self.path(step)}: {reason} ({free}); {last}"


def temporary_name(name: str) -> str:
    """An unpredictable name, under which no link can exist: `.tmp-step-00000100-8242-1f0c2ab9`."""
    return f"{TEMPORARY}{name}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_temporary_folders(folder: Path) -> list[str]:
    """Removes temporary folders that killed processes of this package left in a folder; returns their names."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        left = sorted(e.name for e in entries if e.is_dir(follow_symlinks=False) and OWN_TEMPORARY.fullmatch(e.name))
    for name in left:
        shutil.rmtree(folder / name)
    return left


def check_disk_space(folder: Path, needed: int, what: str) -> None:
    """Raises OSError if the disk of the folder has less than `needed` bytes free."""
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise OSError(
            f"the disk of {folder} has {free:,} bytes free, but {what} need {needed:,}; free some space, choose "
            "another folder, or keep fewer checkpoints (keep_checkpoints=1)"
        )


def _free_bytes(folder: Path) -> str:
    return f"{shutil.disk_usage(existing_parent(folder)).free:,} bytes free on its disk"


def _hash_file(path: Path, from_disk: bool = False) -> Written:
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            # The file was synced: drop it from the page cache, so that the bytes are read from the disk.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Written(digest.hexdigest(), size)
