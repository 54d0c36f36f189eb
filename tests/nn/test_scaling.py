"""alpha, beta, and the running average: exact under checkpointing, accumulation, dtypes, loading and compilation."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from affine_attention import (
    AffineScale,
    Mechanism,
    commit_after_step,
    commit_running_alpha,
    discard_running_alpha,
    linear_clipping,
)
from affine_attention.nn import commit
from affine_attention.nn.commit import affine_scales
from affine_attention.nn.scaling import _is_plain_linear

from .models import TinyLM, make_tokens, running_alphas, summed_loss


def make_scale(**settings) -> AffineScale:
    torch.manual_seed(0)
    return AffineScale(Mechanism.named("affine", **settings), 16, 4)


def train(model, batches, steps=3, optimizer=None):
    """A plain loop: backward over micro-batches, step, commit."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(sum(summed_loss_and_backward(model, *batch) for batch in batches))
        optimizer.step()
        commit_running_alpha(model)
    return losses


def summed_loss_and_backward(model, tokens, mask=None):
    loss = summed_loss(model, tokens, mask)
    loss.backward()
    return loss.item()


def test_linear_clipping_is_equation_11():
    x = torch.tensor([-9.0, -5.0, -2.0, 0.0, 3.0, 5.0, 9.0])
    torch.testing.assert_close(linear_clipping(x), torch.tensor([0.0, 0.0, 0.3, 0.5, 0.8, 1.0, 1.0]))


@pytest.mark.parametrize("activation", ["linear_clipping", "sigmoid"])
def test_alpha_and_beta_are_equations_7_and_8(activation):
    scale = make_scale(activation=activation, running_alpha_start=0.3)
    hidden = torch.randn(2, 5, 16) * 40
    alpha, beta = scale(hidden, 10)
    phi = linear_clipping if activation == "linear_clipping" else torch.sigmoid
    torch.testing.assert_close(alpha, phi(hidden @ scale.proj.weight.T).transpose(1, 2))
    torch.testing.assert_close(beta, (0.3 - alpha) / 10)
    assert alpha.shape == (2, 4, 5)


def test_gradient_flows_through_both_alphas_but_not_the_running_one():
    scale = make_scale()
    alpha, beta = scale(torch.randn(1, 3, 16), 10)
    assert not scale.running_alpha.requires_grad
    (grad,) = torch.autograd.grad(beta.sum(), [alpha], retain_graph=True)
    torch.testing.assert_close(grad, torch.full_like(alpha, -0.1))


def test_commit_is_equation_9_over_real_tokens_only():
    scale = make_scale(momentum=0.75, running_alpha_start=0.2)
    hidden = torch.randn(2, 5, 16)
    mask = torch.tensor([[True] * 5, [False, False, False, True, True]])
    hidden[~mask] = torch.nan  # padding may hold anything
    alpha, _ = scale(hidden, 10, mask)
    alpha.transpose(1, 2)[mask].sum().backward()
    commit_running_alpha(scale)
    mean = alpha.detach().transpose(1, 2)[mask].mean(0)
    torch.testing.assert_close(scale.running_alpha, 0.75 * 0.2 + 0.25 * mean)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    torch.manual_seed(0)
    plain = TinyLM("affine_gated")
    checked = copy.deepcopy(plain)
    checked.reentrant = reentrant
    batches = [(make_tokens(),)]
    assert train(plain, batches) == train(checked, batches)
    assert torch.equal(running_alphas(plain), running_alphas(checked))
    for a, b in zip(plain.parameters(), checked.parameters(), strict=True):
        if reentrant:  # PyTorch adds the gradients of a shared input in another order there
            torch.testing.assert_close(a.grad, b.grad)
        else:
            assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_micro_batches_equal_one_batch(parts):
    torch.manual_seed(0)
    whole = TinyLM()
    split = copy.deepcopy(whole)
    tokens = make_tokens()
    mask = torch.arange(12)[None] >= torch.arange(8)[:, None]  # ragged: micro-batches have unequal counts
    train(whole, [(tokens, mask)])
    train(split, list(zip(tokens.chunk(parts), mask.chunk(parts), strict=True)))
    torch.testing.assert_close(running_alphas(split), running_alphas(whole), rtol=1e-6, atol=1e-7)
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_only_training_with_a_backward_moves_it():
    model = TinyLM(Mechanism.named("affine", running_alpha_start=0.4))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    tokens = make_tokens()
    model.eval()
    summed_loss(model, tokens).backward()
    commit_running_alpha(model)
    model.train()
    with torch.no_grad():
        model(tokens)
    commit_running_alpha(model)
    model(tokens)  # a forward without a backward is no part of a step
    commit_running_alpha(model)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def test_forward_does_not_see_the_batch_it_is_in():
    """The average of the last step is read; tokens of this batch must not reach each other through it."""
    model = TinyLM()
    tokens = make_tokens()
    alone = model(tokens[:1])
    torch.testing.assert_close(model(tokens)[:1], alone)


