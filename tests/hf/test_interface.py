"""The attention function and its hooks: true weights on demand, and clear words for what it cannot do."""

from __future__ import annotations

import copy
import sys
import threading
import warnings

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, LlamaForCausalLM

from affine_attention import Mechanism
from affine_attention.hf import WeightsNotice, attach, interface
from affine_attention.hf.interface import IMPLEMENTATION, MAX_READINGS, ForwardCall, affine_attention
from affine_attention.nn import PRESETS
from affine_attention.nn import attention as nn_attention

from .models import FAMILIES, SLIDING, make_model, make_tokens, mechanisms, oracle, plain_model
from .test_attach import EXACT
from .test_masks import packed_positions, padded_rows


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize("family", FAMILIES)
def test_output_attentions_are_the_true_weights(family):
    model = make_model(family, Mechanism.named("affine", bias_length=4), torch.float64)
    out = model(make_tokens(), output_attentions=True, use_cache=False)
    with oracle():
        truth = model(make_tokens(), output_attentions=True, use_cache=False)
    assert len(out.attentions) == len(truth.attentions) == 2
    for mine, theirs in zip(out.attentions, truth.attentions, strict=True):
        assert mine.shape == (2, 4, 12, 12)
        torch.testing.assert_close(mine, theirs, **EXACT)
        assert (mine < 0).any(), "affine weights may be negative, and these are"
    torch.testing.assert_close(out.logits, model(make_tokens()).logits, **EXACT)


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize("mechanism", PRESETS)
def test_weights_of_every_mechanism_with_padding_and_packing(mechanism):
    model = make_model("llama", Mechanism.named(mechanism, bias_length=4), torch.float64)
    tokens, mask = padded_rows("right")
    for inputs in (
        {"input_ids": tokens, "attention_mask": mask},
        {"input_ids": make_tokens(), "position_ids": packed_positions()},
    ):
        out = model(**inputs, output_attentions=True, use_cache=False)
        with oracle():
            truth = model(**inputs, output_attentions=True, use_cache=False)
        for mine, theirs in zip(out.attentions, truth.attentions, strict=True):
            torch.testing.assert_close(mine, theirs, **EXACT)


def test_weights_cost_a_notice_and_nothing_when_not_asked_for():
    model = make_model()
    with pytest.warns(WeightsNotice, match="a second time"):
        model(make_tokens(), output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not model(make_tokens()).attentions
    model.config.output_attentions = True
    with pytest.warns(WeightsNotice):
        assert model(make_tokens()).attentions[0].shape == (2, 4, 12, 12)


def test_our_attention_without_a_mechanism_is_an_error():
    plain = LlamaForCausalLM(plain_model().config)
    plain.config._attn_implementation = IMPLEMENTATION
    with pytest.raises(ValueError, match=r"call affine_attention.hf.attach\(model, mechanism\)"):
        plain(make_tokens())


@pytest.mark.parametrize("name", ["position_bias", "s_aux", "softcap"])
def test_what_no_mechanism_has_is_refused(name):
    model = make_model()
    module = model.model.layers[0].self_attn
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=f"{name} is not part of any mechanism, but LlamaAttention passes one"):
        affine_attention(module, query, key, key, None, affine_hidden=torch.randn(1, 3, 32), **{name: 1.0})


def test_the_hidden_state_is_what_feeds_q_proj():
    model = make_model()
    seen = {}
    layer = model.model.layers[1].self_attn
    layer.q_proj.register_forward_pre_hook(lambda module, args: seen.update(query=args[0]))
    layer.affine.scale.proj.register_forward_pre_hook(lambda module, args: seen.update(alpha=args[0]))
    model(make_tokens())
    assert seen["query"] is seen["alpha"]


def test_a_packed_row_cannot_meet_a_cache():
    model = make_model()
    segments = torch.tensor([[0, 0, 1]])
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="packed position_ids cannot be used with cached keys"):
        affine_attention(
            model.model.layers[0].self_attn, query, torch.cat([key, key], 2), torch.cat([key, key], 2),
            torch.ones(1, 1, 1, 0, dtype=torch.uint8), affine_hidden=torch.randn(1, 3, 32), affine_segments=segments,
        )  # fmt: skip


