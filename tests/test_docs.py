"""README and docs are true: the site builds without warnings or network, and every link, snippet and command works."""

from __future__ import annotations

import html.parser
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from PIL import Image

from tests.docs_commands import check_command, commands_of, fences, inline_commands

ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "affine_attention/ops/README.md",
           "affine_attention/lab/embedded/README.md", "studies/smollm2/README.md",
           *(f"studies/experiments/{name}.md" for name in ("README", "e1", "e2", "e3", "e4", "e5")))  # fmt: skip
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted((ROOT / "docs").rglob("*.md"))]
# Terms that this field does not use, or uses for something else.
NEVER = ("copy engine", "finds no registers", "matrix units", "faint", "eaten", "won back", "stands behind",
         "gets every processor", "without a word", "finds room", "is no label", "is luck", "did not pay",
         "come out alike", "hushed", "strangers", "the former", "beside")  # fmt: skip


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


class Assets(html.parser.HTMLParser):
    """Collects what a page loads, where it links, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, pairs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in pairs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a":
            self.links += [given["href"]] if "href" in given else []
        elif tag in ("script", "img", "iframe", "source", "link", "video", "audio", "embed", "object"):
            self.loads += [given[name] for name in ("src", "href", "data") if name in given]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def parsed(site):
    return {name: Assets(path.read_text()) for name, path in site.items() if name.endswith(".html")}


def test_the_site_loads_nothing_from_elsewhere(site, parsed):
    elsewhere = re.compile(r"(?i)^(https?:)?//")
    for name, page in parsed.items():
        assert not [target for target in page.loads if elsewhere.match(target)], name
    for name, path in site.items():
        if name.endswith(".css"):
            assert not re.search(r"""(?i)(url\(|@import)\s*["']?(https?:)?//""", path.read_text()), name


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site, parsed):
    for name, page in parsed.items():
        if name in ("404.html", "study-report.html"):  # one has absolute links, the other its own tests
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            goal = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path))) if parts.path else name
            goal = "index.html" if goal == "." else goal
            assert goal in site, f"{name} links to {link}"
            if parts.fragment and goal in parsed:
                assert unquote(parts.fragment) in parsed[goal].anchors | {"__skip"}, f"{name} links to {link}"


def test_every_page_has_its_place_and_the_reference_its_entries(parsed):
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in parsed
    assert "affine_attention.attention" in parsed["api/core.html"].anchors
    assert "affine_attention.hf.attach" in parsed["api/hf.html"].anchors


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_in_markdown_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_markdown_is_plain_and_its_code_has_a_language(page):
    text = page.read_text()
    for language, block in fences(page):
        assert language in ("python", "bash", "text", "bibtex"), f"a block without a language we test: {block[:80]}"
    assert not re.search(r"(?m)^    (make|affine|python|pip|uv) ", text), "commands belong in a ```bash block"
    if page.name not in ("reliability.md", "study-tables.md"):  # written by commands
        found = [term for term in NEVER if re.search(rf"(?i)\b{term}\b", text)]
        assert not found, f"{name_of(page)} uses {found}"


SNIPPETS = [(page, index, code) for page in PAGES
            for index, (language, code) in enumerate(fences(page)) if language == "python"]  # fmt: skip


@pytest.mark.parametrize(("page", "index", "code"), SNIPPETS, ids=[f"{name_of(p)}-{i}" for p, i, _ in SNIPPETS])
def test_python_snippets_run(page, index, code, without_hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    exec(compile(without_hub(code), f"{page.name}:{index}", "exec"), {"__name__": "__main__"})


COMMANDS = sorted({(name_of(page), command) for page in PAGES for language, block in fences(page) if language == "bash"
                   for command in commands_of(block)})  # fmt: skip


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command[:60]}" for page, command in COMMANDS])
def test_shell_commands_run_or_parse(page, command, tmp_path, monkeypatch, capsys):
    check_command(command, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_sentences_exist(page, tmp_path, monkeypatch, capsys):
    for command in inline_commands(page.read_text()):
        check_command(command, tmp_path, monkeypatch, whole=False)


def test_the_readme_shows_code_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 160
    assert "```python" in lines[:25]
    assert any("hf.attach(" in line for line in lines[:25])
    assert any(line.startswith("![") for line in lines[:10])


def test_what_the_readme_found_is_in_the_tables_of_the_study():
    readme, tables = (ROOT / "README.md").read_text(), (ROOT / "docs/study-tables.md").read_text()
    found = readme[readme.index("## What we found") : readme.index("## Documentation")]
    numbers = re.findall(r"−?\d\.\d{3}(?: ± \d\.\d{3})?", found)
    assert len(numbers) >= 6
    assert all(number in tables for number in numbers)


def test_the_chart_and_the_numbers_are_those_of_the_newest_results():
    from benchmarks import readme

    kept = readme.NUMBERS.read_text()
    assert readme.rewritten(kept) == kept, "run python -m benchmarks.readme"
    assert readme.chart() == readme.CHART.read_text(), "run python -m benchmarks.readme"


def test_the_pictures_are_those_of_the_stored_runs(tmp_path, capsys):
    from studies.smollm2 import pictures

    pictures.main(tmp_path)
    for name in pictures.PICTURES:
        assert (pictures.IMAGES / name).stat().st_size < 150_000
        new, kept = (
            np.asarray(Image.open(folder / name).convert("L"), float) for folder in (tmp_path, pictures.IMAGES)
        )
        assert new.shape == kept.shape
        assert np.abs(new - kept).mean() < 2, "run python -m studies.smollm2.pictures"
