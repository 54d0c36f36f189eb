"""The tables as markdown: the page's numbers, hostile names as text, and the rest of an existing file is kept."""

import re

import pytest

from affine_attention.lab.report import render, report
from affine_attention.lab.report.cells import Cell, Row, Table, text_cell
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.markdown import BEGIN, END, markdown, table_markdown, write_markdown

from .folders import make_run
from .reading import Page
from .test_report import hostile_run

KEYS = {
    "The paper’s claims and the results of these runs": "verdicts",
    "Lower loss": "claim-loss",
    "Differences to softmax in numbers": "deltas",
    "Table 1: mechanisms compared": "table-1",
    "Table 2: with an output gate": "table-2",
    "Table 4: gradient norm, steps 0–500": "table-4",
    "Gradient norm by window of steps": "gradient-windows",
    "Weight on the first token, next to uniform attention": "first-tokens",
    "What these runs can show": "power",
    "Table 5: spikes of the gradient norm, steps 0–500": "table-5",
    "Perplexity per token, word and byte": "perplexity",
    "The runs": "runs",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    names = ("softmax", "sink", "affine", "gated")
    return load_runs([make_run(root / f"{name}-{seed}", name, seed, steps=20) for name in names for seed in (0, 1)])


def tables_in(text):
    """heading -> rows of cells, with bold and escapes taken away."""
    found = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        rows = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines if line.startswith("| ")]
        found[title] = [[re.sub(r"\*\*|\\(?=[|*\[\]`~\\])", "", cell) for cell in row] for row in rows]
    return found


def test_the_tables_are_those_of_the_page(runs):
    page, found = Page(render(runs)), tables_in(markdown(group_runs(runs)))
    for title, key in KEYS.items():
        head, line, *body = found[title]
        assert set("".join(line)) <= set(":- ")
        assert [head, *body] == page.tables[key], title


def test_the_text_is_the_same_each_time_and_holds_no_date(runs):
    assert markdown(group_runs(runs)) == markdown(group_runs(runs))
    sections = re.findall(r"^## (.*)", markdown(group_runs(runs)), flags=re.MULTILINE)
    assert sections == ["The paper’s claims", "Differences to softmax", "Quality", "Training", "Attention",
                        "Perplexity", "What was run"]  # fmt: skip


def test_bold_sides_and_details():
    rows = [
        Row([text_cell("a|b_c _d_"), Cell("1.0", "± 0.1", kind="best"), Cell("2.0", kind="worse")]),
        Row([text_cell("*c*"), Cell("3.0"), Cell("–")], "paper"),
    ]
    table = Table("k", "A <b> title", "Run `affine report x|y` | now", ["Name", "x", "y"], rows, ["A *note*."])
    assert table_markdown(table).splitlines() == [
        "### A &lt;b&gt; title",
        "",
        "Run `affine report x\\|y` \\| now",
        "",
        "| Name | x | y |",
        "| :--- | ---: | ---: |",
        "| a\\|b_c \\_d\\_ | **1.0** ± 0.1 | **2.0** |",
        "| *\\*c\\** | *3.0* | *–* |",
        "",
        "A \\*note\\*.",
    ]
    assert table_markdown(Table("k", "T", "", [], [], missing="`affine x` makes it.")).endswith("`affine x` makes it.")


def test_hostile_names_are_text(tmp_path):
    text = markdown(group_runs(load_runs([hostile_run(tmp_path), make_run(tmp_path / "o", "softmax", steps=20)])))
    prose = re.sub(r"`[^`\n]*`", "", text)
    assert "<" not in prose, "no tag outside of code"
    assert "\0" not in text
    assert not set(text) & set("\u202e\u2066\u2028\u2029")
    for found in tables_in(text).values():
        assert len({len(row) for row in found}) <= 1, "no name breaks a row into more cells"


def test_bare_addresses_and_formulas_of_a_name_are_text():
    table = Table("k", "see https://x.y, www.x.y and $x$", "", [], [], missing="")
    assert table_markdown(table).startswith("### see https\\://x.y, www\\.x.y and \\$x\\$")


def test_a_new_file_has_the_marks_and_another_report_replaces_what_is_between(runs, tmp_path):
    groups = group_runs(runs)
    path = write_markdown(groups, tmp_path / "docs" / "study.md")
    first = path.read_text()
    assert first.startswith(BEGIN)
    assert first.rstrip().endswith(END)
    path.write_text(f"# The study\n\nWords before.\n\n{BEGIN}\nold\n{END}\n\nWords after.\n")
    write_markdown(groups, path)
    assert path.read_text() == f"# The study\n\nWords before.\n\n{first.rstrip()}\n\nWords after.\n"
    assert [entry.name for entry in path.parent.iterdir()] == ["study.md"]


@pytest.mark.parametrize("words", ["# Mine\n", f"{BEGIN}\nno end\n", f"{END}\n{BEGIN}\n", f"{BEGIN}{END}{BEGIN}{END}"])
def test_a_file_without_the_marks_is_left_alone(runs, tmp_path, words):
    path = tmp_path / "mine.md"
    path.write_text(words)
    with pytest.raises(ValueError, match=r"mine\.md exists without"):
        report([run.folder.path for run in runs], tmp_path / "r.html", markdown=path)
    assert path.read_text() == words
    assert not (tmp_path / "r.html").exists(), "nothing is written after an error"


def test_a_file_that_is_not_text_is_reported(runs, tmp_path):
    path = tmp_path / "mine.md"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"mine\.md is not text"):
        write_markdown(group_runs(runs), path)


def test_a_folder_is_rejected(runs, tmp_path):
    with pytest.raises(IsADirectoryError, match="markdown must be a file"):
        write_markdown(group_runs(runs), tmp_path)
