"""Puts hostile text into every field of a run and checks the page, in a real browser if there is one."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

from affine_attention.lab.report import report
from tests.lab.report.browser import Browser, find_browser
from tests.lab.report.folders import make_run
from tests.lab.report.reading import Page

from .tally import Battery

MARK = "window.owned=1"
PAYLOADS = (
    f"<script>{MARK}</script>", f"</script><script>{MARK}</script>", f"<img src=x onerror={MARK}>",
    f"<svg onload={MARK}>", f"<svg><script>{MARK}</script></svg>", f'" onmouseover="{MARK}',
    f"' onfocus='{MARK}' autofocus='",
    f"javascript:{MARK}", f"<a href=javascript:{MARK}>x</a>", f"<iframe srcdoc='<script>parent.{MARK}</script>'>",
    f"<body onload={MARK}>", f"<details open ontoggle={MARK}>", f"<math><mi xlink:href='javascript:{MARK}'>",
    f"${{{MARK}}}", f"{{{{{MARK}}}}}", f"`;{MARK};`", f"';{MARK};'", f'";{MARK};"', f"\\u003cscript\\u003e{MARK}",
    f"<!--><script>{MARK}</script>", f"]]><script>{MARK}</script>", f"<style>@import'javascript:{MARK}'</style>",
    f"<link rel=stylesheet href='javascript:{MARK}'>", f"<meta http-equiv=refresh content='0;javascript:{MARK}'>",
    f"<object data='javascript:{MARK}'>", f"<embed src='javascript:{MARK}'>",
    f"<form action='javascript:{MARK}'><input>",
    f"<input autofocus onfocus={MARK}>", f"<video><source onerror={MARK}></video>", f"<audio src=x onerror={MARK}>",
    f"<marquee onstart={MARK}>", f"\u2028{MARK}\u2029", f"\x00<script>{MARK}</script>", f"＜script＞{MARK}＜/script＞",
    f"<base href='javascript:{MARK}//'>", f"&lt;script&gt;{MARK}&lt;/script&gt;",
)  # fmt: skip


def attack(battery: Battery, folder: Path, seed: int, share: float = 1.0) -> None:
    numbers = random.Random(seed)
    payloads = numbers.sample(PAYLOADS, max(3, round(len(PAYLOADS) * share)))
    clean = Page(report([make_run(folder / "clean", "affine", steps=10)], folder / "clean.html").read_text())
    pages = {payload: _page(folder / str(number), payload) for number, payload in enumerate(payloads)}
    battery.run("markup in every text, the page parsed", (lambda p=p: _parsed(pages[p], clean) for p in payloads))
    battery.run("markup in every text, the Markdown export", (lambda p=p: _markdown(pages[p], p) for p in payloads))
    executable = find_browser()
    if executable is None or os.environ.get("ATTACK_WITHOUT_BROWSER"):
        battery.skip("markup in every text, the page in Chromium", "no browser on this machine")
        return
    browser = Browser(executable, folder / "profile")
    try:
        battery.run(
            "markup in every text, the page in Chromium", (lambda p=p: _opened(browser, pages[p]) for p in payloads)
        )
    finally:
        browser.close()


def _page(folder: Path, payload: str) -> Path:
    run = make_run(folder / "run", "affine", steps=10, map_length=4)
    for name, change in (
        ("recipe.json", {"name": payload, "student": payload, "data": [payload], "mechanism": {"name": payload}}),
        ("manifest.json", {"device": payload, "commit": payload, "versions": {payload: payload}, "command": payload}),
    ):
        found = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps(found | change))
    evaluation = json.loads((run / "evaluation.json").read_text())
    evaluation["perplexity"] = {payload: evaluation["perplexity"]["c4"]}
    evaluation["tasks"] = {payload: evaluation["tasks"]["piqa"]}
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    inspection = json.loads((run / "inspection.json").read_text())
    inspection["maps"]["tokens"] = [payload] * 4
    (run / "inspection.json").write_text(json.dumps(inspection))
    with open(run / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": payload, "reason": payload}) + "\n")
    return report([run], folder / "page.html", markdown=folder / "page.md")


def _parsed(path: Path, clean: Page) -> str | None:
    page = Page(path.read_text())
    if len(page.scripts) != len(clean.scripts) or page.scripts[1] != clean.scripts[1]:
        return "another script"
    tags = {tag for tag, _ in page.tags} - {tag for tag, _ in clean.tags}
    names = {name for _, given in page.tags for name in given} - {name for _, given in clean.tags for name in given}
    return f"new tags {tags} or attributes {names}" if tags or names else None


def _markdown(path: Path, payload: str) -> str | None:
    text = path.with_suffix(".md").read_text().replace("<!-- report:begin -->", "").replace("<!-- report:end -->", "")
    for sign in ("<script", "<img", "<svg", "<iframe", "<a ", "](javascript"):
        if sign in text:
            return f"{sign} is in the Markdown of {payload}"
    return None


def _opened(browser: Browser, path: Path) -> str | None:
    tab = browser.open(path.as_uri())
    try:
        owned = tab.run("typeof window.owned")
        asked = {url for url in tab.requests() if not url.startswith(("data:", "blob:"))} - {path.as_uri()}
        if owned != "undefined":
            return "the payload ran"
        return f"the page asked for {asked}" if asked else None
    finally:
        browser.call("Target.closeTarget", targetId=tab.target)
