"""The page in a headless Chromium: drawn, clicked, read, saved; no console errors, no network requests.

Skipped with a message if no browser is on the PATH or in CHROMIUM. REPORT_PICTURES=folder keeps the screenshots.
"""

from __future__ import annotations

import csv
import json
import os
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from affine_attention.files import write_json
from affine_attention.lab.report import load_run, report

from .browser import Browser, find_browser
from .folders import make_run
from .reading import Page
from .test_report import hostile_run

READOUT = "(() => { const r = document.querySelector('.readout'); return r.hidden ? null : r.innerText; })()"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip("needs a browser: put chromium or google-chrome on the PATH, or set CHROMIUM")
    started = Browser(executable, tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    for name in ("softmax", "sink", "affine", "affine_gated"):
        for seed in (0, 1):
            make_run(root / f"{name}-{seed}", name, seed, steps=120, layers=3, heads=4)
    make_run(root / "head_gated-0", "head_gated", 0, steps=40, planned=120, finished=False, inspected=False)
    return root


@pytest.fixture(scope="module")
def path(study):
    return report(sorted(study.glob("*-*")), study / "report.html")


@pytest.fixture
def tab(browser, path):
    opened = browser.open(path.as_uri())
    yield opened
    check_quiet(opened, path)
    browser.call("Target.closeTarget", targetId=opened.target)


def check_quiet(tab, path):
    tab.browser.wait(0.05)
    assert tab.complaints() == []
    assert {url for url in tab.requests() if not url.startswith(("data:", "blob:"))} == {path.as_uri()}


def keep(tab, name, tmp_path):
    """A screenshot that is not blank."""
    folder = Path(os.environ.get("REPORT_PICTURES") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    taken = tab.picture(folder / f"{name}.png")
    assert taken.stat().st_size > 15_000
    return taken


def test_every_figure_is_drawn(tab, path, tmp_path):
    page = Page(path.read_text())
    drawn = tab.run(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')].map((f) => "
        "[f.id, f.querySelectorAll('.stage svg path, .stage svg rect, .stage svg circle').length]))"
    )
    assert set(drawn) == {figure["key"] for figure in page.data["figures"]}
    assert all(count > 2 for count in drawn.values()), drawn
    assert tab.run("document.querySelectorAll('#figure-9 .stage svg rect').length") > 2 * 30 * 31 / 2
    keep(tab, "desktop-light", tmp_path)


def test_a_line_can_be_read_and_switched_off(tab, path):
    lines = Page(path.read_text()).figure("figure-7")["views"][0]["lines"]
    affine = next(line for line in lines if line["name"] == "affine, mean of 2 seeds")
    tab.hover("#figure-7 .stage svg", 0.5, 0.4)
    text = tab.run(READOUT)
    step = int(text.splitlines()[0].removeprefix("step "))
    value = affine["y"][affine["x"].index(step)]
    assert f"{float(f'{value:.4g}'):g}" in text.replace("−", "-")
    assert "affine, mean of 2 seeds" in text

    count = "document.querySelectorAll('#figure-7 .stage svg path').length"
    before = tab.run(count)
    tab.click("#figure-7 .legend button:nth-child(3)")
    assert (
        tab.run("document.querySelector('#figure-7 .legend button:nth-child(3)').getAttribute('aria-pressed')")
        == "false"
    )
    assert tab.run(count) == before - 3, "two seeds and their mean"
    tab.hover("#figure-7 .stage svg", 0.5, 0.4)
    assert "affine, mean" not in tab.run(READOUT)
    tab.click("#figure-7 .legend button:nth-child(3)")
    assert tab.run(count) == before


def test_arrow_keys_move_along_a_line(tab):
    tab.run("document.querySelector('#figure-4 .stage').focus()")
    tab.key("ArrowRight")
    assert tab.run(READOUT).startswith("layer 0")
    tab.key("ArrowRight")
    tab.key("ArrowRight")
    assert tab.run(READOUT).startswith("layer 2")
    tab.key("Escape")
    assert tab.run(READOUT) is None


def test_views_smoothing_logarithm_and_zoom(tab):
    picture = "document.querySelector('#figure-7 .stage svg').outerHTML"
    seen = [tab.run(picture)]
    tab.choose("#figure-7 select", "2")
    assert "held-out" in tab.run("document.querySelector('#figure-7 .stage svg').getAttribute('aria-label')")
    seen.append(tab.run(picture))
    tab.choose("#figure-7 select", "0")
    tab.run("(() => { const r = document.querySelector('#figure-7 input[type=range]'); r.value = 0.9;"
            "r.dispatchEvent(new Event('input')); })()")  # fmt: skip
    seen.append(tab.run(picture))
    tab.click("#figure-7 input[type=checkbox]")
    seen.append(tab.run(picture))
    x, y = tab.point("#figure-7 .stage svg", 0.4, 0.5)
    tab.mouse("mousePressed", x, y, "left", 1)
    tab.mouse("mouseMoved", x + 200, y, "left")
    tab.mouse("mouseReleased", x + 200, y, "left", 1)
    seen.append(tab.run(picture))
    assert tab.run("document.querySelector('#figure-7 .controls > button').hidden") is False
    tab.click("#figure-7 .controls > button")
    assert tab.run("document.querySelector('#figure-7 .controls > button').hidden") is True
    assert len({text.split("clip-")[0] for text in seen}) == len(seen), "each of them changes the axes"


def test_cells_of_grids_and_bars_can_be_read(tab, study):
    values = np.mean([load_run(study / f"softmax-{seed}").inspected("total_weight", "mean") for seed in (0, 1)], axis=0)
    tab.run("document.querySelector('#figure-5 .stage').focus()")
    for _ in range(2):
        tab.key("ArrowRight")
    assert tab.run(READOUT).split("\n")[0] == "softmax"
    assert "layer 0, head 1" in tab.run(READOUT)
    assert f"{values[0, 1]:.4g}" in tab.run(READOUT)
    tab.run("document.querySelector('#figure-3 .stage').focus()")
    tab.key("ArrowRight")
    assert "0.99 to 1.01" in tab.run(READOUT)
    assert "100 %" in tab.run(READOUT)


def test_the_explorer_shows_the_weight_of_the_cell_in_both_maps(tab, study, tmp_path):
    tab.choose("#figure-9 [aria-label=Layer]", "1")
    tab.choose("#figure-9 [aria-label=Head]", "2")
    names = tab.run("[...document.querySelector('#figure-9 [aria-label=Left]').options].map((o) => o.text)")
    assert "softmax, seed 0" in names
    assert "affine, seed 1" in names
    tab.choose("#figure-9 [aria-label=Left]", str(names.index("softmax, seed 0")))
    tab.choose("#figure-9 [aria-label=Right]", str(names.index("affine, seed 1")))
    tab.run("document.querySelector('#figure-9 .stage').focus()")
    for key in ("ArrowUp", "ArrowUp", "ArrowRight", "ArrowRight", "ArrowRight"):
        tab.key(key)  # from the last row's first cell to row 27, column 3
    said = tab.run("document.querySelector('#figure-9 .said').innerText")
    for name in ("softmax-0", "affine-1"):
        weight = load_run(study / name).maps()[1][2, 27, 3]
        assert f"with {weight:.3g} " in said.replace("−", "-"), said
        assert f"row sum {load_run(study / name).maps()[1][2, 27].sum():.3g}" in said
    assert "“↵” reads “ fox”" in said
    tab.hover("#figure-9 .stage svg", 0.2, 0.5)
    assert "layer 1, head 2" in tab.run(READOUT)
    assert "affine, seed 1" in tab.run(READOUT)
    keep(tab, "explorer", tmp_path)
    tab.click("#figure-9 .token:nth-of-type(6)")
    assert "“ over” reads" in tab.run("document.querySelector('#figure-9 .said').innerText")


def test_light_and_dark(browser, path, tmp_path):
    ground = "getComputedStyle(document.body).backgroundColor"
    sheet = "document.querySelector('#figure-7 .stage svg rect').getAttribute('fill')"
    tab = browser.open(path.as_uri(), dark=True)
    assert (tab.run(ground), tab.run(sheet)) == ("rgb(23, 27, 34)", "#171b22")
    keep(tab, "desktop-dark", tmp_path)
    tab.click("button.theme")
    assert (tab.run(ground), tab.run(sheet)) == ("rgb(255, 255, 255)", "#ffffff")
    tab.click("button.theme")
    assert (tab.run(ground), tab.run(sheet)) == ("rgb(23, 27, 34)", "#171b22")
    tab.run("localStorage.clear()")
    check_quiet(tab, path)
    browser.call("Target.closeTarget", targetId=tab.target)


@pytest.mark.parametrize("dark", [False, True])
def test_on_a_phone_the_page_is_as_wide_as_the_screen(browser, path, tmp_path, dark):
    tab = browser.open(path.as_uri(), 390, 800, dark=dark, touch=True)
    assert tab.run("document.documentElement.scrollWidth") == 390
    assert tab.run("document.querySelector('#table-1 .scroll').scrollWidth") > 390, "tables scroll in their own box"
    widths = tab.run("[...document.querySelectorAll('.stage svg')].map((s) => s.getBoundingClientRect().width)")
    assert max(widths) <= 390
    tab.tap("#figure-7 .stage svg", 0.6, 0.5)
    assert tab.run(READOUT).startswith("step ")
    keep(tab, f"phone-{'dark' if dark else 'light'}", tmp_path)
    tab.tap("#figure-9 .stage svg", 0.5, 0.2)
    assert "mean of heads" in tab.run(READOUT), "the chart that lost the focus does not hide it"
    tab.tap("#maps-title")
    assert tab.run(READOUT) is None
    check_quiet(tab, path)
    browser.call("Target.closeTarget", targetId=tab.target)


def test_verdicts_are_seen_on_a_phone_without_scrolling(browser, path, tmp_path):
    tab = browser.open(path.as_uri(), 390, 800, touch=True)
    tab.run("document.querySelector('#claims').scrollIntoView()")
    edges = tab.run(
        "[...document.querySelectorAll('#verdicts tr > :nth-child(2)')].map((c) => c.getBoundingClientRect().right)"
    )
    assert len(edges) == 1 + len(Page(path.read_text()).tables["verdicts"][1:])
    assert max(edges) < 390
    colours = tab.run(
        "[...document.querySelectorAll('#claims td.better, #claims td.worse')].map((c) => getComputedStyle(c).color)"
    )
    assert colours
    assert "rgb(27, 35, 48)" not in colours, "a verdict stands out from plain ink"
    keep(tab, "claims-phone", tmp_path)
    check_quiet(tab, path)
    browser.call("Target.closeTarget", targetId=tab.target)


def test_tables_are_copied(tab, path, browser):
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    head, first, *_ = Page(path.read_text()).tables["table-1"]
    tab.call("Page.bringToFront")
    tab.click("#table-1 .tools button:nth-child(1)")
    tab.browser.wait(0.1)
    assert tab.run("document.querySelector('#table-1 .tools button').textContent") == "Copied"
    lines = tab.run("navigator.clipboard.readText()").splitlines()
    assert lines[0].split("\t") == head
    assert lines[1].split("\t") == [cell.replace("−", "-") for cell in first]
    tab.click("#table-1 .tools button:nth-child(2)")
    tab.browser.wait(0.1)
    lines = tab.run("navigator.clipboard.readText()").splitlines()
    assert lines[0] == f"| {' | '.join(head)} |"
    assert lines[1].count("---:") == len(head) - 1


def downloaded(folder, name, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (folder / name).is_file() and (folder / name).stat().st_size:
            return folder / name
        time.sleep(0.02)
    raise AssertionError(f"{name} is not among {sorted(entry.name for entry in folder.iterdir())}")


def test_figures_are_saved_as_svg_png_and_csv(tab, path, browser, tmp_path):
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    # Chromium stops a page after ten downloads in a row.
    wanted = {
        "figure-8": ("svg", "png", "csv"), "figure-3-averaged-over-heads-all-layers": ("svg", "csv"),
        "figure-5-total-weight": ("csv",), "forest-Held-out-loss": ("svg",), "figure-9": ("png",),
    }  # fmt: skip
    for stem, kinds in wanted.items():
        key = "-".join(stem.split("-")[: 2 if stem.startswith("figure") else 1])
        for kind in kinds:
            tab.click(f"#{key} .tools button:nth-child({('svg', 'png', 'csv').index(kind) + 1})")
            saved = downloaded(tmp_path, f"{stem}.{kind}")
            if kind == "svg":
                root = ElementTree.parse(saved).getroot()
                assert root.tag == "{http://www.w3.org/2000/svg}svg"
                assert root[0].get("fill") == "#ffffff", "saved figures are for paper"
            elif kind == "png":
                assert saved.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
            else:
                assert len(saved.read_text().splitlines()) > 3
    tab.click("#table-1 .tools button:nth-child(3)")
    with open(tmp_path / "figure-8.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    line = Page(path.read_text()).figure("figure-8")["views"][0]["lines"][0]
    assert [float(row["gradient norm"]) for row in rows if row["line"] == line["name"]] == line["y"]
    assert "affine" in downloaded(tmp_path, "table-1.csv").read_text()


def test_hostile_text_does_nothing(browser, tmp_path):
    path = report([hostile_run(tmp_path), make_run(tmp_path / "other", "softmax", steps=20)], tmp_path / "r.html")
    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    tab = browser.open(path.as_uri())
    assert tab.run("document.title").startswith("Affine-Scaled Attention")
    assert tab.run("document.querySelectorAll('script').length") == 2
    assert tab.run("document.querySelectorAll('img, iframe, b script').length") == 0
    assert tab.run("document.documentElement.scrollWidth") == 1280
    tab.choose("#figure-9 [aria-label=Left]", "0")
    tab.run("document.querySelector('#figure-9 .stage').focus()")
    for _ in range(3):
        tab.key("ArrowUp")
    assert "document.title='owned'" in tab.run("document.querySelector('#figure-9').innerText")
    tab.click("#figure-9 .tools button:nth-child(1)")
    ElementTree.parse(downloaded(tmp_path, "figure-9.svg"))
    tab.click("#figure-9 .tools button:nth-child(3)")
    with open(downloaded(tmp_path, "figure-9.csv"), newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert '\'=HYPERLINK("x")' in cells, "a formula is text in a spreadsheet"
    assert not [cell for cell in cells if cell.startswith("=")]
    keep(tab, "hostile", tmp_path)
    check_quiet(tab, path)
    browser.call("Target.closeTarget", targetId=tab.target)


def test_broken_and_tiny_runs_are_drawn_without_errors(browser, tmp_path):
    bare = make_run(tmp_path / "bare", "sink", steps=2, finished=False)
    for name in ("log.jsonl", "manifest.json", "inspection.json", "evaluation.json"):
        (bare / name).unlink()
    holes = make_run(tmp_path / "holes", "gated", steps=2, layers=2, heads=1, finished=False)
    (holes / "log.jsonl").write_text(
        '{"step": 1, "loss": NaN, "grad_norm": 0}\n{"step": 2, "loss": 3, "grad_norm": nul'
    )
    write_json(
        holes / "inspection.json", {"first_token": {"mean": [[None, 0.5], None, [0.25]]}, "mean_logit": [[None]]}
    )
    paths = [
        bare,
        holes,
        make_run(tmp_path / "one", "affine", steps=1, layers=1, heads=1, map_length=1),
        make_run(tmp_path / "none", "softmax", steps=20, layers=5, heads=2, map_length=0),
    ]
    path = report(paths, tmp_path / "r.html")
    tab = browser.open(path.as_uri())
    drawn = tab.run("[...document.querySelectorAll('.stage svg')].map((s) => s.outerHTML)")
    assert drawn
    assert not [text for text in drawn if "NaN" in text or "Infinity" in text or "undefined" in text]
    for key in ("figure-7", "figure-4", "heads", "figure-9"):
        tab.run(f"document.querySelector('#{key} .stage').focus()")
        tab.key("ArrowRight")
    tab.click("button.theme")
    tab.click("button.theme")
    check_quiet(tab, path)
    browser.call("Target.closeTarget", targetId=tab.target)


def test_without_scripts_the_tables_are_there(browser, path):
    tab = browser.open("about:blank#")
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.call("Page.navigate", url=path.as_uri())
    tab.browser.wait(0.3)
    text = tab.run("document.body.innerText")
    assert "Table 1: mechanisms compared" in text
    assert "switched off" in text
    assert tab.run("document.querySelectorAll('button').length") == 0
    browser.call("Target.closeTarget", targetId=tab.target)


def test_it_prints(tab):
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.run("getComputedStyle(document.querySelector('.tools')).display") == "none"
    assert tab.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert len(tab.call("Page.printToPDF")["data"]) > 100_000


@pytest.mark.parametrize("width", [1200, 700, 360])
def test_the_labels_of_the_first_chart_do_not_touch_the_zero_line(browser, tmp_path, width):
    """When one difference is near zero and the others are negative, the zero line is at the right edge of the plot."""
    folders = []
    for name, loss in (("softmax", 3.0), ("sink", 3.001), ("affine", 2.98), ("gated", 2.7)):
        folder = make_run(tmp_path / name, name, steps=20)
        lines = [json.loads(line) | {"loss": loss} for line in (folder / "log.jsonl").read_text().splitlines()]
        (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        folders.append(folder)
    tab = browser.open(report(folders, tmp_path / "page.html").as_uri(), width=width)
    crossings = tab.run("""(() => {
        const all = (selector) => [...document.querySelectorAll(`#forest svg ${selector}`)];
        const boxes = (selector) => all(selector).map((e) => e.getBoundingClientRect());
        const lines = boxes(".zero"), texts = [...boxes(".row-name"), ...boxes(".row-value")];
        const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
        const wide = (b) => ({ left: b.left - 1, right: b.right + 1, top: b.top, bottom: b.bottom });
        return [lines.length, texts.length, texts.filter((t) => lines.some((l) => meets(wide(l), t))).length];
    })()""")
    browser.call("Target.closeTarget", targetId=tab.target)
    assert crossings == [1 if width >= 600 else 3, 6, 0]
