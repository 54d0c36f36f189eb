"""A folder of the cache is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from affine_attention.lab.data.store import SEAL, PartWriter, TokenPart, cached, is_whole

DOCUMENTS = [np.arange(n, dtype="<u4") + 70000 for n in (3, 1, 5)]


def write(folder):
    with PartWriter(folder, "train", np.dtype("<u4")) as part, PartWriter(folder, "none", np.dtype("<u2")):
        part.add(DOCUMENTS[:2], 7)
        part.add([], 0)
        part.add(DOCUMENTS[2:], 9)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_parts_come_back_as_written(tmp_path):
    folder = cached(tmp_path, "key", write)
    part = TokenPart(folder, "train")
    assert part.ids.tolist() == np.concatenate(DOCUMENTS).tolist()
    assert part.ids.dtype == np.uint32
    assert part.starts.tolist() == [0, 3, 4]
    assert vars(part.stats) == {"documents": 3, "tokens": 9, "characters": 16, "largest_id": 70004}
    assert not part.ids.flags.writeable
    empty = TokenPart(folder, "none")
    assert len(empty.ids) == len(empty.starts) == empty.stats.documents == 0


def test_a_whole_folder_is_not_written_again(tmp_path):
    folder = cached(tmp_path, "key", write)
    assert cached(tmp_path, "key", pytest.fail) == folder
    assert names(tmp_path) == ["key"]


@pytest.mark.parametrize("damage", ["missing", "short", "unsealed", "torn seal", "flipped bit"])
def test_a_damaged_folder_is_written_again(tmp_path, damage):
    folder = cached(tmp_path, "key", write)
    if damage == "missing":
        (folder / "train.starts").unlink()
    elif damage == "short":
        os.truncate(folder / "train.ids", 5)
    elif damage == "unsealed":
        (folder / SEAL).unlink()
    elif damage == "flipped bit":
        content = bytearray((folder / "train.ids").read_bytes())
        content[5] ^= 1
        (folder / "train.ids").write_bytes(content)
    else:
        os.truncate(folder / SEAL, 10)
    assert not is_whole(folder)
    assert is_whole(cached(tmp_path, "key", write))
    assert TokenPart(folder, "train").ids.tolist() == np.concatenate(DOCUMENTS).tolist()
    assert names(tmp_path) == ["key"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.touch, lambda path: path.symlink_to("/nowhere")])
def test_what_is_no_folder_is_replaced(tmp_path, make):
    make(tmp_path / "key")
    assert (cached(tmp_path, "key", lambda part: (part / "ids").write_bytes(b"1")) / "ids").read_bytes() == b"1"


def test_an_error_leaves_nothing(tmp_path):
    def fail(folder):
        write(folder)
        raise ValueError("bad document")

    with pytest.raises(ValueError, match="bad document"):
        cached(tmp_path, "key", fail)
    assert names(tmp_path) == []


def write_with_little_room(cache, answers):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))  # what a full disk or a quota does
    try:
        cached(cache, "key", write)
    except OSError as error:
        answers.put(str(error))


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as error:
        cached(tmp_path / "file", "key", write)
    assert f"the cache {tmp_path / 'file'} cannot be written" in str(error.value)

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=write_with_little_room, args=(tmp_path / "cache", answers))
    process.start()
    message = answers.get(timeout=20)
    process.join()
    assert f"the cache {tmp_path / 'cache'} cannot be written (File too large); name another" in message
    assert names(tmp_path / "cache") == []


def test_an_error_of_a_source_stays_its_own(tmp_path):
    def fail(folder):
        (tmp_path / "gone.txt").read_text()

    with pytest.raises(FileNotFoundError) as error:
        cached(tmp_path / "cache", "key", fail)
    assert error.value.filename == str(tmp_path / "gone.txt")


def slow_write(folder, seconds, log):
    with open(log, "a") as file:
        file.write("x")
    time.sleep(seconds)
    write(folder)


def write_in_cache(cache, seconds, log):
    cached(cache, "key", lambda folder: slow_write(folder, seconds, log))


def test_of_several_processes_one_writes(tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache"
    processes = [
        multiprocessing.get_context("fork").Process(target=write_in_cache, args=(cache, 0.3, log)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert log.read_text() == "x"
    assert names(cache) == ["key"]


def test_a_killed_writer_is_no_hindrance(tmp_path):
    log, cache = tmp_path / "log", tmp_path / "cache"
    process = multiprocessing.get_context("fork").Process(target=write_in_cache, args=(cache, 60, log))
    process.start()
    while not log.exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(names(cache)) == 1  # what it had begun
    write_in_cache(cache, 0, log)
    assert names(cache) == ["key"]