def count_calls(monkeypatch, module, name):
    """Replaces a function of a module by one that appends to the list that is returned."""
    calls, function = [], getattr(module, name)

    def counted(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


LAYERS = 6


@pytest.mark.parametrize("kind", ["plain", "padded", "packed", "own", "cached", "sliding"])
def test_a_mask_is_read_once_per_forward(kind, monkeypatch):
    """Beyond bias_length the visible keys are counted, which also happens once."""
    changes = SLIDING["qwen2"] | {"max_window_layers": 3} if kind == "sliding" else {}
    mechanism = Mechanism.named("affine", bias_length=4)
    model = make_model("qwen2", mechanism, torch.float64, num_hidden_layers=LAYERS, **changes)
    tokens, mask = padded_rows("left")
    inputs = {"input_ids": tokens, "use_cache": False}
    if kind == "padded":
        inputs["attention_mask"] = mask
    elif kind == "packed":
        inputs = {"input_ids": make_tokens(), "position_ids": packed_positions(), "use_cache": False}
    elif kind == "own":
        inputs["attention_mask"] = torch.ones(3, 1, 12, 12, dtype=torch.bool).tril()
    elif kind == "cached":
        inputs["past_key_values"] = model(tokens, use_cache=True).past_key_values
        inputs["use_cache"] = True
    reads = count_calls(monkeypatch, interface, "read_mask")
    counts = count_calls(monkeypatch, nn_attention, "count_visible_keys")
    model(**inputs)
    kinds = 2 if kind == "sliding" else 1
    assert (len(reads), len(counts)) == (kinds, kinds)
    model(**inputs)
    assert len(reads) == 2 * kinds, "the next forward reads its own mask"


def test_recomputed_layers_use_the_reading_of_their_forward(monkeypatch):
    plain = make_model(num_hidden_layers=LAYERS).train()
    checked = copy.deepcopy(plain)
    checked.gradient_checkpointing_enable({"use_reentrant": False})
    tokens, mask = padded_rows("left")
    reads = count_calls(monkeypatch, interface, "read_mask")
    for model in (plain, checked):
        model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()].sum().backward()
        assert len(reads) == 1
        reads.clear()
    for (name, a), b in zip(plain.named_parameters(), checked.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_forwards_with_other_masks_of_the_same_shape_do_not_mix():
    model = make_model(dtype=torch.float64, num_hidden_layers=3)
    tokens = make_tokens(3)
    for side in ("left", "right", "left"):
        _, mask = padded_rows(side)
        logits = model(tokens, attention_mask=mask).logits
        with oracle():
            expected = model(tokens, attention_mask=mask).logits
        torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()], **EXACT)


def test_threads_share_nothing():
    model = make_model(mechanism=Mechanism.named("affine", bias_length=4), num_hidden_layers=LAYERS)
    tokens, masks = make_tokens(3), [padded_rows(side)[1] for side in ("left", "right")]
    expected = [model(tokens, attention_mask=mask).logits.detach() for mask in masks]
    failures = []

    def work(index):
        for _ in range(10):
            with torch.no_grad():
                logits = model(tokens, attention_mask=masks[index]).logits
            if not torch.equal(logits, expected[index]):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_reading_belongs_to_its_mask_shapes_and_mechanism():
    model = make_model(num_hidden_layers=2)
    layers = mechanisms(model)
    assert layers[0].mechanism is layers[1].mechanism
    call = ForwardCall(model.config)
    query, key = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    mask = torch.ones(2, 1, 1, 6, dtype=torch.uint8)
    first = call.read(layers[0], mask, query, key, True, None)
    assert call.read(layers[1], mask, query.clone(), key.clone(), True, None) is first
    assert call.read(layers[0], mask.clone(), query, key, True, None) is not first
    assert call.read(layers[0], mask, query, key, False, None) is not first
    assert call.read(layers[0], None, query, key, True, None) is not first
    assert call.read(layers[0], None, query, torch.cat([key, key], 2), False, None).num_keys == 12
    other = make_model(mechanism=Mechanism.named("affine", bias_length=3))
    assert call.read(mechanisms(other)[0], mask, query, key, True, None) is not first
    for _ in range(3 * MAX_READINGS):
        call.read(layers[0], mask.clone(), query, key, True, None)
        assert len(call._readings) <= MAX_READINGS


