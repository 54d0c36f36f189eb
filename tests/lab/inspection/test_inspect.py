"""inspection.json: each figure's numbers equal those of dense fp64 weights, for runs, checkpoints and models."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from affine_attention import Mechanism
from affine_attention.files import write_json
from affine_attention.lab.data import train_tokenizer
from affine_attention.lab.inspection import metrics
from affine_attention.lab.inspection.capture import watch
from affine_attention.lab.inspection.inspect import format_inspection, inspect
from affine_attention.lab.inspection.tally import ENTROPY_EDGES, SHARE_EDGES
from affine_attention.lab.recipe import Recipe
from benchmarks.inspect import inspect_layer
from tests.hf.models import SLIDING, WINDOW, make_model, mechanisms, plain_model, running_alphas
from tests.nn.models import TinyLM

DOCUMENTS = [f"Story {n}. " + "The cat sat on the mat and the dog saw it. " * n for n in range(1, 12)]
LENGTH, SEQUENCES, VOCABULARY = 40, 3, 300


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(DOCUMENTS, VOCABULARY)


def tiny(mechanism="affine", family="llama", dtype=torch.float64, **changes):
    return make_model(family, Mechanism.named(mechanism, bias_length=16), dtype, vocab_size=VOCABULARY, **changes)


def stream(tokenizer):
    """The ids of all documents, one after the other."""
    end = tokenizer.eos_token_id
    return torch.tensor([i for text in DOCUMENTS for i in [*tokenizer(text)["input_ids"], end]])


def entropy(share):
    return -torch.special.xlogy(share, share).sum(-1)


def close(mine, truth):
    torch.testing.assert_close(torch.tensor(mine, dtype=torch.float64), truth.double(), rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
@pytest.mark.parametrize(
    ("mechanism", "family"),
    [("softmax", "llama"), ("sink", "llama"), ("affine", "llama"), ("affine_gated", "llama"), ("gated", "llama"),
     ("affine", "qwen2"), ("sink", "gpt2")],
)  # fmt: skip
def test_every_figure_equals_the_dense_weights(mechanism, family, tokenizer, monkeypatch):
    """In blocks of a few rows, so that the blocks are part of what is tested."""
    monkeypatch.setitem(metrics.BLOCK_SCORES, "cpu", 512)
    model = tiny(mechanism, family, **SLIDING.get(family, {}))
    result = inspect(model, text=DOCUMENTS, tokenizer=tokenizer, sequences=SEQUENCES, length=LENGTH, map_length=9)
    json.dumps(result, allow_nan=False)
    assert (result["sequences"], result["length"], result["layers"], result["heads"]) == (SEQUENCES, LENGTH, 2, 4)
    assert result["missing"] == []
    ids = stream(tokenizer)[: SEQUENCES * LENGTH].view(SEQUENCES, LENGTH)
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True, use_cache=False).attentions)  # [L, B, H, T, T]
    window = WINDOW if family == "qwen2" else LENGTH  # of the second layer
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]
    seen = torch.stack([distance >= 0, (distance >= 0) & (distance < window)])[:, None, None]

    sums = weights.sum(-1)
    close(result["row_sum"]["mean"], sums.mean((1, 3)))
    close(result["row_sum"]["std"], sums.transpose(1, 2).flatten(2).std(-1, correction=0))
    close(result["total_weight"]["mean"], sums.mean((1, 3)))
    absolute = weights.abs().sum(-1)
    close(result["total_weight"]["absolute"], absolute.mean((1, 3)))
    over = sums.mean(2).flatten(1)
    truth = {"mean": over.mean(1), "std": over.std(1, correction=0), "median": over.quantile(0.5, dim=1)}
    for name, numbers in truth.items():
        close(result["row_sum"]["over_heads"][name], numbers)
    counts = torch.tensor(result["row_sum"]["histogram"]["counts"])
    assert counts.shape == (2, 4, len(SHARE_EDGES) - 1)
    for layer, head in ((0, 0), (1, 3)):
        truth = torch.histogram(sums[layer, :, head].flatten().clamp(0, 1), SHARE_EDGES)[0]
        assert counts[layer, head].tolist() == truth.tolist()

    close(result["first_token"]["mean"], weights[..., 0].mean((1, 3)))
    close(result["first_token"]["uniform"], (seen[..., 0].double() / seen.sum(-1)).mean(-1)[:, 0].expand(-1, 4))
    close(result["entropy"]["weights"], entropy(weights.abs() / absolute[..., None]).mean((1, 3)))
    close(result["entropy"]["negative_mass"], (-weights.clamp(max=0).sum(-1) / absolute).mean((1, 3)))
    scores = scores_of(model, ids)
    close(result["entropy"]["softmax"], entropy(scores.masked_fill(~seen, -torch.inf).softmax(-1)).mean((1, 3)))
    close(result["mean_logit"], (scores * seen).sum((1, 3, 4)) / (seen.sum((3, 4)) * SEQUENCES)[:, :, 0])
    assert torch.tensor(result["entropy"]["histogram"]["softmax"]).sum(-1).eq(SEQUENCES * LENGTH).all()

    alphas, gates = coefficients_of(model, ids)
    if alphas is None:
        assert result["alpha"] is result["running_alpha"] is None
    else:
        close(result["alpha"]["mean"], alphas.mean((1, 3)))
        of_heads = alphas.transpose(1, 2).flatten(2)  # [L, H, B T]
        close(result["alpha"]["within_heads"], of_heads.var(-1, correction=0).mean(-1).sqrt())
        close(result["alpha"]["between_heads"], of_heads.mean(-1).std(-1, correction=0))
        close(result["alpha"]["saturated_low"], (alphas == 0).double().mean((1, 3)))
        close(result["alpha"]["saturated_high"], (alphas == 1).double().mean((1, 3)))
        close(result["running_alpha"], running_alphas(model).view(2, 4))
    if gates is None:
        assert result["gate"] is None
    else:
        close(result["gate"]["mean"], gates.flatten(1).mean(1))
        close(result["gate"]["saturated"], ((gates < 0.01) | (gates > 0.99)).double().flatten(1).mean(1))
    assert result["maps"]["layers"] == [0, 1]
    assert "".join(result["maps"]["tokens"]) == tokenizer.decode(ids[0, :9])


def inner_of(model, ids):
    """Inputs of the attention modules of the three families here, by hooks of their own."""
    hidden, hooks = [], []
    for module in model.modules():
        if hasattr(module, "affine"):
            hooks.append(
                module.register_forward_pre_hook(
                    lambda m, args, kwargs: hidden.append(args[0] if args else kwargs["hidden_states"]),
                    with_kwargs=True,
                )
            )
    with torch.no_grad():
        model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return hidden


def coefficients_of(model, ids):
    alphas, gates = [], []
    for layer, hidden in zip(mechanisms(model), inner_of(model, ids), strict=True):
        if layer.scale is not None:
            alphas.append((0.1 * (hidden @ layer.scale.proj.weight.T) + 0.5).clamp(0, 1).transpose(1, 2))
        if layer.gate_proj is not None:
            gates.append(torch.sigmoid(hidden @ layer.gate_proj.weight.T))
    return (torch.stack(alphas).detach() if alphas else None), (torch.stack(gates).detach() if gates else None)


def scores_of(model, ids):
    """The scaled logits of every pair, visible or not: [L, B, H, T, T]."""
    scores = []

    def observer(call):
        scores.append(call.query @ call.key.repeat_interleave(4 // call.key.shape[1], 1).mT * call.softmax_scale)

    with torch.no_grad(), watch(model, observer):
        model(ids, use_cache=False)
    return torch.stack(scores)


def save_run(folder, tokenizer, model, **settings):
    text = folder / "data.txt"
    text.write_text("\n\n".join(DOCUMENTS))
    recipe = Recipe(mechanism=mechanisms(model)[0].mechanism, data=(str(text),), **settings)
    write_json(folder / "recipe.json", recipe.to_dict())
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@pytest.mark.filterwarnings("ignore::affine_attention.hf.WeightsNotice")
def test_a_run_folder_gets_its_files(tmp_path, tokenizer):
    model = tiny("affine_gated")
    save_run(tmp_path, tokenizer, model, heldout=0.5)
    result = inspect(tmp_path, sequences=2, length=24, map_length=10, layers=[-1])
    assert "documents held out of" in result["text"]["source"]
    assert result == json.loads((tmp_path / "inspection.json").read_text())
    maps = load_file(tmp_path / "inspection" / "maps.safetensors")
    assert list(maps) == ["layer.1"]
    assert maps["layer.1"].shape == (4, 10, 10)
    assert maps["layer.1"].dtype == torch.float16
    ids = torch.tensor([tokenizer(t)["input_ids"][0] for t in result["maps"]["tokens"]])[None]
    with torch.no_grad():
        truth = model(ids, output_attentions=True, use_cache=False).attentions[1][0]
    torch.testing.assert_close(maps["layer.1"].double(), truth, rtol=1e-3, atol=1e-6)
    assert (maps["layer.1"] < 0).any()
    again = inspect(tmp_path, sequences=2, length=24, map_length=10, layers=[-1])
    assert {**again, "made": None} == {**result, "made": None}
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "data.txt",
        "inspection",
        "inspection.json",
        "model",
        "recipe.json",
    ]


def test_document_boundaries_of_the_recipe_are_kept(tmp_path, tokenizer):
    save_run(tmp_path, tokenizer, tiny("softmax"), heldout=0.5, document_boundaries=True)
    packed = inspect(tmp_path, sequences=1, length=60)
    whole = inspect(tmp_path / "model", text=tmp_path / "data.txt", sequences=1, length=60)
    assert packed["text"]["fingerprint"] != whole["text"]["fingerprint"]
    first = torch.tensor(packed["first_token"]["mean"])
    assert (first > torch.tensor(whole["first_token"]["mean"])).all(), "each document has a first token of its own"


def test_a_plain_checkpoint_is_softmax_and_its_files_stay(tmp_path, tokenizer):
    plain_model(vocab_size=VOCABULARY).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    before = sorted(p.name for p in (tmp_path / "plain").iterdir())
    result = inspect(tmp_path / "plain", text=DOCUMENTS, sequences=1, length=30, output=tmp_path / "out")
    assert result["mechanism"]["name"] == "softmax"
    assert result["total_weight"]["normalized"] is None, "every head sums to 1"
    counts = torch.tensor(result["row_sum"]["histogram"]["counts"])
    assert counts[..., -1].eq(30).all(), "give or take rounding, all in the bin around 1"
    assert sorted(p.name for p in (tmp_path / "plain").iterdir()) == before
    assert (tmp_path / "out" / "inspection.json").is_file()


def test_normalized_total_weight_is_min_max_over_the_model(tokenizer):
    values = inspect(tiny(), text=DOCUMENTS, tokenizer=tokenizer, sequences=1, length=30)["total_weight"]
    flat = torch.tensor(values["normalized"]).flatten()
    assert (flat.min().item(), flat.max().item()) == (0, 1)
    mean = torch.tensor(values["mean"]).flatten()
    assert torch.equal(flat.argsort(), mean.argsort())


def test_the_model_is_left_as_it_was(tokenizer):
    model = tiny("affine").train()
    before, state = running_alphas(model), {k: v.clone() for k, v in model.state_dict().items()}
    inspect(model, text=DOCUMENTS, tokenizer=tokenizer, sequences=1, length=30)
    assert model.training
    assert torch.equal(running_alphas(model), before)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())


def test_a_model_of_our_own_layers():
    torch.manual_seed(0)
    model = TinyLM("affine")
    result = inspect(model, text=torch.randint(0, 16, (3, 20)), sequences=3, length=20)
    assert result["sequences"] == 3
    assert result["maps"]["tokens"][0].isdigit()
    assert any("no tokenizer" in each for each in result["missing"])


@pytest.mark.parametrize("sequences", [0, 1])
def test_few_sequences_are_a_result_with_a_note(sequences, tokenizer):
    result = inspect(tiny(), text=DOCUMENTS, tokenizer=tokenizer, sequences=sequences, length=30)
    json.dumps(result, allow_nan=False)
    assert result["sequences"] == sequences
    if sequences == 0:
        assert result["missing"] == ["0 sequences were requested: nothing was measured"]
        assert result["row_sum"]["mean"] == [[None] * 4] * 2
        assert result["maps"] is None


def test_numbers_that_are_not_finite_are_reported(tokenizer):
    model = tiny(dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(math.nan)
    result = inspect(model, text=DOCUMENTS, tokenizer=tokenizer, sequences=1, length=30)
    json.dumps(result, allow_nan=False)
    assert result["entropy"]["softmax"][0][0] is not None
    assert result["entropy"]["softmax"][1] == [None] * 4
    assert any("layer 1" in each and "not finite" in each for each in result["missing"])


def test_longer_than_the_model_is_cut_and_told(tokenizer):
    model = tiny(max_position_embeddings=32)
    result = inspect(model, text=DOCUMENTS, tokenizer=tokenizer, sequences=1)
    assert result["length"] == 32
    assert any("32 positions" in each for each in result["missing"])


def test_unusable_input_is_rejected(tmp_path, tokenizer):
    model = tiny()
    with pytest.raises(FileNotFoundError, match="no finished model"):
        inspect(tmp_path, text=DOCUMENTS)
    write_json(tmp_path / "recipe.json", Recipe().to_dict())
    with pytest.raises(FileNotFoundError, match="no finished model"):
        inspect(tmp_path)
    with pytest.raises(ValueError, match="attach"):
        inspect(plain_model(), text=DOCUMENTS, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="vocabulary"):
        inspect(model, text=[torch.tensor([1, 2, VOCABULARY])])
    with pytest.raises(ValueError, match="layers must be"):
        inspect(model, text=DOCUMENTS, tokenizer=tokenizer, layers=[2])
    with pytest.raises(ValueError, match="map_length"):
        inspect(model, text=DOCUMENTS, tokenizer=tokenizer, map_length=-1)
    with pytest.raises(ValueError, match="move the model"):
        inspect(model, text=DOCUMENTS, tokenizer=tokenizer, device="cpu")


def test_the_benchmark_measures_a_layer():
    found = inspect_layer("affine", 64, "bfloat16")
    assert found["peak"] >= found["before"] > 2**27
    assert found["seconds"] > 0


def test_edges_put_the_ends_of_the_range_into_the_middle_of_a_bin():
    middles = (SHARE_EDGES[1:] + SHARE_EDGES[:-1]) / 2
    assert middles[0].item() == pytest.approx(0, abs=1e-12)
    assert middles[-1].item() == pytest.approx(1)
    assert len(middles) == 51
    assert (ENTROPY_EDGES[0], ENTROPY_EDGES[-1]) == (0, 11)


def test_the_lines_for_a_terminal_have_every_layer(tokenizer):
    result = inspect(tiny("softmax"), text=DOCUMENTS, tokenizer=tokenizer, sequences=2, length=20, map_length=0)
    lines = format_inspection("run", result).splitlines()
    rows = [line.split() for line in lines[2 : 2 + result["layers"]]]
    assert [row[0] for row in rows] == [str(layer) for layer in range(result["layers"])]
    assert {row[1] for row in rows} == {"1.0000"}, "softmax rows sum to one"
