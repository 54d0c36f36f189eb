"""Files of every kind give their documents, and errors name the file and the position."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from affine_attention.lab.data.readers import kind_of, read_file

from .texts import make_documents, write_json_lines, write_text

DOCUMENTS = make_documents(7)


def test_an_empty_line_a_line_or_the_file_ends_a_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\n\nOne\r\nstill one\r\n \t\r\n\r\n\r\nTwo \xc3\xa9\n")
    assert list(read_file(path)) == ["One\nstill one", "Two é"]
    assert list(read_file(path, documents="line")) == ["One", "still one", "Two é"]
    assert list(read_file(path, documents="file")) == ["One\nstill one\n \t\n\n\nTwo é"]
    with pytest.raises(ValueError) as error:
        list(read_file(path, documents="blank"))
    assert "blank_line, line, file" in str(error.value)


@pytest.mark.parametrize(("suffix", "module"), [(".gz", gzip), (".xz", lzma), (".bz2", bz2)])
def test_compressed_and_truncated_files(tmp_path, suffix, module):
    plain = write_text(tmp_path / "a.txt", DOCUMENTS * 50)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(module.compress(plain.read_bytes()))
    assert list(read_file(path)) == DOCUMENTS * 50
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OSError) as error:
        list(read_file(path))
    assert str(path) in str(error.value)
    assert "truncated" in str(error.value)


def test_what_is_not_utf8_is_named_by_byte_and_line(tmp_path):
    path = tmp_path / "latin.txt"
    content = "Première\n\nseconde ligne\n".encode() + "après".encode("latin-1")
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_file(path))
    assert f"{path}: not UTF-8 at byte {content.index(0xE8)} (line 4, 0xe8)" in str(error.value)
    packed = tmp_path / "latin.txt.gz"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + content))
    with pytest.raises(ValueError) as error:
        list(read_file(packed))
    assert f"at byte {content.index(0xE8) + 3} of its decompressed text" in str(error.value)


def test_json_lines(tmp_path):
    path = write_json_lines(tmp_path / "a.jsonl", DOCUMENTS, "body")
    assert list(read_file(path, "body")) == DOCUMENTS
    path = tmp_path / "b.json"
    path.write_text('{"text": "a"}\n\n{"text": null}\n{"text": "  "}\n{"text": "b"}\n')
    assert list(read_file(path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "a.jsonl:2: not a JSON object"),
        ('["text"]', "a.jsonl:2: an array"),
        ('"text"', "a.jsonl:2: must be a JSON object, got str"),
        ('{"txt": "a", "id": 3}', "a.jsonl:2: no column 'text', it has txt, id; set text_column (did you mean 'txt'?)"),
        (r'{"text": "half \ud800"}', "a.jsonl:2: column 'text' has a lone surrogate at index 5"),
        ('{"text": 3}', "a.jsonl:2: column 'text' must hold text, got int"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError) as error:
        list(read_file(path))
    assert message in str(error.value)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [*DOCUMENTS, None, ""], "score": range(9)})
    parquet.write_table(table, path, row_group_size=3)
    assert list(read_file(path)) == DOCUMENTS
    for column, message in (("texts", "did you mean 'text'?"), ("score", "must hold text, got int64")):
        with pytest.raises(ValueError) as error:
            list(read_file(path, column))
        assert str(path) in str(error.value)
        assert message in str(error.value)


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_a_truncated_parquet_file_is_reported(tmp_path, keep):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size) if keep < 1 else keep])
    with pytest.raises(ValueError) as error:
        list(read_file(path))
    assert f"{path}: not a complete parquet file" in str(error.value)


def test_parquet_with_bytes_changed_inside_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": DOCUMENTS}), path, compression="NONE", use_dictionary=False)
    content = path.read_bytes().replace(b"Title", b"\xff\xfe\xfftl")
    path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        list(read_file(path))
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["a.pkl", "a.csv", "a", "a.xz", "a.parquet.gz", "a.txt.zst"])
def test_other_extensions_are_rejected(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(json.dumps({"text": "a"}).encode())
    assert kind_of(path) is None
    with pytest.raises(ValueError) as error:
        list(read_file(path))
    assert str(path) in str(error.value)
    assert ".jsonl" in str(error.value)


def test_a_line_or_document_without_end_is_rejected(tmp_path, monkeypatch):
    from affine_attention.lab.data import readers

    monkeypatch.setattr(readers, "LONGEST_DOCUMENT", 1000)
    (tmp_path / "line.txt").write_text("x" * 1001)
    (tmp_path / "document.txt").write_text("word word\n" * 200)
    (tmp_path / "good.txt").write_text(("word word\n" * 50 + "\n") * 9)
    for name, words in (
        ("line.txt", "line.txt:1: a line must have at most 1,000"),
        ("document.txt", "a document must"),
    ):
        with pytest.raises(ValueError) as error:
            list(read_file(tmp_path / name))
        assert words in str(error.value)
    assert len(list(read_file(tmp_path / "good.txt"))) == 9
    assert len(list(read_file(tmp_path / "document.txt", documents="line"))) == 200


def test_a_pipe_is_not_read(tmp_path):
    import os

    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="must be a regular file"):
        list(read_file(tmp_path / "a.txt"))


def test_a_deep_record_is_named_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not a readable JSON object"):
        list(read_file(tmp_path / "a.jsonl"))
