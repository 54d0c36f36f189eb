"""Hidden keys: the codes give what a dense mask gives, for every family."""

from __future__ import annotations

import pytest
import torch

from affine_attention.hf.eviction import check_can_evict, eviction_mask, without_first_key

from .models import FAMILIES, SLIDING, make_model, plain_model

LENGTH, CLOSE = 12, {"rtol": 1e-5, "atol": 1e-5}


def dense(first_key_after=None, window=None, starts=(0,)):
    """[1, 1, T, T]: causal within documents, without the evicted keys."""
    position = torch.arange(LENGTH)
    document = torch.tensor([sum(start <= t for start in starts) for t in range(LENGTH)])
    seen = (position[:, None] >= position) & (document[:, None] == document)
    if first_key_after is not None:
        for start in starts:
            seen[start + first_key_after :, start] = False
    if window is not None:
        seen &= position[:, None] - position < window
    return seen[None, None]


@pytest.mark.parametrize("options", [{"first_key_after": 3}, {"window": 3}])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_mask_hides_the_keys_in_every_family(family, options):
    model = make_model(family)
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, attention_mask=eviction_mask(ids, **options)).logits
    expected = model(ids, attention_mask=dense(**options).expand(2, 1, -1, -1)).logits
    torch.testing.assert_close(hidden, expected, **CLOSE)
    assert not torch.allclose(hidden, model(ids).logits, **CLOSE)
    # The first three tokens see everything before them.
    torch.testing.assert_close(hidden[:, :3], model(ids).logits[:, :3], **CLOSE)


@torch.no_grad()
def test_the_first_key_of_each_packed_document_is_hidden():
    model = make_model("llama")
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    starts = (0, 5, 6)
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)]).expand(2, -1)
    for options in ({"first_key_after": 1}, {"first_key_after": 3}, {"window": 2}):
        mask = eviction_mask(ids, positions, **options)
        hidden = model(ids, position_ids=positions, attention_mask=mask).logits
        all_seen = dense(**options, starts=starts).expand(2, 1, -1, -1)
        expected = model(ids, position_ids=positions, attention_mask=all_seen).logits
        torch.testing.assert_close(hidden, expected, **CLOSE)


def test_a_mask_that_hides_nothing_and_models_with_windows_are_refused():
    ids = torch.zeros(1, 4, dtype=torch.long)
    for given in ({}, {"first_key_after": 2, "window": 3}):
        with pytest.raises(ValueError, match="needs either first_key_after or window"):
            eviction_mask(ids, **given)
    with pytest.raises(ValueError, match="first_key_after must be an integer of at least 1, got True"):
        eviction_mask(ids, first_key_after=True)
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        eviction_mask(ids, window=0)
    for family, changes in SLIDING.items():
        config = plain_model(family, **changes).config
        check_can_evict(config, 5)
        with pytest.raises(ValueError, match="sliding_window = 5 below the length 6"):
            check_can_evict(config, 6)
    check_can_evict(plain_model("qwen2").config, 10**6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@torch.no_grad()
def test_a_cache_without_its_first_key_equals_the_mask(family):
    model = make_model(family)
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, attention_mask=eviction_mask(ids, first_key_after=5)).logits
    cache = without_first_key(model(ids[:, :5], use_cache=True).past_key_values)
    positions = torch.arange(5, LENGTH)[None].expand(2, -1)
    rest = model(ids[:, 5:], position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(rest, hidden[:, 5:], **CLOSE)


@torch.no_grad()
def test_a_cache_with_sliding_layers_is_refused():
    model = plain_model("mistral", sliding_window=5)
    cache = model(torch.arange(1, 9)[None], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cannot be removed from a DynamicCache with sliding or other layers"):
        without_first_key(cache)
