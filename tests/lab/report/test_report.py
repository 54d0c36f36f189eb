"""The whole page: its content, and its behaviour for hostile, empty or broken folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from affine_attention.files import write_json
from affine_attention.lab.report import report

from .folders import make_run
from .reading import Page

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "</script><script>document.title='owned'</script>", "<img src=x onerror=alert(1)>", "\"'`${1}", "\u202e\u2066bidi",
    "a\0b", "👩\u200d💻", "\u2028\u2029", "\ud800", "=HYPERLINK(\"x\")", "n" * 10_000, "<!--", "&lt;", "\\u003c", "]]>",
]  # fmt: skip


def page_of(paths, tmp_path):
    return Page(report(paths, tmp_path / "out" / "report.html").read_text(encoding="utf-8"))


def ids(page):
    return [given["id"] for _, given in page.tags if "id" in given]


def test_one_page_holds_every_table_and_figure_of_the_paper(tmp_path):
    page = page_of([make_run(tmp_path / name, name, steps=30) for name in ("softmax", "affine")], tmp_path)
    found = ids(page)
    assert len(found) == len(set(found))
    assert {f"table-{n}" for n in range(1, 6)} | {f"figure-{n}" for n in range(2, 12)} <= set(found)
    assert {figure["key"] for figure in page.data["figures"]} <= set(found)
    assert len(page.data["maps"]) == 2


def hostile_run(tmp_path):
    """A run whose every text is an attack."""
    name = "".join(HOSTILE)
    folder = make_run(tmp_path / "<b>run&'\"\u202e", "affine", steps=20, map_length=len(HOSTILE))
    inspection = json.loads((folder / "inspection.json").read_text())
    inspection["maps"]["tokens"] = HOSTILE
    (folder / "inspection.json").write_text(json.dumps(inspection))
    recipe = json.loads((folder / "recipe.json").read_text())
    recipe |= {"name": name, "student": name, "seed": name, "data": HOSTILE, "mechanism": {"name": name}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    evaluation = json.loads((folder / "evaluation.json").read_text())
    evaluation["perplexity"] = dict.fromkeys(HOSTILE, evaluation["perplexity"]["c4"])
    evaluation["tasks"] = dict.fromkeys(HOSTILE, evaluation["tasks"]["piqa"])
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    manifest = {"device": name, "versions": {text: text for text in HOSTILE}, "commit": name, "command": name,
                "attention": {"implementation": name, "reason": name}, "data": {"fingerprint": name}}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": name, "reason": name}) + "\n")
    return folder


def test_hostile_text_is_shown_and_never_markup(tmp_path):
    clean = page_of([make_run(tmp_path / "clean", "affine", steps=20)], tmp_path)
    page = page_of([hostile_run(tmp_path), make_run(tmp_path / "other", "softmax", steps=20)], tmp_path)
    assert len(page.scripts) == len(clean.scripts) == 2
    assert page.scripts[1] == clean.scripts[1], "the one script that runs is the package's own"
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in clean.tags}, "no tag that was not there before"
    assert {name for _, given in page.tags for name in given} <= {name for _, given in clean.tags for name in given}
    assert "\0" not in page.source
    assert not set(page.source) & set("\u202e\u2066\u2028\u2029")
    assert page.data["maps"][0]["tokens"][:3] == HOSTILE[:3]
    for shown in ("<img src=x onerror=alert(1)>", "⟨U+202E⟩⟨U+2066⟩bidi", "a⟨U+0000⟩b", "👩\u200d💻", "⟨U+D800⟩"):
        assert shown in page.text
    assert len(page.source) < 3_000_000


@pytest.mark.parametrize("keep", [(), ("manifest.json",), ("log.jsonl",), ("evaluation.json",), ("inspection.json",)])
def test_folders_with_parts_missing_make_a_page_with_a_note(tmp_path, keep):
    whole = make_run(tmp_path / "whole", "affine", steps=20)
    part = tmp_path / "part"
    part.mkdir()
    for name in ("recipe.json", *keep):
        (part / name).write_text((whole / name).read_text())
    page = page_of(part, tmp_path)
    assert "What is missing" in page.text
    assert ("not evaluated; affine evaluate" in page.text) == ("evaluation.json" not in keep)
    assert ("not inspected; affine inspect" in page.text) == ("inspection.json" not in keep)
    assert ("no manifest.json" in page.text) == ("manifest.json" not in keep)
    assert ("not started" in page.text) == ("log.jsonl" not in keep)
    assert page.tables["runs"][1][0] == "part"


@pytest.mark.parametrize(
    "inspection",
    [
        {"schema": 1},
        {"row_sum": None, "entropy": [], "first_token": {"mean": [[None, None], None]}, "maps": {"tokens": "x"}},
        {"total_weight": {"mean": [[None]]}, "row_sum": {"histogram": {"edges": [], "counts": []}}, "maps": None},
        {"first_token": {"mean": [[0.5], [], [0.1, 0.2]]}, "sequences": 0, "layers": 0, "heads": 0, "alpha": None},
    ],
)
def test_inspections_with_holes_make_a_page(tmp_path, inspection):
    folder = make_run(tmp_path / "run", "affine", steps=20)
    write_json(folder / "inspection.json", inspection)
    page = page_of(folder, tmp_path)
    drawn = {figure["key"] for figure in page.data["figures"]}
    assert "figure-3" not in drawn
    assert ("figure-4" in drawn) == ("layers" in inspection)


@pytest.mark.parametrize("with_maps", [True, False])
def test_stored_runs_without_weights_make_the_same_page(tmp_path, with_maps):
    """A study keeps what is small: no model/, no checkpoints/, and perhaps no maps."""
    kept = ["recipe.json", "manifest.json", "log.jsonl", "events.jsonl", "evaluation.json", "inspection.json"]
    kept += ["inspection/maps.safetensors"] if with_maps else []
    whole, stored = [], []
    for name in ("softmax", "affine"):
        for seed in (0, 1):
            folder = make_run(tmp_path / "whole" / f"{name}-{seed}", name, seed, steps=20)
            whole.append(folder)
            stored.append(tmp_path / "stored" / folder.name)
            for file in kept:
                (stored[-1] / file).parent.mkdir(parents=True, exist_ok=True)
                (stored[-1] / file).write_bytes((folder / file).read_bytes())
    before, after = page_of(whole, tmp_path), page_of(stored, tmp_path)
    assert after.tables == before.tables
    assert {row[10] for row in after.tables["runs"][1:]} == {"finished"}
    assert "Nothing is missing" in after.text
    assert after.tables["verdicts"][0][1] == "Verdict"
    assert len(after.data["maps"]) == (4 if with_maps else 0)
    (stored[0] / "events.jsonl").write_text('{"event": "start"}\n')
    assert page_of(stored, tmp_path).cell("runs", "softmax-0", "Status") == "unfinished at step 20 of 20"


def test_nan_series_and_a_cut_log_make_a_page(tmp_path):
    folder = make_run(tmp_path / "run", "affine", steps=5, finished=False)
    lines = ['{"step": 1, "loss": NaN, "grad_norm": null}', '{"step": 2, "loss": Infinity}', '{"step": 3, "lo']
    (folder / "log.jsonl").write_text("\n".join(lines))
    page = page_of(folder, tmp_path)
    assert "1 broken line of log.jsonl ignored" in page.text
    assert "figure-7" not in {figure["key"] for figure in page.data["figures"]}
    assert page.cell("runs", "run", "Steps") == "2 / 10"


@pytest.mark.parametrize("sequences", [0, 1])
def test_hardly_any_sequences_make_a_page(tmp_path, sequences):
    folder = make_run(tmp_path / "run", "affine", steps=20, map_length=sequences)
    inspection = json.loads((folder / "inspection.json").read_text())
    inspection |= {"sequences": sequences, "missing": ["0 of 10 sequences were found"] * (not sequences)}
    write_json(folder / "inspection.json", inspection)
    page = page_of(folder, tmp_path)
    assert len(page.data["maps"]) == sequences
    assert ("0 of 10 sequences were found" in page.text) == (sequences == 0)


def test_a_page_of_eight_large_runs_is_small(tmp_path):
    paths = [
        make_run(tmp_path / f"{name}{seed}", name, seed, steps=100, layers=12, heads=16, map_length=64)
        for name in ("softmax", "sink", "affine", "gated")
        for seed in (0, 1)
    ]
    path = report(paths, tmp_path / "report.html")
    assert path.stat().st_size < 8_000_000


def test_wrong_paths_are_errors_that_name_them(tmp_path):
    with pytest.raises(ValueError, match="paths"):
        report([], tmp_path / "r.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty"):
        report([make_run(tmp_path / "run", steps=2), tmp_path / "empty"], tmp_path / "r.html")
    with pytest.raises(IsADirectoryError, match="empty"):
        report(tmp_path / "run", tmp_path / "empty")
    assert not (tmp_path / "r.html").exists()


def test_an_old_report_is_replaced_whole(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    path = report(run, tmp_path / "r.html", title="First")
    report(run, path, title="Second & <last>")
    assert "<title>Second &amp; &lt;last&gt;</title>" in path.read_text()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["r.html", "run"]


def test_variants_are_hidden_at_first_if_there_are_many_lines(tmp_path):
    def asides(rates):
        runs = [make_run(tmp_path / f"{rates}-{n}", "affine", steps=2, learning_rate=1e-4 * n) for n in range(1, rates)]
        for seed in range(12):
            runs += [make_run(tmp_path / f"{rates}-{m}-{seed}", m, steps=2, seed=seed) for m in ("softmax", "affine")]
        page = Page(report(runs, tmp_path / f"{rates}.html").read_text())
        return {group["label"]: group["aside"] for group in page.data["groups"]}

    assert not any(asides(3).values())
    crowded = asides(10)
    assert not crowded["softmax"]
    assert not crowded["affine"]
    assert crowded["affine (learning_rate=0.0009)"]
    assert sum(crowded.values()) == len(crowded) - 2


def test_the_report_is_made_without_torch(tmp_path):
    """A machine that only reads results needs neither torch nor transformers."""
    folder = make_run(tmp_path / "run", "affine", steps=10)
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'transformers', 'triton'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from affine_attention.cli import main\n"
        "sys.exit(main(['report', sys.argv[1], '-o', sys.argv[2], '--markdown', sys.argv[3]]))\n"
    )
    words = [str(folder), str(tmp_path / "page.html"), str(tmp_path / "page.md")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Table 1" in (tmp_path / "page.md").read_text()