def test_a_skipped_step_does_not_commit():
    model = TinyLM()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    handle = commit_after_step(model, optimizer)
    summed_loss(model, make_tokens()).backward()
    discard_running_alpha(model)  # what to call where a GradScaler skips the step
    optimizer.zero_grad()
    assert torch.equal(running_alphas(model), torch.zeros(8))
    summed_loss(model, make_tokens(seed=1)).backward()
    optimizer.step()
    once = running_alphas(model).clone()
    assert (once > 0).all()
    commit_running_alpha(model)
    assert torch.equal(running_alphas(model), once), "a commit without a backward must change nothing"
    handle.remove()
    summed_loss(model, make_tokens()).backward()
    optimizer.step()
    assert torch.equal(running_alphas(model), once), "the hook was removed"


def test_a_scaled_loss_does_not_scale_the_average():
    torch.manual_seed(0)
    plain = TinyLM()
    scaled = copy.deepcopy(plain)
    tokens = make_tokens()
    summed_loss(plain, tokens).backward()
    (summed_loss(scaled, tokens) * 65536).backward()
    commit_running_alpha(plain)
    commit_running_alpha(scaled)
    assert torch.equal(running_alphas(plain), running_alphas(scaled))


def test_an_overflow_keeps_the_last_average():
    scale = make_scale(running_alpha_start=0.5)
    alpha, _ = scale(torch.full((1, 2, 16), torch.nan), 10)
    alpha.sum().backward()
    commit_running_alpha(scale)
    assert torch.equal(scale.running_alpha, torch.full((4,), 0.5))


class Layers(nn.Module):
    """Averages of several sizes and momenta, each with sums collected by hand."""

    def __init__(self, count: int = 12):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scales = nn.ModuleList()
        for index in range(count):
            settings = Mechanism.named("affine", momentum=(0.9, 0.9, 0.75)[index % 3])
            scale = AffineScale(settings, 8, (4, 7, 4, 1)[index % 4])
            scale.running_alpha.uniform_(0, 1, generator=generator)
            heads = len(scale.running_alpha)
            tokens = torch.randint(1, 5000, (1,), generator=generator)
            total = tokens * torch.rand(heads, generator=generator, dtype=torch.float64)
            scale.collected.grad = torch.cat([total, tokens.double()])
            self.scales.append(scale)


def committed_layer_by_layer(model) -> list[torch.Tensor]:
    """Eq. 9 for each layer alone."""
    averages = []
    for scale in affine_scales(model):
        running, rho = scale.running_alpha, scale.mechanism.momentum
        part = torch.zeros_like(scale.collected) if scale.collected.grad is None else scale.collected.grad
        total, count = part[:-1], part[-1]
        mean = (total / count).to(running.dtype)
        seen = (count > 0) & torch.isfinite(mean).all()
        averages.append(torch.where(seen, rho * running + (1 - rho) * mean, running))
    return averages


