"""The benchmarks run on small shapes, and their measurements are correct."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from affine_attention import attention_weights
from benchmarks import accuracy, attention, gpu, loop, mechanisms, ranges, readme, worst_row
from benchmarks.loop_calls import python_calls
from benchmarks.loop_timing import Case, build, take_turns, wall_seconds
from benchmarks.measure import median_seconds, peak_memory


def test_peak_memory_counts_simultaneous_allocations():
    def call():
        a = torch.empty(2**20, dtype=torch.uint8)
        b = torch.empty(2**21, dtype=torch.uint8)
        del a, b
        torch.empty(2**20, dtype=torch.uint8)

    assert 3 * 2**20 <= peak_memory(call) < 3 * 2**20 + 2**16


def test_median_is_per_function():
    times = median_seconds({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, rounds=3)
    assert times["slow"] > 0.02 > times["fast"]


def test_attention_benchmark_writes_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "CPU_SHAPES", (attention.Shape("tiny", 1, 4, 2, 128, 16),))
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attention", "--device", "cpu", "--rounds", "2"])
    attention.main()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "tiny: B1 H4/2 T128 D16" in text
    assert "the paper's formula" in text
    assert "composed on cpu_flash" in text
    assert "Hardware: " in text


def test_accuracy_benchmark_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(accuracy, "grid_cases", lambda count, device: attention_cases())
    monkeypatch.setattr(sys, "argv", ["accuracy", "--cases", "2"])
    accuracy.main()
    (file,) = tmp_path.iterdir()
    assert "| float32 | grad_query | 2 |" in file.read_text()


@pytest.mark.parametrize("mechanism", attention.MECHANISMS)
def test_the_blockwise_truth_is_the_reference(mechanism):
    from affine_attention.testing import Inputs, run_oracle

    bench = attention.Bench(attention.Shape("", 1, 4, 2, 37, 16), "cpu", torch.float32)
    given = bench.of(mechanism)
    names = ("query", "key", "value", "alpha", "beta", "sink", "gate")
    expected = run_oracle(Inputs({name: given.get(name) for name in names}, {"is_causal": True}, bench.grad_out))
    found = worst_row.truth(given, bench.grad_out, block=16)
    torch.testing.assert_close(found["out"], expected["out"][0])
    for name in given:
        right = expected[f"grad_{name}"]
        torch.testing.assert_close(found[name], right[0] if right.dim() > 1 else right)


def test_worst_row_benchmark_writes_its_table_and_counts_wrong_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(worst_row, "CPU_SHAPES", (attention.Shape("tiny", 1, 4, 2, 129, 16),))
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["worst_row", "--device", "cpu", "--repeats", "2"])
    worst_row.main()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert "| affine | query |" in text
    assert "| 0 of 2 |" in text
    assert "| 2 of 2 |" not in text

    def wrong(query, key, value, **given):
        out = attention.attention(query, key, value, **given)
        return out + torch.zeros_like(out).index_fill(2, torch.tensor([77]), 1.0)

    monkeypatch.setattr(worst_row, "attention", wrong)
    worst_row.main()
    assert "| out |" in file.read_text()
    assert "| 2 of 2 |" in file.read_text()


def attention_cases():
    from affine_attention.testing import Case

    return [Case("affine"), Case("sink", queries=7, keys=7)]


def test_serving_benchmark_writes_its_table(tmp_path, monkeypatch):
    from benchmarks import serving

    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    options = ["--device", "cpu", "--quick", "--write", "--rounds", "1", "--mechanisms", "affine", "sink"]
    monkeypatch.setattr(sys, "argv", ["serving", *options])
    serving.main()
    (file,) = tmp_path.iterdir()
    rows = {row[0]: row for row in readme.rows_of(file)[1:]}
    assert float(rows["plain, on SDPA"][2]) == 1
    assert float(rows["affine"][2]) > 0
    assert float(rows["sink"][1].replace(",", "")) > 0


def test_serving_benchmark_has_pages_for_all_requests():
    from benchmarks.serving import QUICK, WHOLE

    for sizes in (QUICK, WHOLE):
        assert len(sizes.lengths) == sizes.requests
        assert (sizes.lengths[0], sizes.lengths[-1]) == (sizes.shortest, sizes.longest)
        assert sizes.pages * sizes.page >= sum(sizes.lengths) + sizes.requests * sizes.new_tokens


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_loop_benchmark_runs_every_section_on_tiny_sizes(tmp_path, monkeypatch, one_thread):
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    every = ["--only", *loop.SECTIONS]
    monkeypatch.setattr(
        sys, "argv", ["loop", "--device", "cpu", "--quick", "--write", "--mechanisms", "affine", *every]
    )
    loop.main()
    (file,) = tmp_path.glob("*.md")
    rows = {(row[0], row[1]): row for row in readme.rows_of(file)[1:]}
    for what in (
        "host time, forward under no_grad, B1 H2 T32 D16",
        "host time, forward + backward, B1 H2 T32 D16",
        "device time, forward, B1 H2 T16 D16",
        "train, eager, 1 x 32",
        "train, layers compiled, 1 x 32",
        "generate, static cache, batch 2, prompt 8",
    ):
        assert float(rows[what, "plain"][4]) == 1
        assert float(rows[what, "affine"][4]) > 0
    assert float(rows["commit_running_alpha, 2 layers, host time", "affine"][2]) > 0
    assert int(rows["Python calls, backward", "affine"][2]) > 0
    assert rows["train, CUDA graph, 1 x 32", "affine"][2] == "needs a CUDA GPU"
    assert "cumulative time" in (tmp_path / "loop-profile_eager_affine_python.txt").read_text()
    assert "Self CPU" in (tmp_path / "loop-profile_compiled_affine_operators.txt").read_text()


def test_every_target_of_the_loop_benchmark_names_a_measured_row(monkeypatch):
    """Checks names only: the sections run on stubs instead of measurements."""
    from benchmarks import loop_calls, loop_generate, loop_graph, loop_train
    from benchmarks.loop_options import FULL, Run

    run = Run("cpu", FULL, ("softmax", "affine"), 1, 1, 1, 1, 1)
    ones = lambda functions, *_: dict.fromkeys(functions, 1.0)  # noqa: E731
    small = lambda run, size: attention.Bench(attention.Shape("", 1, 2, 2, 8, 8), "cpu", torch.float32)  # noqa: E731
    monkeypatch.setattr(loop_calls, "make_bench", small)
    monkeypatch.setattr(loop_calls, "median_seconds", ones)
    monkeypatch.setattr(loop_train, "build_model", lambda run, name: None)
    for module in (loop_calls, loop_generate, loop_train):
        monkeypatch.setattr(module, "take_turns", ones)
    for module in (loop_generate, loop_train):
        monkeypatch.setattr(module, "build", lambda builders: builders)
    measured = set()
    for section in (loop_calls.host, loop_calls.device, loop_train.train, loop_train.commit, loop_generate.generate,
                    loop_graph.graph):  # fmt: skip
        measured |= {(case.what, name) for case in section(run) for name in case.measured}
    assert set(loop.TARGETS) <= measured


def test_a_variant_that_raises_becomes_a_row_and_the_others_continue(capsys):
    def broken():
        raise RuntimeError("no such kernel\nand much more")

    functions = build({"plain": lambda: lambda: None, "built": broken, "called": lambda: broken})
    measured = take_turns(functions, 2, wall_seconds("cpu", 1, untimed=1))
    assert isinstance(measured["plain"], float)
    assert measured["built"] == measured["called"] == "RuntimeError: no such kernel"
    assert [row[2:5] for row in loop.rows_of(Case("train", "tokens/s", measured))[1:]] == [
        ["RuntimeError: no such kernel", "tokens/s", ""]
    ] * 2


def test_python_calls_are_those_of_forward_and_backward():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(1, requires_grad=True)
    out = Twice.apply(x)
    assert python_calls(lambda: None) == 0
    assert python_calls(lambda: (lambda: None)()) == 1
    plain = 2 * x
    extra = python_calls(lambda: out.backward(retain_graph=True)) - python_calls(lambda: plain.backward())
    assert extra >= 1  # the function's own backward


def test_the_readme_shows_the_loop_before_the_kernels(tmp_path, monkeypatch):
    def result(name, date, *rows):
        header = f"Hardware: NVIDIA H200. Versions: torch 2.11. Date: {date}. Command: `python`."
        path = tmp_path / f"{name}_nvidia-h200_{date}.md"
        path.write_text("\n".join([header, "", *attention.table(loop.COLUMNS, list(rows))]))
        return path

    step = "train, eager, 8 x 2048"
    result("loop", "2026-01-01", ["train, old", "plain", "1", "tokens/s", "1.000", "", ""])
    first = result(
        "loop", "2026-01-02",
        [step, "plain", "150,000", "tokens/s", "1.000", "", ""],
        [step, "affine", "147,000", "tokens/s", "0.980", "0.92", "0.98"],
        ["Python calls, forward", "affine", "9", "calls", "", "", ""],
        ["commit_running_alpha, 30 layers, wall clock", "affine", "0.19", "ms", "", "0.5 ms", "0.2 ms"],
    )  # fmt: skip
    second = result(
        "loop-parts", "2026-01-02",
        [step, "plain", "1", "tokens/s", "1.000", "", ""],
        ["host time, forward", "no mechanism", "50", "µs", "1.250", "", ""],
        ["train, CUDA graph", "affine", "RuntimeError: no graph", "tokens/s", "", "", ""],
    )  # fmt: skip
    assert readme.loop_lines(first, second)[2:] == [
        "| host time, forward |  | 50 µs |  |  |",
        "| train, eager, 8 x 2048 | 150,000 tokens/s |  | 147,000 tokens/s | 0.980 |",
        "| train, CUDA graph |  |  | RuntimeError: no graph |  |",
        "| commit_running_alpha, 30 layers, wall clock |  |  | 0.19 ms |  |",
    ]
    for path in (readme.newest("attention_nvidia"), readme.newest("accuracy_nvidia")):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    part = tmp_path / "loop-host_nvidia-h200_2026-01-01.md"
    part.write_text(second.read_text())
    assert readme.newest_of_each("loop*_nvidia") == [first, second, part]
    assert readme.whole_tables() == []
    (tmp_path / "serving_nvidia-h200_2026-01-03.md").write_text(first.read_text())
    assert "## Continuous batching on a GPU" in readme.whole_tables()
    block = readme.block()
    assert "old" not in block
    assert 0 < block.index("147,000 tokens/s") < block.index("qwen0.5b-2k")


def test_accelerate_benchmark_runs(monkeypatch, capsys):
    from benchmarks import accelerate

    sizes = ["--length", "32", "--window", "8", "--heads", "2", "--key-value-heads", "1", "--hidden", "32"]
    monkeypatch.setattr(sys, "argv", ["accelerate", "--device", "cpu", "--rounds", "1", *sizes])
    accelerate.main()
    assert "| operator | " in capsys.readouterr().out


def test_ranges_benchmark_writes_its_table_and_reports_wrong_routes(tmp_path, monkeypatch):
    tiny = [
        ranges.Case("documents", 1, 4, 2, 96, 96, 16, documents=True),
        ranges.Case("both", 1, 4, 4, 64, 96, 16, window=20),
    ]
    tiny.append(ranges.Case("padded", 2, 4, 4, 64, 64, 16, padded=True, against="causal"))
    monkeypatch.setattr(ranges, "CASES", tuple(tiny))
    monkeypatch.setattr(ranges, "scaled_down", lambda case: case)
    monkeypatch.setattr(ranges, "DOCUMENT", 20)
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ranges", "--device", "cpu", "--rounds", "1"])
    ranges.main()
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    assert all(str(case) in text for case in tiny)
    assert "WRONG" not in text

    def wrong(query, *given, impl, **named):
        out = attention.attention(query, *given, impl=impl, **named)
        return out if impl == "composed" else out * 1.1

    monkeypatch.setattr(ranges, "attention", wrong)
    ranges.main()
    assert "WRONG by 0.1" in file.read_text()


def test_the_dense_mask_of_the_ranges_benchmark_is_that_of_the_call():
    case = ranges.Case("", 2, 2, 1, 40, 70, 8, documents=True, window=9)
    bench = ranges.Bench(case, "cpu", torch.float32)
    visible = attention_weights(bench.given["query"], bench.given["key"], **bench.visible) > 0
    assert torch.equal(visible.any(1, keepdim=True), bench._dense())


def test_mechanisms_benchmark_writes_its_table(tmp_path, monkeypatch):
    monkeypatch.setenv("AFFINE_RESULTS", str(tmp_path))
    monkeypatch.setitem(mechanisms.SHAPES, "cpu", (attention.Shape("tiny", 1, 2, 1, 33, 8),))
    monkeypatch.setattr(sys, "argv", ["mechanisms", "--device", "cpu", "--rounds", "1", "--presets", "signed_weights"])
    mechanisms.main()
    (file,) = tmp_path.iterdir()
    rows = {row[1]: row for row in readme.rows_of(file)[1:]}
    assert set(rows) == {"softmax", "affine", "signed_weights", *mechanisms.ADDED}
    assert float(rows["softmax"][3]) == float(rows["affine"][4]) == 1


def gpu_steps(tmp_path):
    scripts = {"good": "print('fine')", "bad": "raise SystemExit(3)", "slow": "import time; time.sleep(60)"}
    for name, text in scripts.items():
        (tmp_path / f"{name}_step.py").write_text(text)
    return [gpu.Step(name, (f"{name}_step",), 0.02 if name == "slow" else 1) for name in scripts]


def test_gpu_steps_are_logged_limited_and_continued(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "STEPS", gpu_steps(tmp_path))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["gpu", str(out)])
    with pytest.raises(SystemExit, match="failed: bad, slow"):
        gpu.main()
    assert {name: each["outcome"] for name, each in gpu.read_state(out).items()} == {
        "good": "passed", "bad": "failed", "slow": "failed"
    }  # fmt: skip
    assert (out / "good.log").read_text() == "fine\n"
    (out / "good.log").unlink()
    with pytest.raises(SystemExit, match="failed: bad, slow"):
        gpu.main()
    assert not (out / "good.log").exists(), "a step that passed does not run again"
    monkeypatch.setattr(sys, "argv", ["gpu", str(out), "--list"])
    gpu.main()
    assert "good             passed" in capsys.readouterr().out


def test_a_gpu_step_that_the_limit_interrupts_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slow = gpu.Step("slow", ("slow_step",), 1)
    gpu_steps(tmp_path)
    monkeypatch.setattr(gpu, "_call", lambda *_: None)
    assert gpu.run(tmp_path / "out", [slow], 0.5)["slow"]["outcome"] == "interrupted"


def test_gpu_steps_of_tests_run_in_several_processes(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(gpu, "_call", lambda command, *_: commands.append(command[2:]) or 0)
    steps = [gpu.Step("tests", ("pytest", "tests"), 1), gpu.Step("loop", ("benchmarks.loop",), 1)]
    gpu.run(tmp_path, steps, 5, workers=8)
    assert commands == [["pytest", "tests", "-n", "8"], ["benchmarks.loop"]]


def test_every_gpu_step_exists():
    for step in gpu.STEPS:
        module, *arguments = step.arguments
        if module == "pytest":
            assert all(Path(path).exists() for path in arguments if path.startswith("tests"))
        else:
            text = Path(module.replace(".", "/") + ".py").read_text()
            assert all(option in text for option in arguments if option.startswith("--"))
