"""Activations: the largest and the median after each layer equal those of transformers' hidden states."""

from __future__ import annotations

import pytest
import torch

from affine_attention import SelfAttention
from affine_attention.lab.inspection import inspect
from affine_attention.lab.inspection.activations import ActivationTally, find_layers, watch_layers
from tests.hf.models import FAMILIES, make_model
from tests.nn.models import TinyLM


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_every_family_are_found(family):
    model = make_model(family, "affine")
    layers = find_layers(model)
    assert len(layers) == 2
    seen = []
    ids = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watch_layers(model, lambda index, hidden: seen.append((index, hidden))) as count:
        states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
    assert count == 2
    assert [index for index, _ in seen] == [0, 1]
    assert torch.equal(seen[0][1], states[1])  # the last one of transformers is after the final norm
    assert seen[1][1].shape == states[1].shape
    left = [hook.__module__ for layer in layers for hook in layer._forward_hooks.values()]
    assert watch_layers.__module__ not in left  # transformers leaves its own


def test_inspection_reports_the_largest_and_the_median_of_each_layer():
    model = make_model("llama", "affine", torch.float64)
    ids = torch.randint(1, 64, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():  # one channel of one token is massive
        model.model.embed_tokens.weight[ids[1, 5], 11] = 1e4
    states = []
    with torch.no_grad(), watch_layers(model, lambda index, hidden: states.append(hidden[0])):
        for row in ids:
            model(row[None], use_cache=False)
    sizes = torch.stack(states).view(3, 2, 17, 32).abs()
    found = inspect(model, text=ids, sequences=3, length=17, map_length=0)["activations"]
    assert found["largest"] == sizes.amax((0, 2, 3)).tolist()
    assert found["median"] == pytest.approx(sizes.flatten(2).median(-1).values.mean(0).tolist(), rel=1e-6)
    for layer in range(2):
        place = sizes[:, layer].flatten().argmax()
        assert (found["position"][layer], found["channel"][layer]) == divmod(int(place) % (17 * 32), 32)
    assert found["channel"] == [11, 11]
    assert found["largest"][0] > 100 * found["median"][0]


def test_models_without_layers_and_numbers_that_are_not_finite():
    assert find_layers(SelfAttention(32, 4, mechanism="affine")) == []
    assert find_layers(TinyLM("affine")) == []  # its layers are attention alone
    tally = ActivationTally()
    for value in (1.0, torch.nan, 2.0):
        tally.add(torch.full((1, 2, 3), value))
    assert tally.largest != tally.largest