def test_one_update_for_all_layers_is_bitwise_that_of_each():
    model = Layers()
    scales = model.scales
    scales[0].collected.grad = None  # no backward reached it
    scales[1].collected.grad.zero_()  # no real token
    scales[2].collected.grad[1] = torch.nan
    scales[3].collected.grad[0] = torch.inf
    scales[4].collected.grad[0] = -torch.inf
    kept = [scale.running_alpha.clone() for scale in scales[:5]]
    expected = [average.clone() for average in committed_layer_by_layer(model)]
    buffers = [scale.running_alpha for scale in scales]
    commit_running_alpha(model)
    for index, scale in enumerate(scales):
        assert torch.equal(scale.running_alpha, expected[index])
        assert scale.running_alpha is buffers[index], "updated in place"
        assert scale.running_alpha.dtype == torch.float32
        assert scale.collected.grad is None
    for scale, before in zip(scales[:5], kept, strict=True):
        assert torch.equal(scale.running_alpha, before)


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_depend_on_the_number_of_layers():
    counts = []
    for count in (12, 120):
        model = Layers(count)
        with CountOperations() as operations:
            commit_running_alpha(model)
        counts.append(len(operations.names))
        assert not any("local_scalar_dense" in name or "item" in name for name in operations.names), "no host sync"
    assert counts[0] == counts[1]
    with CountOperations() as operations:
        commit_running_alpha(model)
    assert not operations.names, "nothing was collected"


def test_the_search_finds_what_modules_finds_in_its_order():
    model = TinyLM("affine")
    model.again = model.layers[0]  # a module that is shared counts once
    model.nothing = None
    model.register_module("none", None)
    model.cycle = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    model.cycle[0].append(model.cycle)
    model.other = nn.Sequential(AffineScale(Mechanism.named("head_gated"), 8, 2), make_scale())
    expected = [m for m in model.modules() if isinstance(m, AffineScale) and m.mechanism.bias]
    found = affine_scales(model)
    assert len(found) == len(expected) == 3
    assert all(a is b for a, b in zip(found, expected, strict=True))
    assert affine_scales(found[0]) == [found[0]]


OLDER = make_scale()  # was in a model before


def collect_one(model):
    """What a backward leaves: sums of alpha whose mean is 1."""
    for scale in affine_scales(model):
        scale.collected.grad = torch.ones_like(scale.collected)


def is_committed(model):
    """Whether a commit after `collect_one` updates every scale of a model, and no other."""
    scales, every = affine_scales(model), commit._all_scales()
    for scale in every:
        scale.running_alpha.zero_()
    collect_one(model)
    commit_running_alpha(model)
    moved = [scale for scale in every if scale.running_alpha.any()]
    return set(moved) == set(scales) and all(scale.collected.grad is None for scale in scales)


def test_a_commit_searches_the_modules_once():
    model, searches = TinyLM("affine", layers=3), []
    with pytest.MonkeyPatch.context() as patch:
        find = commit._find_scales
        patch.setattr(commit, "_find_scales", lambda model: searches.append(model) or find(model))
        for _ in range(3):
            for scale in commit._all_scales():
                scale.discard_collected()
            for layer in model.layers:
                layer.mechanism.scale.collected.grad = torch.ones(5, dtype=torch.float64)
            commit_running_alpha(model)
        model.to(torch.bfloat16)
        model.load_state_dict(model.state_dict())
        commit_running_alpha(model)
    assert searches == [model]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.layers.append(copy.deepcopy(model.layers[0])),
        lambda model: model.layers.insert(0, copy.deepcopy(model.layers[0])),
        lambda model: model.layers.__delitem__(1),
        lambda model: model.layers.__setitem__(1, nn.Identity()),
        lambda model: model.layers.__setitem__(1, copy.deepcopy(model.layers[1])),
        lambda model: model.layers.__setitem__(1, model.layers[0]),
        lambda model: setattr(model, "layers", nn.Sequential(model.layers)),
        lambda model: setattr(model, "again", model.layers[0]),
        lambda model: setattr(model, "other", make_scale()),
        lambda model: model.empty.append(OLDER),
        lambda model: setattr(model.layers[0], "mechanism", None),
        lambda model: model.layers[2].mechanism._modules.pop("scale"),
        lambda model: model.to(torch.float64),
        lambda model: model.to_empty(device="meta"),
    ],
)
def test_a_commit_follows_a_model_that_changes(change):
    model = TinyLM("affine", layers=3)
    model.empty = nn.ModuleList()
    model.empty.append(OLDER)
    assert is_committed(model)
    model.empty.pop(0)
    assert is_committed(model)
    change(model)
    if next(model.parameters()).is_meta:
        model.to_empty(device="cpu")
    assert is_committed(model)
    assert is_committed(model)


