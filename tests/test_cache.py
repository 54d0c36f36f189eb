"""The cache folder is the user's, has a limit, and can be emptied."""

from __future__ import annotations

import os
import time

import pytest

from affine_attention.cache import RECENT, cache_entries, cache_limit, clear_cache, default_cache, remove_oldest


def test_the_default_is_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "affine_attention"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "affine_attention"


def make_entry(cache, name, size, age):
    (cache / name).mkdir(parents=True)
    (cache / name / "data").write_bytes(bytes(size))
    os.utime(cache / name, (time.time() - age,) * 2)
    return cache / name


OLD, OLDER, NEW = (f"tokens-{digit * 24}" for digit in "abc")


def test_the_least_recently_used_goes_when_the_limit_is_reached(tmp_path, monkeypatch):
    make_entry(tmp_path, OLD, 2000, 2 * RECENT)
    make_entry(tmp_path, OLDER, 2000, 3 * RECENT)
    make_entry(tmp_path, NEW, 2000, 0)
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("AFFINE_CACHE_LIMIT", "1")
    assert remove_oldest(tmp_path, NEW) == []
    monkeypatch.setenv("AFFINE_CACHE_LIMIT", "0.000004")
    assert remove_oldest(tmp_path, NEW) == [tmp_path / OLDER]
    monkeypatch.setenv("AFFINE_CACHE_LIMIT", "0")
    assert remove_oldest(tmp_path, OLD) == [], "what was used within a day may be in use"
    assert remove_oldest(tmp_path, "other") == [tmp_path / OLD]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", NEW]


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_is_a_number(text, monkeypatch):
    monkeypatch.setenv("AFFINE_CACHE_LIMIT", text)
    with pytest.raises(ValueError, match="AFFINE_CACHE_LIMIT must be"):
        cache_limit()


def test_emptying_removes_only_our_entries(tmp_path):
    make_entry(tmp_path, NEW, 3000, 0)
    make_entry(tmp_path, f".{NEW}.part-77-abcd", 5, 0)
    (tmp_path / f".{NEW}.lock").touch()
    for name in ("tuned", "tokens-mine"):
        (tmp_path / name).mkdir()
    (tmp_path / OLD).symlink_to(tmp_path / "tuned")
    assert [entry.path.name for entry in cache_entries(tmp_path)] == [NEW]
    assert clear_cache(tmp_path) == 3000
    assert sorted(path.name for path in tmp_path.iterdir()) == [OLD, "tokens-mine", "tuned"]
    assert clear_cache(tmp_path / "nowhere") == 0


def test_an_unknown_home_folder_is_reported(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-has-this-name/cache")
    with pytest.raises(ValueError, match="unknown home folder"):
        default_cache()
