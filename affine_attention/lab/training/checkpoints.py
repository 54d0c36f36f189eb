"""Keeps checkpoints of a run so that none is ever half there: written beside, hashed, renamed when whole.

    checkpoints/
      .tmp-step-00000100-8242/   being written, or left by a process that was killed; removed at the next start
      step-00000050/             MANIFEST.json: the sha256 and size of each file, and whose checkpoint it is
      step-00000100/

A checkpoint has its name only after every byte of it is on the disk. It counts only if all its files have the hashes of
its manifest, and an older one is removed only after the new one has been read back. The hashes tell damage, not intent:
the guard against a hostile folder is that a checkpoint holds JSON and safetensors and nothing in it is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ..run import now, plain_numbers, read_json
from .tensorfile import Written, write_bytes, write_tensors

MANIFEST = "MANIFEST.json"
SCHEMA = 1
PREFIX, TEMPORARY = "step-", ".tmp-"
BLOCK = 2**20


class CheckpointError(OSError):
    """A checkpoint that could not be written; those before it are untouched."""


class Draft:
    """A checkpoint that is being written: a temporary folder, and what each of its files should be."""

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

    def adopt(self) -> None:
        """Takes in files that others have written into the folder."""
        for path in sorted(self.path.iterdir()):
            if path.name not in self.files:
                sync(path)
                self.files[path.name] = _hash_file(path)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; it need not exist.
        keep: how many of the newest stay.
        identity: what a checkpoint must have been written for (settings, data) to be taken: JSON.
    """

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        self.folder, self.keep, self.identity = folder, keep, identity

    def path(self, step: int) -> Path:
        return self.folder / f"{PREFIX}{step:08d}"

    def step_of(self, path: Path) -> int:
        return int(path.name.removeprefix(PREFIX))

    def steps(self) -> list[int]:
        """Of what is there, whole or not, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (path.name.removeprefix(PREFIX) for path in self.folder.glob(f"{PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    @contextmanager
    def writing(self, step: int) -> Iterator[Draft]:
        """Yields a draft; when the block ends well it becomes the checkpoint of the step, and old ones go."""
        draft = Draft(self.folder / f"{TEMPORARY}{self.path(step).name}-{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(draft.path, ignore_errors=True)
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
            raise OSError(None, f"what was read back is not what was written: {fault}")
        final = self.path(step)
        if final.exists():  # a damaged one, or training went over this step again
            self._remove(final)
        os.rename(draft.path, final)
        sync(self.folder)

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is whole and ours, and a line for each newer one that is not."""
        skipped: list[str] = []
        for step in reversed(self.steps()):
            path = self.path(step)
            fault = self._fault(path, step)
            if fault is None:
                return path, skipped
            skipped.append(f"{path.name}: {fault}")
        return None, skipped

    def clean(self) -> list[str]:
        """Removes what processes that were killed have left behind; their names."""
        left = sorted(self.folder.glob(f"{TEMPORARY}*")) if self.folder.is_dir() else []
        for path in left:
            shutil.rmtree(path)
        return [path.name for path in left]

    def _fault(self, path: Path, step: int, from_disk: bool = False) -> str | None:
        """Why this is not a checkpoint of the step, or None."""
        try:
            manifest = read_json(path / MANIFEST)
            files = manifest["files"]
            if manifest["schema"] != SCHEMA or manifest["step"] != step:
                return f"its manifest is for step {manifest['step']}, schema {manifest['schema']}"
            if manifest["for"] != plain_numbers(self.identity):
                changed = [key for key, value in self.identity.items() if manifest["for"].get(key) != value]
                return f"it was written for another run ({', '.join(changed) or 'other settings'} differ)"
            found = {entry.name for entry in path.iterdir()} - {MANIFEST}
            if found != set(files):
                extra, missing = sorted(found - set(files)), sorted(set(files) - found)
                return f"missing {', '.join(missing)}" if missing else f"not in its manifest: {', '.join(extra)}"
            for name, expected in files.items():
                size = (path / name).stat().st_size
                if size != expected["bytes"]:
                    return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            for name, expected in files.items():
                if _hash_file(path / name, from_disk).sha256 != expected["sha256"]:
                    return f"{name} is damaged: its sha256 is not that of the manifest"
        except FileNotFoundError as error:
            return f"missing {Path(error.filename or '').name}"
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is damaged"
        return None

    def _remove_old(self, newest: int) -> None:
        older = [step for step in self.steps() if step <= newest]
        for step in older[: -self.keep]:
            self._remove(self.path(step))

    def _remove(self, path: Path) -> None:
        """Renames first: a process that is killed on the way leaves nothing that looks like a checkpoint."""
        away = path.with_name(f"{TEMPORARY}old-{path.name}-{os.getpid()}")
        os.rename(path, away)
        shutil.rmtree(away)

    def _explain(self, step: int, error: OSError) -> str:
        reason = error.strerror or str(error)
        free = _free_bytes(self.folder)
        good, _ = self.newest()
        last = f"the last good one is {good}" if good else "there is none before it"
        return f"the checkpoint of step {step} could not be written to {self.path(step)}: {reason} ({free}); {last}"


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raises before anything is written where a disk has less free than `needed` bytes."""
    place = _existing(folder)
    free = shutil.disk_usage(place).free
    if free < needed:
        raise OSError(
            f"{folder} is on a disk with {free:,} bytes free, but {what} need {needed:,}; free some, choose another "
            "folder, or keep fewer checkpoints (keep_checkpoints=1)"
        )


def _free_bytes(folder: Path) -> str:
    return f"{shutil.disk_usage(_existing(folder)).free:,} bytes free on its disk"


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _hash_file(path: Path, from_disk: bool = False) -> Written:
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        if from_disk and hasattr(os, "posix_fadvise"):
            # The bytes were synced: let go of the copy in memory, so that the disk is what is read.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Written(digest.hexdigest(), size)


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