def test_two_models_are_committed_each_by_itself():
    first, second = TinyLM("affine"), TinyLM("affine", layers=4)
    for model in (first, second, first, second):
        assert is_committed(model)
    collect_one(first)
    collect_one(second)
    commit_running_alpha(first)
    assert all(scale.collected.grad is None for scale in affine_scales(first))
    assert all(scale.collected.grad is not None for scale in affine_scales(second))


def test_the_search_keeps_no_model_alive():
    model = TinyLM("affine")
    model.layers[0].around = [model]  # a cycle
    commit_running_alpha(model)
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_stays_fp32_and_exact_when_the_model_changes_dtype(dtype):
    model = TinyLM()
    train(model, [(make_tokens(),)])
    before = running_alphas(model)
    summed_loss(model, make_tokens()).backward()
    pending = model.layers[0].mechanism.scale.collected.grad.clone()
    model.to(dtype)
    scale = model.layers[0].mechanism.scale
    assert scale.proj.weight.dtype == dtype
    assert running_alphas(model).dtype == torch.float32
    assert torch.equal(running_alphas(model), before)
    assert scale.collected.is_leaf
    assert torch.equal(scale.collected.grad, pending), "what was collected must survive a move"


def test_a_bf16_model_still_moves_it_by_small_steps():
    scale = make_scale(momentum=0.99, running_alpha_start=0.5).bfloat16()
    scale.proj.weight.data.zero_()
    scale.proj.weight.data[:, 0] = 0.0625  # alpha = 0.50625; a bf16 buffer would stall
    hidden = torch.zeros(1, 2, 16, dtype=torch.bfloat16)
    hidden[..., 0] = 1
    for _ in range(200):
        scale(hidden, 10)[0].sum().backward()
        commit_running_alpha(scale)
    expected = 0.50625 - 0.00625 * 0.99**200
    torch.testing.assert_close(scale.running_alpha, torch.full((4,), expected), rtol=1e-5, atol=0)


def test_autocast_keeps_rows_in_fp32():
    scale = make_scale()
    with torch.autocast("cpu", torch.bfloat16):
        alpha, beta = scale(torch.randn(2, 5, 16), 10)
        alpha.sum().backward()
    assert alpha.dtype == beta.dtype == torch.float32
    commit_running_alpha(scale)
    assert scale.running_alpha.dtype == torch.float32


def test_a_checkpoint_without_it_is_an_error():
    state = TinyLM().state_dict()
    del state["layers.1.mechanism.scale.running_alpha"]
    with pytest.raises(ValueError, match=r"layers\.1\.mechanism\.scale\.running_alpha"):
        TinyLM().load_state_dict(state, strict=False)


def test_state_dict_holds_it_and_nothing_of_the_step():
    model = TinyLM()
    train(model, [(make_tokens(),)])
    names = [name for name in model.state_dict() if "scale" in name]
    assert names == [f"layers.{i}.mechanism.scale.{x}" for i in range(2) for x in ("running_alpha", "proj.weight")]
    loaded = TinyLM()
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(running_alphas(loaded), running_alphas(model))


@pytest.mark.parametrize("assign", [False, True])
def test_meta_device_init_and_load_restore_it(assign):
    source = TinyLM()
    train(source, [(make_tokens(),)])
    with torch.device("meta"):
        model = TinyLM()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict(), assign=assign)
    tokens = make_tokens(seed=5)
    for each in (source, model):
        each.zero_grad()
        summed_loss(each, tokens).backward()
        commit_running_alpha(each)
    assert torch.equal(running_alphas(model), running_alphas(source))


