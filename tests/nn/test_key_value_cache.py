"""KeyValueCache: amortised appends, cropping, reordering, copies, autograd and inference mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from affine_attention import KeyValueCache

from .test_attention import CLOSE, make_layer


class CountWrites(TorchDispatchMode):
    """Counts the values that copies and concatenations write."""

    written = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.cat.default, torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
            self.written += out.numel()
        return out


def token(seed: int, length: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, 2, 2, length, 4, generator=generator)
    return key, value


def filled(tokens: int) -> KeyValueCache:
    cache = KeyValueCache()
    for seed in range(tokens):
        cache.append(*token(seed))
    return cache


def expected(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = zip(*(token(seed) for seed in range(tokens)), strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)


def assert_holds(cache: KeyValueCache, tokens: int) -> None:
    key, value = expected(tokens)
    assert torch.equal(cache.key, key)
    assert torch.equal(cache.value, value)
    assert cache.length == tokens


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_appending_tokens_one_by_one_copies_a_linear_number_of_values(context):
    with context(), CountWrites() as count:
        cache = filled(300)
    assert_holds(cache, 300)
    assert count.written <= 5 * (cache.key.numel() + cache.value.numel())


def test_a_cache_can_be_cropped_and_reordered():
    layer = make_layer()
    hidden = torch.randn(3, 9, 32, dtype=torch.float64)
    whole = layer(hidden)
    cache = KeyValueCache()
    layer(hidden[:, :8] + 1, cache=cache)
    cache.crop(0)
    layer(hidden[:, :8], cache=cache)
    cache.crop(5)
    layer(hidden[:, 5:8], cache=cache)
    rows = torch.tensor([2, 0, 0])
    cache.reorder(rows)
    torch.testing.assert_close(layer(hidden[rows, 8:], cache=cache), whole[rows, 8:], **CLOSE)
    with pytest.raises(ValueError, match="length must be an integer from 0 to 9, the number of cached tokens, got 12"):
        cache.crop(12)


@torch.no_grad()
def test_results_of_earlier_appends_stay_valid_after_a_crop_and_a_reorder():
    cache = filled(20)
    key, value = cache.key, cache.value
    cache.crop(7)
    cache.append(*token(99))
    cache.reorder(torch.tensor([1, 1]))
    cache.append(*token(98))
    assert torch.equal(key, expected(20)[0])
    assert torch.equal(value, expected(20)[1])
    assert torch.equal(cache.key[:, :, :7], expected(7)[0][[1, 1]])
    assert torch.equal(cache.key[:, :, 8:], token(98)[0])


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@torch.no_grad()
def test_a_copy_and_its_original_append_independently(duplicate):
    cache = filled(20)
    twin = duplicate(cache)
    twin.append(*token(77))
    cache.append(*token(20))
    assert_holds(cache, 21)
    assert torch.equal(twin.key, torch.cat([expected(20)[0], token(77)[0]], 2))


def test_gradients_flow_through_a_cache_filled_with_and_without_gradients():
    leaves = [x.requires_grad_() for x in token(1, 3)]
    cache = KeyValueCache()
    with torch.no_grad():
        cache.append(*token(0, 2))
        cache.append(*token(5, 2))
    cache.append(*leaves)
    query = torch.ones(2, 2, 1, 4, requires_grad=True)
    scores = (query * cache.key).sum() * 2
    with torch.no_grad():
        cache.append(*token(2))  # must not overwrite what backward needs
    with torch.enable_grad():
        cache.append(*token(3))
    scores.backward()
    assert torch.equal(leaves[0].grad, torch.full((2, 2, 3, 4), 2.0))
    held = torch.cat([token(0, 2)[0], token(5, 2)[0], leaves[0].detach()], 2)
    torch.testing.assert_close(query.grad, held.sum(2, keepdim=True) * 2)
    assert cache.length == 9


def test_a_cache_filled_in_inference_mode_can_be_used_outside():
    with torch.inference_mode():
        cache = filled(20)
    with torch.no_grad():
        cache.append(*token(20))
    assert_holds(cache, 21)
    cache.append(*(x.requires_grad_() for x in token(21)))
    assert cache.key.requires_grad


@torch.no_grad()
def test_a_new_batch_dtype_or_device_needs_a_new_cache():
    cache = filled(3)
    key, value = token(0)
    with pytest.raises(ValueError, match="use a new KeyValueCache for another batch"):
        cache.append(key[:1], value[:1])
    for other in (key.double(), key.to("meta")):
        with pytest.raises(TypeError, match="use a new KeyValueCache"):
            cache.append(other, other)
    assert_holds(cache, 3)
    cache.crop(0)
    cache.append(*token(0))
    assert_holds(cache, 1)


@torch.no_grad()
def test_a_compiled_layer_decodes_with_a_cache():
    torch._dynamo.reset()
    layer = make_layer()
    hidden = torch.randn(1, 6, 32, dtype=torch.float64)
    compiled, cache = torch.compile(layer, backend="eager", fullgraph=True), KeyValueCache()
    steps = [compiled(part, cache=cache) for part in hidden.split([3, 1, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(hidden), **CLOSE)