def test_a_layer_with_a_configuration_of_its_own_is_checked():
    model = make_model()
    module = model.model.layers[1].self_attn
    module.config = copy.deepcopy(module.config)
    model(make_tokens())
    module.config = plain_model().config
    with pytest.raises(ValueError, match="while a mechanism is attached, got 'sdpa'"):
        model(make_tokens())


def test_compiled_layers_are_compiled_once(monkeypatch):
    """The shared object is a new one in every forward; graphs must not depend on it."""
    from accelerate.utils import compile_regions

    torch._dynamo.reset()
    model = make_model(num_hidden_layers=3).train()
    call = compile_regions(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    tokens, mask = padded_rows("left")
    call(tokens, attention_mask=mask, use_cache=False).logits.sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            tokens = make_tokens(3, seed=seed)
            logits = call(tokens, attention_mask=mask.clone(), use_cache=False).logits
            expected = model(tokens, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(logits[mask.bool()], expected[mask.bool()])


def python_calls(function) -> int:
    """Python functions that a call enters, those of this file not counted."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename != __file__

    function()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def plain_operator(query, key, value, *, alpha, beta, softmax_scale, is_causal, **_):
    """One call of PyTorch's attention in the operator's place: what is counted is the path to the operator."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=softmax_scale, enable_gqa=True
    )
    out = out if alpha is None else out * alpha[..., None]
    return out if beta is None else out + beta[..., None]


def train_step(model):
    model(make_tokens(), use_cache=False).logits.sum().backward()


def decode_step(model):
    """A prompt and one step."""
    with torch.no_grad():
        past = DynamicCache(config=model.config)
        model(make_tokens(), past_key_values=past)
        model(make_tokens(2, 1), past_key_values=past)


def calls_per_layer(mechanism, step) -> float:
    counts = []
    for layers in (2, 6):
        model = plain_model(num_hidden_layers=layers)
        if mechanism is not None:
            attach(model, mechanism)
        model.train(step is train_step)
        counts.append(python_calls(lambda model=model: step(model)))
    return (counts[1] - counts[0]) / 4


@pytest.mark.parametrize(
    ("mechanism", "training", "decoding"),  # Python calls per layer beyond plain sdpa
    [("softmax", 0, 0), ("affine", 30, 20), ("affine_gated", 36, 26), ("sink", 9, 11)],
)
def test_python_calls_per_layer_stay_within_a_budget(mechanism, training, decoding, monkeypatch):
    monkeypatch.setattr(interface, "attention", plain_operator)
    assert calls_per_layer(mechanism, train_step) <= calls_per_layer(None, train_step) + training
    assert calls_per_layer(mechanism, decode_step) <= calls_per_layer(None, decode_step) + 2 * decoding


@pytest.fixture
def stub_of_a_gpu(monkeypatch):
    """Tensors that say they are on a Hopper GPU, and launches that do nothing: what is left is the host's work."""
    pytest.importorskip("triton")
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    from affine_attention.ops import api
    from affine_attention.ops.fused import projected
    from affine_attention.ops.fused.plan import Route
    from affine_attention.ops.fused.shared.launch import LaunchSet

    def choose_route(call, needs_gradient):
        if call.rows.is_plain:
            return Route("sdpa", "sdpa", "output", "named by a test")
        return Route("hopper", "hopper", "softmax output", "named by a test", shift=True)

    torch.overrides.get_overridable_functions()  # reads is_cuda, and keeps what it has read
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(TensorVariable, "method_attr_is_cuda", lambda *_: ConstantVariable.create(True))
    monkeypatch.setattr(api, "runs_on", lambda device: True)
    monkeypatch.setattr(api, "why_not_fused", lambda call: None)
    monkeypatch.setattr(projected, "_has_kernels", lambda dtype, device: True)
    for module in (api, projected):
        monkeypatch.setattr(module, "choose_route", choose_route)
    monkeypatch.setattr(LaunchSet, "run", lambda *_: None)
    monkeypatch.setattr(LaunchSet, "values", lambda self, tensors, *buffers: [])
    api._runners.clear(), api._plain_calls.clear(), projected._plans.clear()
    yield
    api._runners.clear(), api._plain_calls.clear(), projected._plans.clear()


def model_with_served_heads(mechanism, layers):
    model = plain_model("llama", torch.bfloat16, num_hidden_layers=layers, hidden_size=256, head_dim=64)
    return (model if mechanism is None else attach(model, Mechanism.named(mechanism))).train()


@pytest.mark.parametrize(("mechanism", "forward", "backward"), [("softmax", 0, 0), ("affine", 21, 8)])
def test_python_calls_of_a_training_step_on_a_gpu(mechanism, forward, backward, stub_of_a_gpu):
    """Per layer, beyond plain sdpa."""

    def counted(mechanism):
        counts = []
        for layers in (2, 6):
            model = model_with_served_heads(mechanism, layers)
            loss = model(make_tokens(), use_cache=False).logits.sum()
            steps = (
                lambda model=model: model(make_tokens(), use_cache=False),
                lambda loss=loss: loss.backward(retain_graph=True),
            )
            counts.append([python_calls(step) for step in steps])
        return [(more - few) / 4 for few, more in zip(*counts, strict=True)]

    plain, found = counted(None), counted(mechanism)
    assert found[0] <= plain[0] + forward
    assert found[1] <= plain[1] + backward


@pytest.mark.parametrize(("mechanism", "budget"), [("softmax", 12), ("affine", 108)])
def test_guards_of_a_compiled_layer_on_a_gpu(mechanism, budget, stub_of_a_gpu):
    """What each call of a compiled layer checks, beyond plain sdpa; the graph of softmax is that of plain sdpa."""

    class Compiled(Exception):
        pass

    def compiled(mechanism):
        torch._dynamo.reset()
        guards, graphs = [], []

        def keep_all(entries):
            guards.append(len(entries))
            return [True] * len(entries)

        def backend(graph, example_inputs):
            def run(*_):
                raise Compiled

            graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
            return run

        model = model_with_served_heads(mechanism, 1)
        for layer in model.model.layers:
            layer.compile(dynamic=False, fullgraph=True, backend=backend, options={"guard_filter_fn": keep_all})
        with pytest.raises(Compiled):
            model(make_tokens(), use_cache=False)
        torch._dynamo.reset()
        return guards[0], graphs[0]

    (guards, nodes), (plain_guards, plain_nodes) = compiled(mechanism), compiled(None)
    assert guards <= plain_guards + budget
    if mechanism == "softmax":
        # In transformers 5.23, plain sdpa has one more node: it reshapes its output to the shape that it has.
        reshapes = 0 if Version(transformers.__version__) < Version("5.18") else 1
        assert plain_nodes - reshapes <= nodes <= plain_nodes


def test_an_attention_module_is_not_compiled_outside_of_its_decoder():
    for mechanism in ("softmax", "affine"):
        model = make_model(mechanism=mechanism)
        module = model.model.layers[0].self_attn
        hidden = torch.randn(1, 3, 32)
        positions = model.model.rotary_emb(hidden, torch.arange(3)[None])
        module(hidden, position_embeddings=positions, attention_mask=None)
        module.compile(backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="compile the decoder layers or the model"):
            module(hidden, position_embeddings=positions, attention_mask=None)
    torch._dynamo.reset()


def test_plain_softmax_computes_no_coefficients(monkeypatch):
    model = make_model(mechanism="softmax")
    assert all(layer.is_plain for layer in mechanisms(model))
    monkeypatch.setattr(nn_attention.AttentionMechanism, "rows", lambda *_: pytest.fail("coefficients were computed"))
    reads = count_calls(monkeypatch, interface, "read_mask")
    out = model(make_tokens()).logits
    assert not reads, "a causal call without a mask has nothing to read"
    torch.testing.assert_close(out, plain_model()(make_tokens()).logits)
    tokens, mask = padded_rows("left")
    model(tokens, attention_mask=mask)
    assert len(reads) == 1
