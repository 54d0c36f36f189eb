"""The plans of the GPU experiments run in a tiny form on a CPU: they stop, resume and carry their results back."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from affine_attention.files import read_json
from affine_attention.lab.data.tokenizer import train_tokenizer
from affine_attention.lab.run import RunFolder
from affine_attention.study.stages import is_done, run_study
from studies.experiments import plans
from studies.experiments import run as experiments
from studies.smollm2.run import TASKS, TEXTS

STORIES = [f"Story {n}.\n" + f"The cat number {n} sat on mat {n % 7}. " * 30 for n in range(40)]
TINY = {
    "student": "llama-1m", "student_changes": {"num_hidden_layers": 2, "vocab_size": 300}, "vocabulary_size": 300,
    "sequence_length": 32, "global_batch": 2, "steps": 4, "warmup_steps": 1, "decay_steps": 1, "probe_every": 2,
    "compile": False, "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """(DATA, teacher) in the form of studies/smollm2, with a few sentences and a teacher of random weights."""
    data = tmp_path_factory.mktemp("data")
    for folder in ("corpus", "heldout", "evals"):
        (data / folder).mkdir()
    (data / "corpus/all.train.txt").write_text("\n\n".join(STORIES))
    for text in TEXTS:
        (data / f"corpus/{text}.val.txt").write_text("\n\n".join(f"A dog named {text} saw cat {n}." for n in range(9)))
    (data / "heldout/c4_en_train_first1000.jsonl").write_text(json.dumps({"text": STORIES[0]}) + "\n")
    (data / "heldout/wikitext2_raw_test.txt").write_text(STORIES[1])
    question = json.dumps({"ctx": "The cat sat on the", "choices": [" mat", " dog"], "gold": 0}) + "\n"
    for name in ("lambada_openai_test", "piqa_val", "hellaswag_val", "arc_easy_test"):
        (data / f"evals/{name}.jsonl").write_text(question)
    teacher = tmp_path_factory.mktemp("teacher")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, num_key_value_heads=1, **shape)).save_pretrained(teacher)
    train_tokenizer(STORIES, 300).save_pretrained(teacher)
    return data, teacher


def command(places, name, out, *more, **settings):
    """The arguments of the command with the tiny settings; None leaves a setting to the plan."""
    chosen = {key: value for key, value in (TINY | settings).items() if value is not None}
    changes = [text for key, value in chosen.items() for text in ("--set", f"{key}={json.dumps(value)}")]
    data, teacher = places
    usual = ["--corpus", "*.train.txt", "--device", "cpu", "--parallel", "1"]
    return [name, str(data), str(teacher), str(out), *usual, *changes, *more]


def plan_of(places, name, out, *more, **settings):
    given = experiments.parse(command(places, name, out, *more, **settings))
    return plans.PLANS[name](given)


@pytest.mark.parametrize(("name", "count"), [("e1", 28), ("e2", 8), ("e4", 50), ("e5", 12)])
def test_the_runs_are_those_of_the_design(places, tmp_path, capsys, name, count):
    experiments.main(["--list", *command(places, name, tmp_path)])
    names = capsys.readouterr().out.split()
    assert len(names) == len(set(names)) == count
    recipes = [job.recipe for job in plans.runs_of(plan_of(places, name, tmp_path), tmp_path)]
    assert {recipe.seed for recipe in recipes} == {recipe.data_seed for recipe in recipes}


def test_the_settings_are_those_of_the_design():
    usual = ["DATA", "teacher", "runs"]
    of = {name: plans.runs_of(plans.PLANS[name](experiments.parse([name, *usual])), "runs") for name in plans.PLANS}
    for job in of["e1"]:
        assert (job.recipe.steps, job.recipe.global_batch, job.recipe.sequence_length) == (1200, 8, 1024)
    for job in of["e2"]:
        assert (job.recipe.student, job.recipe.learning_rate, job.recipe.tokens) == ("teacher", 3e-4, 580 * 65536)
    assert {(job.recipe.steps, job.recipe.warmup_steps) for job in of["e4"]} == {(400, 100)}
    assert {job.recipe.learning_rate for job in of["e4"]} == {5e-4, 1e-3, 2e-3, 4e-3, 8e-3}
    assert {job.recipe.tokens for job in of["e5"]} == {580 * 65536, 1160 * 65536, 2320 * 65536}
    for job in of["e5"]:
        assert (job.recipe.steps - job.recipe.decay_steps) % job.recipe.save_every == 0, "no checkpoint for the branch"


@pytest.mark.parametrize(
    "variants", [("constant_alpha", "affine_centred"), pytest.param(plans.E1_VARIANTS, marks=pytest.mark.slow)]
)
def test_e1_runs_and_its_archive_holds_every_run(places, tmp_path, monkeypatch, variants):
    monkeypatch.setattr(plans, "E1_VARIANTS", variants)
    out, archive = tmp_path / "runs", tmp_path / "e1.tar.xz"
    arguments = command(places, "e1", out, "--archive", str(archive), "--seeds", "0")
    experiments.main(arguments)
    names = [job.name for job in plans.runs_of(plan_of(places, "e1", out, "--seeds", "0"), out)]
    assert len(names) == len(variants) + 3
    for name in names:
        run = RunFolder(out / name)
        assert is_done(run)
        assert not run.model.exists()
        assert set(read_json(run.evaluation_file)["tasks"]) == set(TASKS)
    assert archive.stat().st_size < 2**20
    losses = {name: RunFolder(out / name).log()[0]["loss"] for name in names}
    assert losses["softmax-seed0"] != losses["softmax_start=0-seed0"]

    # On another machine only the archive is there: every run is taken from it and none is trained again.
    shutil.rmtree(out)
    times = archive.stat().st_mtime_ns
    experiments.main(arguments)
    assert all(is_done(RunFolder(out / name)) for name in names)
    assert not (out / names[0] / "checkpoints").exists()
    assert archive.stat().st_mtime_ns > times
    assert {name: RunFolder(out / name).log()[0]["loss"] for name in names} == pytest.approx(losses, rel=1e-6)


def test_a_scaled_student_starts_with_scaled_projections(places, tmp_path):
    plan = plan_of(places, "e1", tmp_path, "--seeds", "0")[0]
    plan.write_starts()
    own, half, none = (
        dict(plans.build_student(job.recipe).named_parameters())
        for job in [
            *[j for j in plan.jobs(tmp_path) if j.name == "softmax_learning_rate=0.0005-seed0"],
            *plan.jobs(tmp_path)[-2:],
        ]
    )
    for name, weights in own.items():
        factor = 0.5 if "o_proj" in name else 1.0
        assert (half[name] == factor * weights).all()
        assert (none[name] == (factor == 1.0) * weights).all()


def test_e2_converts_the_teacher_with_and_without_pressure(places, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "E2_MECHANISMS", ("affine",))
    from_teacher = {"student": None, "student_changes": None, "vocabulary_size": None, "device_batch": 2}
    experiments.main(command(places, "e2", tmp_path, **from_teacher))
    first = {}
    for name, pressure in (("affine-seed0", None), ("affine_sink_pressure=first_key-seed0", "first_key")):
        run = RunFolder(tmp_path / name)
        assert is_done(run)
        recipe = run.recipe()
        assert (recipe.student, recipe.sink_pressure, recipe.learning_rate) == (str(places[1]), pressure, 3e-4)
        assert set(read_json(run.evaluation_file)["instruments"]) == {"eviction", "quantisation", "length"}
        first[name] = run.log()[0]["loss"]
    # The student starts as its teacher: the distillation loss of the first step is rounding.
    assert first["affine-seed0"] == pytest.approx(0, abs=1e-5)


def test_e4_runs_every_rate(places, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "E4_MECHANISMS", ("affine",))
    monkeypatch.setattr(plans, "RATES", (5e-4, 8e-3))
    experiments.main(command(places, "e4", tmp_path, "--seeds", "0"))
    for rate in (5e-4, 8e-3):
        run = RunFolder(tmp_path / f"affine_learning_rate={rate}-seed0")
        assert is_done(run)
        assert max(line["learning_rate"] for line in run.log()) == pytest.approx(rate)


def test_e4_goes_on_without_a_run_that_became_non_finite(places, tmp_path, monkeypatch):
    monkeypatch.setattr(plans, "E4_MECHANISMS", ("softmax", "affine"))
    monkeypatch.setattr(plans, "RATES", (8e-3,))
    (plan,) = plan_of(places, "e4", tmp_path, "--seeds", "0")
    first, second = (job.name for job in plan.jobs(tmp_path))
    calls = []

    def fake_study(plan, out, **options):
        calls.append([job.name for job in plan.jobs(out)])
        if len(calls) == 1:
            run = RunFolder(out / first)
            run.add_event("stop", step=3, reason="SIGTERM")  # an earlier call, which is no result
            assert first in [job.name for job in plan.jobs(out)]
            run.add_event("stop", step=4, reason="NotFiniteError: the loss is not finite")
            (run.path / "recipe.json").write_text(json.dumps(plan.jobs(out / "elsewhere")[0].recipe.to_dict()))
            run.log_file.write_text("")
            raise ValueError("a student failed")

    monkeypatch.setattr(experiments, "run_study", fake_study)
    experiments.run_plan(plan, tmp_path)
    assert calls == [[first, second], [second]]

    # On another machine the non-finite run is taken from the archive and is not trained again.
    experiments.pack(tmp_path, tmp_path / "e4.tar.xz")
    assert experiments.unpack(tmp_path / "e4.tar.xz", tmp_path / "there") == 1
    assert [job.name for job in plan.jobs(tmp_path / "there")] == [second]

    def fail(plan, out, **options):
        raise ValueError("another reason")

    monkeypatch.setattr(experiments, "run_study", fail)
    with pytest.raises(ValueError, match="another reason"):
        experiments.run_plan(plan, tmp_path)


@pytest.fixture
def short_e5(monkeypatch):
    monkeypatch.setattr(plans, "E5_MECHANISMS", ("affine",))
    monkeypatch.setattr(plans, "E5_LONG", {"steps": 10, "decay_steps": 2})
    monkeypatch.setattr(plans, "E5_BRANCHES", ({"steps": 5, "decay_steps": 1},))
    monkeypatch.setattr(plans, "E5_SETTINGS", plans.E5_SETTINGS | {"save_every": 4})
    return {"steps": None, "decay_steps": None}


def test_a_branch_of_e5_is_bitwise_the_run_from_the_start(places, tmp_path, short_e5):
    out, whole = tmp_path / "runs", tmp_path / "whole"
    experiments.main(command(places, "e5", out, **short_e5))
    branch = RunFolder(out / "affine_steps=5_decay_steps=1-seed0")
    assert [event["event"] for event in branch.events()][:2] == ["branch", "resume"]
    run_study(plan_of(places, "e5", whole, **short_e5)[1], whole, device="cpu", quiet=True)
    scratch = RunFolder(whole / branch.path.name)
    assert "resume" not in [event["event"] for event in scratch.events()]
    for ours, theirs in zip(branch.log(), scratch.log(), strict=True):
        for key in ("step", "loss", "grad_norm", "learning_rate"):
            assert ours[key] == theirs[key], key
    assert branch.log()[-1]["eval_loss"] == scratch.log()[-1]["eval_loss"]


def test_a_branch_may_change_only_its_length(places, tmp_path, short_e5):
    long, branches = plan_of(places, "e5", tmp_path, **short_e5)
    recipe = long.jobs(tmp_path)[0].recipe
    run = RunFolder(tmp_path / "long")
    run.path.mkdir()
    run.recipe_file.write_text(json.dumps(recipe.to_dict()))
    other = branches.jobs(tmp_path)[0].recipe.with_settings({"learning_rate": 0.5})
    with pytest.raises(
        ValueError, match="may change only steps and decay_steps, got decay_steps, learning_rate, steps"
    ):
        plans.start_branch(run, RunFolder(tmp_path / "branch"), other)
    assert not (tmp_path / "branch").exists()


def test_it_stops_in_time_and_packs_what_is_there(places, tmp_path):
    archive = tmp_path / "e4.tar.xz"
    more = ("--archive", str(archive), "--minutes", "0.02", "--seeds", "0")
    with pytest.raises(SystemExit) as stopped:
        experiments.main(command(places, "e4", tmp_path / "runs", *more, steps=5000))
    assert stopped.value.code == 143
    assert archive.is_file()
