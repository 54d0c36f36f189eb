"""Work for worker processes that is quick to import, because each process imports this file."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


class Note:
    """Work that writes a file; picklable, as work must be."""

    def __init__(self, folder: Path, fails: str = "", dies: str = "", seconds: float = 0.0) -> None:
        self.folder, self.fails, self.dies, self.seconds = folder, fails, dies, seconds

    def __call__(self, job, table):
        table.start(job.name, "works")
        if job.name == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if job.name == self.fails:
            raise ValueError("the sky is falling")
        time.sleep(self.seconds)
        (self.folder / job.name).write_text(str(os.getpid()))
        table.finish(job.name, perplexity=float(job.recipe.seed))
