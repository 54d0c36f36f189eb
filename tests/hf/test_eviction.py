"""Hidden keys: the codes give what a dense mask gives, for every family."""

from __future__ import annotations

import pytest
import torch

from affine_attention.hf.eviction import check_can_evict, eviction_mask

from .models import FAMILIES, SLIDING, make_model, plain_model

LENGTH, CLOSE = 12, {"rtol": 1e-5, "atol": 1e-5}


def dense(first_key=False, window=None, starts=(0,)):
    """[1, 1, T, T]: causal within documents, without the evicted keys."""
    position = torch.arange(LENGTH)
    document = torch.tensor([sum(start <= t for start in starts) for t in range(LENGTH)])
    seen = (position[:, None] >= position) & (document[:, None] == document)
    if first_key:
        for start in starts:
            seen[start + 1 :, start] = False
    if window is not None:
        seen &= position[:, None] - position < window
    return seen[None, None]


@pytest.mark.parametrize("options", [{"first_key": True}, {"window": 3}, {"first_key": True, "window": 3}])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_mask_hides_the_keys_in_every_family(family, options):
    model = make_model(family)
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, attention_mask=eviction_mask(ids, **options)).logits
    expected = model(ids, attention_mask=dense(**options).expand(2, 1, -1, -1)).logits
    torch.testing.assert_close(hidden, expected, **CLOSE)
    assert not torch.allclose(hidden, model(ids).logits, **CLOSE)
    # The first token predicts the second from itself, as without a mask.
    torch.testing.assert_close(hidden[:, 0], model(ids).logits[:, 0], **CLOSE)


@torch.no_grad()
def test_the_first_key_of_each_packed_document_is_hidden():
    model = make_model("llama")
    ids = torch.randint(1, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    starts = (0, 5, 6)
    positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(6)]).expand(2, -1)
    for options in ({"first_key": True}, {"window": 2}):
        mask = eviction_mask(ids, positions, **options)
        hidden = model(ids, position_ids=positions, attention_mask=mask).logits
        all_seen = dense(**options, starts=starts).expand(2, 1, -1, -1)
        expected = model(ids, position_ids=positions, attention_mask=all_seen).logits
        torch.testing.assert_close(hidden, expected, **CLOSE)


def test_a_mask_that_hides_nothing_and_models_with_windows_are_refused():
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="needs first_key=True or a window"):
        eviction_mask(ids)
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        eviction_mask(ids, window=0)
    for family, changes in SLIDING.items():
        config = plain_model(family, **changes).config
        check_can_evict(config, 5)
        with pytest.raises(ValueError, match="sliding_window = 5 below the length 6"):
            check_can_evict(config, 6)
    check_can_evict(plain_model("qwen2").config, 10**6)
