"""The log holds each step once, in order, and is rewound to a checkpoint."""

from __future__ import annotations

import json
import resource

import pytest

from affine_attention.files import read_lines
from affine_attention.lab.training.steplog import StepLog, keep_whole_lines


def make_log(folder, steps):
    log = StepLog(folder / "log.jsonl")
    for step in range(1, steps + 1):
        log.add({"step": step, "loss": 1 / step})
    return log


def steps_of(log):
    return [line["step"] for line in read_lines(log.path)]


def test_every_line_is_in_the_file_at_once(tmp_path):
    log = make_log(tmp_path, 3)
    assert [line["loss"] for line in read_lines(log.path)] == [1.0, 0.5, 1 / 3]
    log.add({"step": 4, "loss": float("nan")})
    assert json.loads(log.path.read_text().splitlines()[3])["loss"] is None


def test_the_log_is_rewound_to_a_step_and_continued(tmp_path):
    log = make_log(tmp_path, 7)
    whole = log.path.read_bytes()
    with open(log.path, "ab") as file:
        file.write(b'{"step": 8, "lo')  # a machine that lost its power
    log.rewind(4)
    assert steps_of(log) == [1, 2, 3, 4]
    for step in (5, 6, 7):
        log.add({"step": step, "loss": 1 / step})
    assert log.path.read_bytes() == whole
    log.rewind(0)
    assert log.path.read_bytes() == b""
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_that_lacks_steps_is_rejected(tmp_path):
    log = make_log(tmp_path, 3)
    with pytest.raises(ValueError) as error:
        log.rewind(5)
    assert "does not hold steps 1 to 5" in str(error.value)
    assert steps_of(log) == [1, 2, 3]


def test_a_full_disk_is_an_error_and_no_half_line_stays(tmp_path):
    log = make_log(tmp_path, 3)
    size = log.path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
    try:
        with pytest.raises(OSError):
            log.add({"step": 4, "loss": 0.25})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.close()
    keep_whole_lines(log.path)
    assert log.path.stat().st_size == size
    keep_whole_lines(tmp_path / "not there")
