"""Documents of files, folders, patterns, saved datasets and hub datasets."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest
from datasets import Dataset, DatasetDict

from affine_attention.lab.data import read_documents
from affine_attention.lab.data.sources import Layout, find_sources

from .texts import make_documents, write_json_lines, write_text

FIRST, SECOND, THIRD = (make_documents(6, seed) for seed in range(3))


@pytest.fixture(autouse=True)
def library_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data" / "inner").mkdir(parents=True)
    write_text(tmp_path / "data" / "b.txt", SECOND)
    write_json_lines(tmp_path / "data" / "a.jsonl", FIRST)
    write_text(tmp_path / "data" / "inner" / "c.txt", THIRD)
    write_text(tmp_path / "data" / ".hidden.txt", THIRD)
    (tmp_path / "data" / "README.md").write_text("not data")
    return tmp_path / "data"


def test_files_folders_and_patterns(folder):
    assert list(read_documents(folder)) == FIRST + SECOND + THIRD
    assert list(read_documents(str(folder / "*.txt"))) == SECOND
    assert list(read_documents(str(folder / "**/*.txt"))) == SECOND + THIRD
    assert list(read_documents([folder / "b.txt", folder / "a.jsonl"])) == SECOND + FIRST


def test_sources_that_do_not_exist(folder):
    for name, kind, message in (
        (folder / "b.tx", FileNotFoundError, f"did you mean {folder / 'b.txt'}?"),
        (folder / "*.parquet", FileNotFoundError, "no file matches"),
        (folder / "none" / "a.txt", FileNotFoundError, "does not exist"),
        ([], ValueError, "no data"),
        ("hf:", ValueError, "hf:NAME[:CONFIG][@SPLIT]"),
        ([folder, folder / "b.txt"], ValueError, "b.txt is given twice"),
    ):
        with pytest.raises(kind) as error:
            list(read_documents(name))
        assert message in str(error.value)


def test_pickles_are_never_opened(tmp_path):
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(["text"]))
    for name in (path, tmp_path, f"hf:{tmp_path}"):
        with pytest.raises((ValueError, OSError)) as error:
            list(read_documents(name))
        assert str(tmp_path) in str(error.value)


def test_saved_datasets(tmp_path):
    Dataset.from_dict({"text": FIRST}).save_to_disk(tmp_path / "one")
    assert list(read_documents(tmp_path / "one")) == FIRST
    with pytest.raises(ValueError) as error:
        list(read_documents(tmp_path / "one", text_column="body"))
    assert "no column 'body', it has text" in str(error.value)
    DatasetDict({"train": Dataset.from_dict({"text": SECOND})}).save_to_disk(tmp_path / "several")
    assert list(read_documents(tmp_path / "several" / "train")) == SECOND
    with pytest.raises(ValueError) as error:
        list(read_documents(tmp_path / "several"))
    assert "holds several splits (train)" in str(error.value)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for seed in range(4):
        write_json_lines(folder / f"train-{seed}.jsonl", make_documents(10, seed))
    write_json_lines(folder / "test.jsonl", make_documents(3, 9))
    return folder


EVERYTHING = [text for seed in range(4) for text in make_documents(10, seed)]


def test_datasets_of_the_library(shards):
    assert list(read_documents(f"hf:{shards}")) == EVERYTHING
    assert list(read_documents(f"hf:{shards}@test")) == make_documents(3, 9)
    assert list(read_documents(f"hf:{shards}:default@train[:5]")) == EVERYTHING[:5]
    for name, message in (
        (f"hf:{shards}@tset", "tset"),
        (f"hf:{shards}:other", "other"),
        ("hf:nobody/nothing", "hf:nobody/nothing@train"),
    ):
        with pytest.raises((ValueError, OSError)) as error:
            list(read_documents(name))
        assert message in str(error.value)
        assert "hf:NAME[:CONFIG][@SPLIT]" in str(error.value)


@pytest.mark.parametrize("form", ["hf:{}", "{}/train-*.jsonl"])
def test_a_stream_resumes_from_its_position(shards, form):
    for source in find_sources(form.format(shards)):
        stream = source.stream(Layout(), seed=3, rank=0, ranks=1)
        whole = list(stream.start(epoch=1))
        for stop in range(1, len(whole), 3):
            reading = stream.start(epoch=1)
            before = [next(reading) for _ in range(stop)]
            position = json.loads(json.dumps(stream.position()))
            again = source.stream(Layout(), seed=3, rank=0, ranks=1)
            assert before + list(again.start(epoch=1, position=position)) == whole
            assert list(again.start(epoch=1)) == whole  # the position is not kept
        if form == "hf:{}":
            assert Counter(whole) == Counter(EVERYTHING)
            assert list(stream.start(epoch=2)) != whole


@pytest.mark.parametrize("form", ["hf:{}", "{}/train-1.jsonl"])
def test_ranks_share_the_documents_of_a_stream(shards, form):
    (source,) = find_sources(form.format(shards))
    parts = [list(source.stream(Layout(), seed=0, rank=rank, ranks=2).start(epoch=0)) for rank in range(2)]
    assert Counter(parts[0] + parts[1]) == Counter(source.read(Layout()))
    assert min(map(len, parts)) > 0


def test_identity_is_that_of_the_content(tmp_path):
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    write_text(one, FIRST)
    write_text(two, FIRST)
    first, second = (find_sources(path)[0].identity() for path in (one, two))
    assert first | {"name": ""} == second | {"name": ""}
    write_text(two, FIRST[:-1])
    assert find_sources(two)[0].identity()["sha256"] != first["sha256"]


def test_a_change_in_the_middle_of_a_large_file_is_noticed(tmp_path):
    path, size = tmp_path / "large.txt", 5 * 2**20
    path.write_bytes(b"a" * size)
    (source,) = find_sources(path)
    whole = source.identity()
    for place in (0, size // 2, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"b")
        assert source.identity() != whole
        path.write_bytes(b"a" * size)
    assert source.identity() == whole


def test_a_damaged_dataset_is_named(tmp_path):
    Dataset.from_dict({"text": FIRST * 200}).save_to_disk(tmp_path / "one")
    (file,) = (tmp_path / "one").glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError) as error:
        list(read_documents(tmp_path / "one"))
    assert str(tmp_path / "one") in str(error.value)


def test_identity_of_datasets_is_that_of_their_files(shards):
    (source,) = find_sources(f"hf:{shards}")
    before = source.identity()
    assert [file["name"] for file in before["files"]] == [f"train-{seed}.jsonl" for seed in range(4)]
    write_json_lines(shards / "train-2.jsonl", make_documents(10, 20))
    changed = [a["name"] for a, b in zip(before["files"], source.identity()["files"], strict=True) if a != b]
    assert changed == ["train-2.jsonl"]


def test_the_text_that_ships_with_the_package():
    documents = list(read_documents("embedded:gutenberg"))
    assert len(documents) > 100
    with pytest.raises(ValueError, match="embedded:gutenberg"):
        list(read_documents("embedded:shakespeare"))


def test_cyclic_links_are_not_followed(tmp_path):
    folder = tmp_path
    for name in "abc":
        folder = folder / name
        folder.mkdir()
        (folder / "text.txt").write_text(name)
        for link in range(4):
            (folder / f"loop-{link}").symlink_to(tmp_path)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "text.txt").write_text("not seen")
    for pattern in (str(tmp_path / "**" / "*.txt"), str(tmp_path / "**"), str(tmp_path)):
        assert sorted(read_documents(pattern)) == ["a", "b", "c"]


def test_a_device_is_rejected():
    with pytest.raises(ValueError, match="/dev/zero must be a file or a folder"):
        find_sources("/dev/zero")
    with pytest.raises(ValueError, match="must not be an empty string"):
        find_sources("")
