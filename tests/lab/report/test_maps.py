import base64

import numpy as np
import pytest

from affine_attention.lab.report import maps
from affine_attention.lab.report.collect import load_runs
from affine_attention.lab.report.groups import group_runs
from affine_attention.lab.report.maps import pack, packed_maps

from .folders import make_run


def unpacked(entry):
    """The weights as the page's script reads them: [layers][heads, n, n]."""
    n = entry["length"]
    rows, columns = np.tril_indices(n) if entry["causal"] else np.indices((n, n)).reshape(2, -1)
    numbers = np.frombuffer(base64.b64decode(entry["data"]), dtype=f"<i{entry['bits'] // 8}").astype(np.float64)
    top, found, start = 2 ** (entry["bits"] - 1) - 1, [], 0
    for scales in entry["scales"]:
        part = numbers[start : start + len(scales) * len(rows)].reshape(len(scales), -1)
        start += part.size
        weights = np.zeros((len(scales), n, n))
        weights[:, rows, columns] = np.sign(part) * np.array(scales)[:, None] * (part / top) ** 2
        found.append(weights)
    assert start == numbers.size
    return found


def causal(random, heads, n):
    return np.tril(random.standard_normal((heads, n, n)) ** 3 / 10).astype(np.float32)


@pytest.mark.parametrize(("share", "bits"), [(10**7, 16), (10_000, 8)])
def test_weights_come_back_signed_and_close(share, bits):
    random = np.random.default_rng(0)
    given = {3: causal(random, 4, 40), 5: causal(random, 4, 40)}
    entry = pack(given, ["a", "b"], share)
    assert entry["bits"] == bits
    assert entry["layers"] == [3, 5]
    n = entry["length"]
    for weights, back in zip(given.values(), unpacked(entry), strict=True):
        part = weights[:, :n, :n]
        near = np.abs(part) > 1e-3 * np.abs(part).max()
        # Half a step of q moves s (q / top)² by sqrt(s w) / top; s is at most the largest weight of the layer.
        step = np.sqrt(np.abs(part) * np.abs(part).max()) / (2 ** (bits - 1) - 1)
        assert np.all(np.abs(back - part)[near] <= 1.2 * step[near])
        assert np.array_equal(np.sign(back)[near], np.sign(part)[near])


def test_what_is_above_the_diagonal_is_not_lost():
    weights = np.random.default_rng(0).standard_normal((2, 5, 5)).astype(np.float32)
    entry = pack({0: weights}, [], 10**6)
    assert not entry["causal"]
    assert np.allclose(unpacked(entry)[0], weights, rtol=1e-3, atol=1e-3)


def test_zeros_and_nan_are_zero():
    weights = np.zeros((1, 3, 3), dtype=np.float32)
    weights[0, 2, 1] = np.nan
    assert np.array_equal(unpacked(pack({0: weights}, [], 1000))[0], np.zeros((1, 3, 3)))


def test_tokens_are_made_visible_and_as_many_as_rows():
    entry = pack({0: np.zeros((1, 4, 4), dtype=np.float32)}, ["</script>", "\0", "x" * 10_000], 1000)
    assert entry["tokens"] == ["</script>", "⟨U+0000⟩", "x" * 79 + "… (10,000 characters)", ""]


def test_a_small_share_takes_bits_then_tokens_then_layers():
    random = np.random.default_rng(0)
    given = {layer: causal(random, 8, 64) for layer in range(10)}
    cells = 30 * 31 // 2 * 8
    assert pack(given, [], 10**7)["length"] == 64
    assert (pack(given, [], 10 * cells)["length"], pack(given, [], 10 * cells)["bits"]) == (30, 8)
    few = pack(given, [], 3 * cells)
    assert few["layers"] == [0, 4, 9]
    assert len(base64.b64decode(few["data"])) == 3 * cells


def test_eight_large_runs_stay_within_the_budget(tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "BUDGET", 60_000)
    folders = [
        make_run(tmp_path / f"{n}{s}", n, s, steps=2, layers=6, heads=8) for n in ("softmax", "affine") for s in (0, 1)
    ]
    groups = group_runs(load_runs(folders))
    packed, notes = packed_maps(groups)
    assert [entry["group"] for entry in packed] == [0, 1], "the first seed of each group"
    assert sum(len(base64.b64decode(entry["data"])) for entry in packed) <= 60_000
    assert any("first seed" in note for note in notes)


def test_runs_without_maps(tmp_path):
    assert packed_maps(group_runs(load_runs(make_run(tmp_path / "a", inspected=False)))) == ([], [])
