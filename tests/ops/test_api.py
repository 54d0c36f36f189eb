"""Dispatch: what is asked for runs or raises, and `explain` says what would run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import affine_attention
from affine_attention import attention, attention_weights, count_visible_keys, explain
from affine_attention.ops.api import forget_plans
from affine_attention.testing import Case, make_inputs


def tensors(**changes):
    inputs = make_inputs(Case("affine_gated", **changes))
    return {name: x for name, x in inputs.tensors.items() if x is not None}, inputs.visible


def test_auto_takes_composed_on_the_cpu_and_says_why():
    given, visible = tensors()
    choice = explain(**given, **visible)
    assert choice.impl == "composed"
    assert choice.kernels == ("cpu_flash",)
    assert "cpu" in choice.reason
    assert str(choice).startswith("composed on cpu_flash: ")
    assert torch.equal(attention(**given, **visible), attention(**given, **visible, impl="composed"))


def test_what_is_asked_for_by_name_is_what_runs(monkeypatch):
    given, visible = tensors()
    forget_plans()  # a plan of an earlier test holds the functions that are replaced here
    ran = []
    for name in ("reference", "composed"):
        real = getattr(affine_attention.ops.api, f"{name}_attention")
        monkeypatch.setattr(
            affine_attention.ops.api, f"{name}_attention", lambda *a, n=name, f=real, **k: ran.append(n) or f(*a, **k)
        )
    attention(**given, **visible, impl="reference")
    attention(**given, **visible, impl="composed")
    assert ran == ["reference", "composed"]
    assert explain(**given, **visible, impl="reference").impl == "reference"
    assert explain(**given, **visible, impl="composed").reason == "asked for by name"
    forget_plans()


@pytest.mark.parametrize("function", [attention, explain])
def test_fused_raises_where_it_cannot_run(function):
    given, visible = tensors()
    with pytest.raises(ValueError, match='impl="fused" needs a CUDA GPU, got cpu tensors; use impl="composed"'):
        function(**given, **visible, impl="fused")


def test_auto_says_why_it_is_not_fused():
    given, visible = tensors()
    choice = explain(**given, **visible)
    assert choice.refused == {"fused": "needs a CUDA GPU, got cpu tensors"}
    assert "not fused: needs a CUDA GPU" in str(choice)


def test_a_gpu_without_triton_falls_to_composed(monkeypatch):
    from affine_attention.ops.fused import plan

    given, visible = tensors()
    monkeypatch.setattr(plan, "INTERPRETED", True)  # as if there were a GPU
    monkeypatch.setattr(plan, "HAS_TRITON", False)
    choice = explain(**given, **visible)
    assert choice.impl == "composed"
    assert choice.refused == {"fused": "needs Triton, which is not installed"}


def test_explain_names_the_kernel_of_masked_tiles_too():
    given, visible = tensors(visibility="causal+window")
    assert explain(**given, **visible).kernels == ("cpu_flash",)
    assert explain(**tensors(queries=0)[0]).kernels == ()


def test_weights_take_the_same_visibility():
    given, visible = tensors(visibility="causal+segments+padding")
    weights = attention_weights(given["query"], given["key"], alpha=given["alpha"], beta=given["beta"], **visible)
    assert weights.shape == (2, 4, 65, 65)
    counts = count_visible_keys(given["query"], given["key"], **visible)
    rowsum = given["alpha"] * (counts > 0) + counts * given["beta"]
    torch.testing.assert_close(weights.sum(-1), rowsum)


def test_importing_the_package_loads_neither_triton_nor_transformers():
    import subprocess
    import sys

    code = "import sys, affine_attention; print([m for m in ('triton', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_signature_is_validated_once(monkeypatch):
    from affine_attention.ops import api

    given, visible = tensors()
    forget_plans()
    seen = []
    real = api._checked_call
    monkeypatch.setattr(api, "_checked_call", lambda *arguments: seen.append(1) or real(*arguments))
    first = attention(**given, **visible)
    assert torch.equal(attention(**given, **visible), first)
    assert len(seen) == 1
    other = {name: None if x is None else x.clone() for name, x in given.items()}
    other["alpha"] = other["alpha"] * 0.5
    assert not torch.equal(attention(**other, **visible), first)
    assert len(seen) == 1
    with torch.no_grad():
        attention(**{name: None if x is None else x.detach() for name, x in given.items()}, **visible)
    attention(**given, **visible, softmax_scale=0.25)
    attention(**given | {"query": given["query"].transpose(1, 2).contiguous().transpose(1, 2)}, **visible)
    assert len(seen) >= 3
    forget_plans()


def test_values_that_compare_equal_are_told_apart():
    """True equals 1 in a key: an argument of a wrong type is refused also after a right one was seen."""
    given, _ = tensors()
    attention(**given, is_causal=True, window=1)
    with pytest.raises(TypeError, match="is_causal"):
        attention(**given, is_causal=1, window=1)
    with pytest.raises(TypeError, match="window"):
        attention(**given, is_causal=True, window=True)
    attention(**given, softmax_scale=1)
    with pytest.raises(TypeError, match="softmax_scale"):
        attention(**given, softmax_scale=True)


def test_runners_keep_no_tensor_alive():
    import gc
    import weakref

    given, visible = tensors()
    forget_plans()
    attention(**given, **visible)
    watched = [weakref.ref(x) for x in given.values() if x is not None]
    del given
    gc.collect()
    assert all(reference() is None for reference in watched)
    forget_plans()


def test_signatures_are_forgotten_rather_than_grow(monkeypatch):
    from affine_attention.ops import api

    forget_plans()
    monkeypatch.setattr(api, "MAX_SIGNATURES", 3)
    for length in range(1, 9):
        x = torch.zeros(1, 1, length, 4)
        attention(x, x, x)
        assert len(api._runners) <= 3
    forget_plans()


def test_the_first_traced_decode_finds_its_operator():
    """In a process of its own, since an earlier test may have registered the operator. GPU tensors without a GPU."""
    program = """
import torch
from torch._subclasses import FakeTensorMode
from affine_attention.ops import api
api.runs_on = lambda index: True
with FakeTensorMode(), torch.no_grad():
    query = torch.empty(1, 4, 1, 64, device="cuda", dtype=torch.bfloat16)
    key = torch.empty(1, 2, 100, 64, device="cuda", dtype=torch.bfloat16)
    row = torch.empty(1, 4, 1, device="cuda")
    mask = torch.ones(1, 100, device="cuda", dtype=torch.bool)
    out = api._run_plain_in_graph(query, key, key, row, row, None, None, mask, True, None, True)
print(tuple(out.shape))
"""
    pytest.importorskip("triton")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stdout.strip() == "(1, 4, 1, 64)", found.stderr[-2000:]
