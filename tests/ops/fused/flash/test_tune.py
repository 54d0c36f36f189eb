"""Tuning runs the real kernels: in the interpreter, where times are meaningless, and on a GPU if available."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from affine_attention.ops.fused.flash import tune
from affine_attention.ops.fused.shared import tile_sizes, tuned
from affine_attention.ops.fused.shared.tile_sizes import KERNELS, Config

from ....interpreter import run_in_the_interpreter
from ..cudnn.test_cudnn import DEVICE, DTYPES, INTERPRETED, needs_triton, outside

SMALL = {kernel: [Config(16, 16, 4, 1), Config(32, 32, 4, 1)] for kernel in KERNELS}


@needs_triton
def test_the_fastest_correct_candidate_of_each_kernel_is_chosen(monkeypatch):
    clock = {Config(16, 16, 4, 1): 0.5, Config(32, 32, 4, 1): 0.25}
    monkeypatch.setattr(tune._Bench, "milliseconds", lambda self, kernel, config: clock.get(config, 1.0))
    seen = []
    options = {"device": DEVICE, "length": 40, "only": SMALL}
    found = list(tune.tune(16, DTYPES[0], **options, on_candidate=lambda *args: seen.append(args)))
    assert [each.key for each in found] == [(kernel, DTYPES[0].itemsize, 64) for kernel in KERNELS]
    for each in found:
        assert each.shipped == tile_sizes.shipped_config(each.key[0], 16, DTYPES[0], torch.device(DEVICE))
        assert each.config == Config(32, 32, 4, 1)
        assert (each.milliseconds, each.shipped_milliseconds, each.failed) == (0.25, 1.0, 0)
    assert [args for args in seen if args[0] == "forward, measures"] == [("forward, measures", n, 3) for n in (1, 2, 3)]


@needs_triton
def test_candidates_that_are_wrong_or_fail_are_never_chosen(monkeypatch):
    right, wrong, broken = Config(32, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 64, 4, 1)
    run = tune._Bench.run

    def spoiled(self, kernel, config):
        if config == broken:
            raise RuntimeError("out of resource: shared memory")
        results = run(self, kernel, config)
        return [x + (config == wrong) for x in results]

    monkeypatch.setattr(tune._Bench, "run", spoiled)
    monkeypatch.setattr(tune._Bench, "milliseconds", lambda self, kernel, config: 1.0 if config != right else 0.5)
    only = {kernel: [wrong, broken, right] for kernel in KERNELS}
    for each in tune.tune(16, DTYPES[0], device=DEVICE, length=40, only=only):
        assert each.config == right
        assert each.failed == 2


@needs_triton
def test_a_gain_within_the_noise_changes_nothing(monkeypatch):
    monkeypatch.setattr(
        tune._Bench, "milliseconds", lambda self, kernel, config: 0.99 if config in SMALL[kernel] else 1.0
    )
    for each in tune.tune(16, DTYPES[0], device=DEVICE, length=40, only=SMALL):
        assert each.config == each.shipped
        assert "which are kept" in tune.describe(each)


@needs_triton
def test_the_best_candidate_must_win_the_final_comparison(monkeypatch):
    lucky, seen = SMALL["forward"][0], set()

    def clock(self, kernel, config):
        first = (kernel, config) not in seen
        seen.add((kernel, config))
        return 0.5 if config == lucky and first else 1.0

    monkeypatch.setattr(tune._Bench, "milliseconds", clock)
    for each in tune.tune(16, DTYPES[0], device=DEVICE, length=40, only=SMALL):
        assert each.config == each.shipped
        assert each.milliseconds == each.shipped_milliseconds == 1.0


@needs_triton
def test_times_are_measured():
    bench = tune._Bench(16, DTYPES[0], torch.device(DEVICE), 40)
    assert bench.milliseconds("key_grads", tile_sizes.shipped_config("key_grads", 16, DTYPES[0], bench.device)) > 0


@pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a GPU")
def test_tuned_sizes_are_saved_and_used_on_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "candidates", lambda kernel, itemsize: [Config(32, 32, 4, 1)])
    monkeypatch.setattr(tune, "WORTH", 100.0)
    lines = list(tune.tune_and_save([16], torch.bfloat16, 256))
    assert str(tmp_path) in lines[-1]
    assert [line.split(",")[0].strip() for line in lines[1:-1]] == list(KERNELS)
    for kernel in KERNELS:
        assert tuned.chosen_config(kernel, 16, torch.bfloat16, torch.device("cuda", 0)) in (
            Config(32, 32, 4, 1),
            tile_sizes.shipped_config(kernel, 16, torch.bfloat16, torch.device("cuda", 0)),
        )
    tuned._tuned.cache_clear()


def test_candidates_contain_every_shipped_size():
    for table, wanted in ((tile_sizes.HOPPER, (2,)), (tile_sizes.UNIVERSAL, (2, 4))):
        for (kernel, itemsize, _), config in table.items():
            if itemsize in wanted and config.block_m * config.block_n >= 32 * 32 and config.num_warps == 4:
                assert config in tune.candidates(kernel, itemsize), (kernel, config)


@pytest.mark.parametrize(
    ("arguments", "word"), [((0,), "head_dim must be 1 to 256, got 0"), ((64, torch.float64), "got float64")]
)
def test_refusals(arguments, word):
    with pytest.raises(ValueError, match=word):
        tune.tune(*arguments)


@outside
def test_in_the_interpreter():
    run_in_the_interpreter(__file__)
