"""Puts Markdown files from outside docs/ on the site, under source/, and makes links between all of them work.

A link is written once, as GitHub resolves it: relative to the file in the repository. On the site a page of docs/ keeps
its path and every other Markdown file is found at source/PATH. Links to anything else, such as a folder, become plain
text, since the site does not hold it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "affine_attention/ops/README.md", "benchmarks/results/*.md",
           "studies/smollm2/README.md", "studies/experiments/*.md", "LICENSE")  # fmt: skip
LINK = re.compile(r"(?<!\\)(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
FENCE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = f"source/{path.relative_to(ROOT).as_posix()}"
            kept = File.generated(config, name, abs_src_path=str(path))
            kept.inclusion = InclusionLevel.NOT_IN_NAV
            files.append(kept)
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Files) -> str:
    here = repository_path(page.file.src_uri)

    def relinked(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found.group(0)
        path, mark, anchor = target.partition("#")
        goal = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(here), path)))
        if files.get_file_from_path(goal) is None:
            return found.group(0) if image else words
        return f"{image}[{words}]({posixpath.relpath(goal, posixpath.dirname(page.file.src_uri) or '.')}{mark}{anchor})"

    if page.file.src_uri == "decisions/index.md":
        text = text.replace("<!-- decisions -->", decisions())
    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(relinked, part) for part in parts)


def repository_path(site: str) -> str:
    return site.removeprefix("source/") if site.startswith("source/") else f"docs/{site}"


def site_path(repository: str) -> str:
    inside = repository.removeprefix("docs/")
    return inside if inside != repository else f"source/{repository}"


def decisions() -> str:
    """A list of all decisions, by their headings."""
    pages = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
    return "\n".join(f"- [{page.read_text().splitlines()[0].lstrip('# ')}]({page.name})" for page in pages)
