"""Locks a run folder for one process and prepares it for a new or a resumed run.

Only temporary files of this package are deleted (their names hold a process id), and only in a folder that already
holds a run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...files import TEMPORARY_FILE, open_for_appending, write_json
from ..recipe import Recipe
from ..run import RunFolder
from .checkpoints import Checkpoints, remove_temporary_folders
from .progress import Progress
from .steplog import keep_whole_lines

LOCK = ".lock"
# These files are written under a temporary name and then renamed.
FILES = (
    "recipe.json",
    "manifest.json",
    "log.jsonl",
    "evaluation.json",
    "inspection.json",
)


def check_folder(run: RunFolder, recipe: Recipe, resume: bool) -> None:
    """Raises ValueError for a folder that holds other files, or a run with other settings."""
    if run.path.exists() and not run.path.is_dir():
        raise ValueError(f"{run.path} is a file; a run needs a folder")
    if not run.exists:
        # A process that was killed early leaves only the lock and temporary files.
        names = [path.name for path in run.path.iterdir()] if run.path.is_dir() else []
        other = [name for name in names if name != LOCK and not _is_temporary(name)]
        if other:
            raise ValueError(
                f"{run.path} holds {', '.join(sorted(other)[:3])} but no run (no recipe.json); give a new folder, or "
                "an empty one"
            )
        return
    if not resume:
        raise ValueError(f"{run.path} already holds a run; leave out resume=False to resume it, or choose a new folder")
    difference = run.recipe().difference(recipe)
    if difference:
        lines = "\n  ".join(difference)
        raise ValueError(
            f"{run.path} holds a run with other settings (stored -> requested):\n  {lines}\n"
            "resume it with its own settings, or choose a new folder"
        )


@contextmanager
def lock_run(run: RunFolder, first: bool) -> Iterator[None]:
    """Locks the folder for this process. The operating system releases the lock when the process ends or is killed."""
    if not first:
        yield
        return
    made = not run.path.exists()
    run.path.mkdir(parents=True, exist_ok=True)
    with open_for_appending(run.path / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{run.path} is being trained by another process; wait for it, or choose a new folder"
            ) from None
        except OSError:
            pass  # this file system has no locks
        try:
            yield
        finally:
            if not run.exists:  # the run failed before it wrote anything
                (run.path / LOCK).unlink(missing_ok=True)
                if made:
                    with suppress(OSError):
                        run.path.rmdir()


def prepare_run(run: RunFolder, recipe: Recipe, checkpoints: Checkpoints, progress: Progress) -> Path | None:
    """Prepares the folder; returns the checkpoint to resume from, or None for a new run. Reports skipped checkpoints.

    If there are checkpoints and none of them can be used, this raises and changes nothing: starting at step 0 would
    overwrite the log and checkpoints that may become readable again.
    """
    before = run.exists
    newest, skipped = checkpoints.newest()
    if newest is None and skipped:
        lines = "\n  ".join(skipped)
        raise ValueError(
            f"{run.path} has checkpoints, but none of them can be used:\n  {lines}\n"
            "make them readable again, or choose a new folder; to start this run at step 0, move its checkpoints away"
        )
    if before:
        keep_whole_lines(run.events_file)
        for name in [*checkpoints.clean(), *_clean(run.path)]:
            run.add_event("skip", reason=f"{name} was incomplete and was removed")
    else:
        write_json(run.recipe_file, recipe.to_dict())
    for line in skipped:
        run.add_event("skip", reason=line)
        progress.say(f"skipped checkpoint {line}")
    if newest is not None:
        progress.say(f"resuming {run.path} from {newest.name}")
    elif before:
        progress.say(f"{run.path} has no complete checkpoint; starting at step 0")
    return newest


def _clean(path: Path) -> list[str]:
    """Removes what a killed process left next to the checkpoints (a model or a temporary file); returns the names."""
    with os.scandir(path) as entries:
        files = sorted(entry.name for entry in entries if not entry.is_dir() and _is_temporary(entry.name))
    for name in files:
        os.unlink(path / name)
    return [*remove_temporary_folders(path), *files]


def _is_temporary(name: str) -> bool:
    """True for `.log.jsonl.8242-1f0c2ab9.tmp`: a file that process 8242 was writing and had not renamed yet."""
    found = TEMPORARY_FILE.fullmatch(name)
    return found is not None and found["name"] in FILES
