"""The sink rate and the norms of values equal those computed from dense weights."""

from __future__ import annotations

import json

import pytest
import torch

from affine_attention import Mechanism, attention_weights
from affine_attention.lab.inspection import inspect as inspect_model
from affine_attention.lab.inspection import sinks
from affine_attention.lab.inspection.capture import watch
from tests.hf.models import make_model

LENGTH, SEQUENCES = 90, 5


def measured(mechanism):
    model = make_model("llama", Mechanism.named(mechanism, bias_length=16), torch.float64)
    ids = torch.randint(1, 64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(3))
    calls = []
    with torch.no_grad(), watch(model, calls.append):
        for row in ids:
            model(row[None], use_cache=False)
    return inspect_model(model, text=ids, sequences=SEQUENCES, length=LENGTH, map_length=0), calls


@pytest.mark.parametrize("mechanism", ["softmax", "sink", "affine"])
def test_the_sink_rate_equals_that_of_the_dense_weights(mechanism, monkeypatch):
    monkeypatch.setattr(sinks, "EPSILON", 0.1)  # random heads have no stronger sinks
    result, calls = measured(mechanism)
    json.dumps(result, allow_nan=False)
    found = result["sink_rate"]
    weights, parts = [], []  # [sequence and layer][H]: mean of the first 64 queries
    for call in calls:
        given = {"sink": call.sink, "is_causal": True, "softmax_scale": call.softmax_scale}
        p = attention_weights(call.query, call.key, **given)[0, :, :64]
        alpha = torch.ones_like(p[..., 0]) if call.alpha is None else call.alpha[0, :, :64]
        beta = 0.0 if call.beta is None else call.beta[0, :, :64]
        weights.append((alpha * p[..., 0] + beta).mean(-1))
        parts.append((alpha * p[..., 0]).sum(-1) / (alpha * p.sum(-1)).sum(-1))
    for kind, values in (("weights", weights), ("softmax", parts)):
        values_SLH = torch.stack(values).view(SEQUENCES, 2, 4)
        above = (values_SLH > 0.1).double()
        assert found["rate"][kind] == pytest.approx(above.mean().item())
        assert found["heads"][kind] == above.mean(0).tolist()
        torch.testing.assert_close(torch.tensor(found["first_token"][kind]).double(), values_SLH.mean(0))
    assert (found["epsilon"], found["length"]) == (0.1, 64)
    assert found["uniform"] == pytest.approx(sum(1 / n for n in range(1, 65)) / 64)
    if mechanism == "softmax":
        assert 0 < found["rate"]["weights"] < 1, "there are sinks and heads without one"
        assert found["heads"]["weights"] == found["heads"]["softmax"]


def test_value_norms_of_first_tokens_and_of_the_others():
    result, calls = measured("affine")
    norms = torch.stack([call.value.norm(dim=-1)[0] for call in calls]).view(SEQUENCES, 2, 2, LENGTH)
    found = result["value_norm"]
    torch.testing.assert_close(torch.tensor(found["first"]).double(), norms[..., 0].mean(0))
    torch.testing.assert_close(torch.tensor(found["others"]).double(), norms[..., 1:].mean((0, 3)))


def test_the_first_token_of_each_packed_document_counts():
    model = make_model("llama", "softmax", torch.float64)
    positions = torch.tensor([*range(7), *range(13)])
    example = {"input_ids": torch.arange(20), "position_ids": positions}
    found = inspect_model(model, text=[example], sequences=1, length=20, map_length=0)
    calls = []
    with torch.no_grad(), watch(model, calls.append):
        model(torch.arange(20)[None], position_ids=positions[None], use_cache=False)
    norms = torch.stack([call.value.norm(dim=-1)[0] for call in calls])
    first = positions == 0
    torch.testing.assert_close(torch.tensor(found["value_norm"]["first"]).double(), norms[..., first].mean(-1))
    torch.testing.assert_close(torch.tensor(found["value_norm"]["others"]).double(), norms[..., ~first].mean(-1))
    expected = sum(1 / n for length in (7, 13) for n in range(1, length + 1)) / 20
    assert found["sink_rate"]["uniform"] == pytest.approx(expected)


def test_a_head_that_is_off_is_not_a_sink():
    tally = sinks.SinkTally(2)
    rows = {name: torch.zeros(1, 2, 8) for name in sinks.metrics.Rows._fields}
    rows["counted"] = torch.ones(1, 2, 8, dtype=torch.bool)
    rows["softmax_sum"][0, 1] = 1.0
    rows["first_softmax"][0, 1] = 0.4
    tally.add(sinks.metrics.Rows(**rows))
    assert tally.rates("softmax").tolist() == [0, 1]
    assert tally.rates("weights").tolist() == [0, 0]
