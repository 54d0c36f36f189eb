import base64
import hashlib
import re

from affine_attention.lab.report.cells import Cell, Row, Table, text_cell
from affine_attention.lab.report.page import figure_html, page, rich, settings_html, table_html

from .reading import Page

EVIL = "\"'><script>alert(1)</script>"


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
    made = page("Title", "", [("one", "One", "<p>text</p>")], {"groups": []})
    policy = next(
        given["content"] for tag, given in Page(made).tags if given.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    style = re.search(r"<style>(.*?)</style>", made, re.DOTALL).group(1)
    script = re.search(r"<script>(.*?)</script>", made, re.DOTALL).group(1)

    def quoted(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert rules == {
        "default-src": "'none'", "script-src": quoted(script), "style-src": quoted(style), "img-src": "data:",
        "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip


def test_nothing_is_loaded_from_elsewhere_and_nothing_is_styled_or_run_inline():
    made = Page(page("Title", "", [("one", "One", "")], {}))
    for tag, given in made.tags:
        assert not {"src", "style"} & set(given), (tag, given)
        assert not [name for name in given if name.startswith("on")], (tag, given)
        assert tag not in ("link", "iframe", "object", "embed", "img")
        assert given.get("href", "#").startswith("#")
    assert not re.findall(
        r"@import|url\((?!#)|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", made.source
    )


def test_tables_escape_names_numbers_and_titles():
    rows = [Row([text_cell(EVIL, EVIL), Cell("1.0", EVIL, EVIL, "best")])]
    source = table_html(Table("t", EVIL, EVIL, [EVIL, "B"], rows, [EVIL], {"B": EVIL}))
    read = Page(source)
    assert read.scripts == []
    assert not [tag for tag, _ in read.tags if tag == "script"]
    assert read.tables["t"] == [[EVIL, "B"], [EVIL, f"1.0 {EVIL}"]]
    titles = [given["title"] for _, given in read.tags if "title" in given]
    assert titles == [EVIL, EVIL, EVIL]


def test_a_table_without_rows_has_an_explanation():
    read = Page(table_html(Table("t", "Title", "", ["A"], [], missing="run `affine evaluate RUN`")))
    assert read.tables == {}
    assert "run affine evaluate RUN" in read.text
    assert ("code", {}) in read.tags


def test_a_long_name_is_cut_and_its_whole_is_in_the_title():
    source = table_html(Table("t", "T", "", ["A"], [Row([text_cell("n" * 10_000)])]))
    read = Page(source)
    assert len(read.tables["t"][1][0]) < 200
    assert [given["title"] for _, given in read.tags if "title" in given] == ["n" * 10_000]


def test_commands_are_code_and_stay_escaped():
    assert rich("do `affine inspect <RUN>` & see") == "do <code>affine inspect &lt;RUN&gt;</code> &amp; see"
    assert settings_html({"<a>": "<b>"}) == '<dl class="settings"><dt>&lt;a&gt;</dt><dd>&lt;b&gt;</dd></dl>'


def test_a_figure_without_scripts_has_a_note():
    drawn = Page(figure_html({"key": "k", "title": "T", "aid": "A.", "views": []}))
    assert "JavaScript, which is switched off" in drawn.text
    missing = Page(figure_html({"key": "k", "title": "T", "aid": "A.", "views": [], "missing": "`affine train`"}))
    assert not [given for _, given in missing.tags if "data-figure" in given]
    assert "affine train" in missing.text
