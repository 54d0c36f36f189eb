"""Turns a folder into a run that this process may write: new, or the same run as before, and nobody else's.

Nothing is deleted but what has one of our names, with the id of the process that left it, in a folder that held a run.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...files import TEMPORARY_FILE, open_for_appending
from ..recipe import Recipe
from ..run import RunFolder, write_json
from .checkpoints import Checkpoints, remove_temporary_folders
from .progress import Progress
from .steplog import keep_whole_lines

LOCK = ".lock"
FILES = ("recipe.json", "manifest.json", "log.jsonl", "evaluation.json", "inspection.json")  # written beside, renamed


def check_folder(run: RunFolder, recipe: Recipe, resume: bool) -> None:
    """Refuses a folder that holds something else."""
    if run.path.exists() and not run.path.is_dir():
        raise ValueError(f"{run.path} is a file; a run needs a folder")
    if not run.exists:
        # A process can be killed before the first file has its name.
        names = [path.name for path in run.path.iterdir()] if run.path.is_dir() else []
        strange = [name for name in names if name != LOCK and not _is_temporary(name)]
        if strange:
            raise ValueError(
                f"{run.path} holds {', '.join(sorted(strange)[:3])} but no run (no recipe.json); give a new folder, or "
                "an empty one"
            )
        return
    if not resume:
        raise ValueError(
            f"{run.path} holds a run already; leave out resume=False to go on with it, or choose a new folder"
        )
    difference = run.recipe().difference(recipe)
    if difference:
        lines = "\n  ".join(difference)
        raise ValueError(
            f"{run.path} holds a run of other settings (there -> asked for):\n  {lines}\n"
            "go on with its own settings, or choose a new folder"
        )


@contextmanager
def claim(run: RunFolder, first: bool) -> Iterator[None]:
    """Keeps the folder for this process; the system lets go of it when the process ends, however it ends."""
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
            pass  # a file system without locks
        try:
            yield
        finally:
            if not run.exists:  # nothing came of it
                (run.path / LOCK).unlink(missing_ok=True)
                if made:
                    with suppress(OSError):
                        run.path.rmdir()


def open_run(run: RunFolder, recipe: Recipe, checkpoints: Checkpoints, progress: Progress) -> Path | None:
    """Prepares the folder and returns the checkpoint to go on from, None for a start; says what it passes over.

    Where there are checkpoints and none of them can be used, nothing is changed and the reasons are raised: a start at
    step 0 would rewind the log and train over what may be readable again tomorrow.
    """
    before = run.exists
    newest, skipped = checkpoints.newest()
    if newest is None and skipped:
        lines = "\n  ".join(skipped)
        raise ValueError(
            f"{run.path} has checkpoints, and none of them can be used:\n  {lines}\n"
            "make them readable again, or choose a new folder; to start this run at step 0, move its checkpoints away"
        )
    if before:
        keep_whole_lines(run.events_file)
        for name in [*checkpoints.clean(), *_clean(run.path)]:
            run.add_event("skip", reason=f"{name} was never finished; removed")
    else:
        write_json(run.recipe_file, recipe.to_dict())
    for line in skipped:
        run.add_event("skip", reason=line)
        progress.say(f"skipped checkpoint {line}")
    if newest is not None:
        progress.say(f"resuming {run.path} from {newest.name}")
    elif before:
        progress.say(f"{run.path} has no whole checkpoint; starting at step 0")
    return newest


def _clean(path: Path) -> list[str]:
    """What a killed process has left beside the checkpoints: a model, or a file that was not renamed yet."""
    with os.scandir(path) as entries:
        files = sorted(entry.name for entry in entries if not entry.is_dir() and _is_temporary(entry.name))
    for name in files:
        os.unlink(path / name)
    return [*remove_temporary_folders(path), *files]


def _is_temporary(name: str) -> bool:
    """True for `.log.jsonl.8242-1f0c2ab9.tmp`: a file of a run that was not renamed yet, by the process 8242."""
    found = TEMPORARY_FILE.fullmatch(name)
    return found is not None and found["name"] in FILES