def test_reset_parameters_restores_the_start():
    scale = make_scale(running_alpha_start=0.25)
    scale(torch.randn(1, 2, 16), 10)[0].sum().backward()
    commit_running_alpha(scale)
    scale.reset_parameters()
    assert torch.equal(scale.running_alpha, torch.full((4,), 0.25))
    assert abs(scale.proj.weight.std().item() - 0.02) < 0.008


def test_copies_are_independent():
    model = TinyLM()
    summed_loss(model, make_tokens()).backward()
    twin = copy.deepcopy(model)
    commit_running_alpha(model)
    assert torch.equal(running_alphas(twin), torch.zeros(8))
    commit_running_alpha(twin)
    assert torch.equal(running_alphas(twin), running_alphas(model))


def test_compiles_without_a_break_and_collects_the_same():
    torch.manual_seed(0)
    eager = TinyLM("affine_gated")
    traced = copy.deepcopy(eager)
    torch._dynamo.reset()
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(traced.parameters(), 0.01)
    commit_after_step(traced, optimizer)
    train(eager, [(make_tokens(),)])
    for _ in range(3):
        optimizer.zero_grad()
        summed_loss(compiled, make_tokens()).backward()
        optimizer.step()
    assert torch.equal(running_alphas(traced), running_alphas(eager))


def test_frozen_parameters_do_not_stop_it():
    """Adapters train while W_a is frozen: the average still follows alpha."""
    model = TinyLM()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "head.weight")
    summed_loss(model, make_tokens()).backward()
    commit_running_alpha(model)
    assert (running_alphas(model) > 0).all()


def test_it_is_no_parameter_and_no_part_of_the_gradient_norm():
    model = TinyLM()
    summed_loss(model, make_tokens()).backward()
    assert all("collected" not in name for name, _ in model.named_parameters())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    by_hand = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(norm, by_hand)


def test_words_for_wrong_calls():
    with pytest.raises(ValueError, match="needs a mechanism with an alpha, got 'sink'"):
        AffineScale(Mechanism.named("sink"), 16, 4)
    with pytest.raises(ValueError, match="num_keys is missing"):
        make_scale()(torch.randn(1, 2, 16))
    commit_running_alpha(nn.Linear(2, 2))  # nothing to do is no error


def test_devices_without_fp64_collect_in_fp32(monkeypatch):
    """Apple's GPUs have no fp64. No tensor of fp64 may be moved to one, nor created on one."""
    from affine_attention.nn import scaling

    assert scaling.sum_dtype(torch.device("mps")) == torch.float32
    assert scaling.sum_dtype(torch.device("cpu")) == torch.float64
    monkeypatch.setattr(scaling, "sum_dtype", lambda device: torch.float32)
    scale = AffineScale(Mechanism.named("affine"), 8, 2)
    assert scale.collected.dtype == torch.float32

    def refuse_fp64(x):
        assert x.dtype != torch.float64
        return x

    scale._apply(refuse_fp64)
    hidden = torch.randn(2, 3, 8)
    scale.train()(hidden, 16)[0].sum().backward()
    assert scale.collected.grad.dtype == torch.float32
    before = scale.running_alpha.clone()
    commit_running_alpha(scale)
    assert not torch.equal(scale.running_alpha, before)


def test_a_subclass_of_linear_takes_the_fused_paths_if_it_computes_the_same():
    class Same(torch.nn.Linear):
        pass

    class Other(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    hidden = torch.randn(2, 3, 8)
    assert _is_plain_linear(Same(8, 4, bias=False), hidden)
    assert not _is_plain_linear(Other(8, 4, bias=False), hidden)
    scale = AffineScale(Mechanism.named("affine_free"), 8, 4)
    alpha, beta = scale(hidden, 5)
    for kind, equal in ((Same, True), (Other, False)):
        scale.beta_proj.__class__ = kind
        same_alpha, same_beta = scale(hidden, 5)
        torch.testing.assert_close(same_alpha, alpha)
        assert torch.allclose(same_beta, beta) == equal
