"""The section of the page that shows the claims."""

import pytest

from affine_attention.lab.report import render
from affine_attention.lab.report.claim_tables import claim_tables
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs

from .folders import make_run
from .reading import Page, plain
from .test_claims import make_study


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return Page(render(load_runs(make_study(tmp_path_factory.mktemp("study")))))


def test_the_page_shows_each_claim_with_its_verdict(page):
    assert page.cell("verdicts", "Lower loss", "Verdict") == "mixed"
    assert page.cell("verdicts", "Lower loss", "Tests") == "1 holds, 1 does not"
    assert page.cell("verdicts", "Linear clipping over sigmoid", "Verdict") == "inconclusive (no run)"
    assert plain(page.cell("verdicts", "Lower loss", "Difference")) == pytest.approx(-0.1)
    rows = {(row[0], row[1]): row for row in page.tables["claim-loss"][1:]}
    assert rows["affine − sink", "ln c4 word PPL"][2] == "does not hold"
    assert rows["affine − sink", "Loss"][2] == "–", "the same runs are one test"
    columns = page.tables["claim-loss"][0]
    assert columns[3:7] == ["Difference", "Own interval", "Error term", "p (Holm)"]
    assert rows["affine − softmax", "ln c4 word PPL"][5] == "pooled, 10 df", "6 mechanisms, 3 seeds"
    assert "A claim holds if all of its tests hold" in page.text
    assert page.cell("power", "ln c4 word PPL", "df") == "10"
    assert 'class="text worse"' in page.source.split('id="claim-loss"')[1].split("</figure>")[0]
    order = [page.source.index(f'<section id="{key}"') for key in ("overview", "claims", "quality")]
    assert order == sorted(order)


def test_with_one_seed_there_are_differences_and_one_note(tmp_path):
    page = Page(render(load_runs(make_study(tmp_path, seeds=(0,)))))
    assert page.tables["verdicts"][0] == ["Claim", "Claimed", "Difference", "Comparison", "Measure", "Seeds"]
    assert page.cell("verdicts", "Lower loss", "Difference") == "−0.0990"
    section = page.source.split('<section id="claims"')[1].split("</section>")[0]
    assert "inconclusive" not in section
    assert section.count("There is only one seed") == 1
    assert section.index("</table>") < section.index("<details>"), "the single tables are collapsed"
    assert "No runs to compare for: Linear clipping over sigmoid (no run of affine (sigmoid))." in page.text


def test_without_a_pair_of_runs_there_is_one_sentence(tmp_path):
    (table,) = claim_tables(group_runs(load_runs([make_run(tmp_path / "a", "affine", steps=5)])))
    assert table.rows == []
    page = Page(render(load_runs([tmp_path / "a"])))
    assert "No claim can be tested" in page.text
    assert "claim-loss" not in page.tables


def test_runs_without_evaluation_or_inspection_are_compared_by_their_loss(tmp_path):
    folders = [make_run(tmp_path / f"{name}{seed}", name, seed, steps=20, evaluated=False, inspected=False)
               for name in ("softmax", "affine") for seed in (0, 1)]  # fmt: skip
    page = Page(render(load_runs(folders)))
    assert {row[1] for row in page.tables["claim-loss"][1:]} == {"Loss"}
    assert "claim-entropy" not in page.tables
    assert page.cell("verdicts", "Higher entropy", "Verdict") == "inconclusive (not measured)"
