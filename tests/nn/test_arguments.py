"""A seeded fuzz of invalid constructions and calls: each raises an error that names the argument."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from affine_attention import KeyValueCache, Mechanism, SelfAttention
from affine_attention.nn import PRESETS, AffineScale, AttentionMechanism
from affine_attention.nn.mechanism import as_mechanism

NAN, INF = float("nan"), float("inf")
AT_LEAST = 1600
SEED = 17


class RaisingRepr:
    """An object whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def objects() -> list[Any]:
    """Values whose types are invalid for number, name, flag and tensor arguments."""
    return [
        [],
        {},
        (),
        [1],
        {"a": 1},
        (2, 3),
        b"2",
        object(),
        RaisingRepr(),
        2j,
        set(),
        print,
        Mechanism,
        numpy.zeros(3),
    ]


def bad_sizes(most: int = 2**24) -> list[Any]:
    floats = [0.5, 4.0, NAN, INF]
    return [0, -1, -8, most + 1, 2**31, 2**63, 2**70, -(2**70), 10**5000, True, False, "4", "", *floats,
            torch.tensor(4), numpy.int64(4), *objects()]  # fmt: skip


def bad_numbers(low: float, high: float) -> list[Any]:
    outside = [low * 2 - 1.0, high * 2 + 1.0, NAN, INF, -INF, 10**400, -(10**400), 10**5000]
    return [*outside, True, False, "0.5", "", None, torch.tensor(0.5), *objects()]


def bad_words() -> list[Any]:
    words = ["", "afine", "SOFTMAX", "x" * 500, "\x1b[31m"]
    return [*words, 0, 1, -1, 2.5, NAN, True, False, 2**70, 10**5000, torch.ones(2), *objects()]


def bad_devices() -> list[Any]:
    return ["nope", "", "cpu:x", "cuda:-7", -3, 2**70, True, 2.5, NAN, torch.float32, torch.ones(1), *objects()]


def bad_dtypes() -> list[Any]:
    return [
        "float32",
        "",
        32,
        2.5,
        True,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        float,
        *objects(),
    ]


SIZES = {"embed_dim": bad_sizes(), "num_heads": bad_sizes(), "head_dim": bad_sizes(256)}
DEVICE_AND_DTYPE = {"device": bad_devices(), "dtype": bad_dtypes()}
SETTINGS: dict[str, list[Any]] = {
    "name": ["", None, 0, 1, 2.5, True, 10**5000, torch.ones(2), *objects()],
    "activation": bad_words(),
    "sink": bad_words(),
    "bias": [None, 0, 1, "True", "", 2.5, NAN, 10**5000, torch.ones(2), torch.tensor(True), *objects()],
    "gate": [None, 0, 1, "True", "", 2.5, NAN, 10**5000, torch.ones(2), torch.tensor(True), *objects()],
    "bias_length": [0, -1, 2**31, 2**63, 2**70, 10**5000, 2.5, NAN, True, None, "", "all", "2048", torch.tensor(4),
                    *objects()],
    "momentum": bad_numbers(0, 1),
    "running_alpha_start": bad_numbers(0, 1),
    "init_std": [*bad_numbers(0, 3.4e38), 1e39, -1e-9],
    "sink_start": [*bad_numbers(-3.4e38, 3.4e38), 1e39, -1e39],
}  # fmt: skip
LAYER: dict[str, list[Any]] = {
    **{name: [*values, None] for name, values in SIZES.items() if name != "head_dim"},
    "head_dim": [*SIZES["head_dim"], 3, 257],
    "num_kv_heads": [*bad_sizes(), 3, 5, 8],
    "mechanism": [None, *bad_words()],
    "window": [0, -1, -(2**70), -(10**5000), True, False, 2.5, NAN, "", "8", torch.tensor(3), *objects()],
    "rope_theta": [0, 0.0, -1, -1e4, 0.5, NAN, INF, -INF, 1e31, 10**400, 10**5000, True, False, "1e4", "",
                   torch.tensor(1e4), *objects()],
    "impl": ["", "compsed", "FUSED", None, 0, True, 2.5, 10**5000, torch.ones(2), *objects()],
    **DEVICE_AND_DTYPE,
}  # fmt: skip


def dense(x: torch.Tensor) -> list[Any]:
    """The same tensor in unsupported layouts."""
    nested = torch.nested.nested_tensor([x.reshape(-1)[:1], x.reshape(-1)[:2]])
    return [x.to_sparse(), nested]


def bad_tensors(shape: tuple[int, ...], *dtypes: torch.dtype) -> list[Any]:
    """Tensors of these invalid dtypes, tensors of other layouts, and values that are not tensors."""
    good = torch.zeros(shape)
    wrong_dtype = [torch.zeros(shape).to(dtype) for dtype in dtypes]
    return [*wrong_dtype, *dense(good), 0, 1, 2.5, NAN, True, "x", 2**70, [[0] * 4] * 2, numpy.zeros(shape), *objects()]


def other_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    smaller = [(*shape[:n], shape[n] + 1, *shape[n + 1 :]) for n in range(len(shape))]
    return [torch.zeros(s).to(dtype) for s in ((), (0,), (3,), shape[:-1], (*shape, 1), *smaller)] + [
        torch.zeros(shape, device="meta").to(dtype)
    ]


INTEGERS = (torch.int64, torch.int32, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16)
CALL: dict[str, list[Any]] = {
    "hidden": [None, *bad_tensors((2, 4, 32), *INTEGERS, torch.bool, torch.complex64, torch.float64, torch.float16),
               *other_shapes((2, 4, 32), torch.float32)[:5], torch.zeros(2, 4, 33),
               torch.zeros(2, 4, 32, device="meta")],
    "mask": [*bad_tensors((2, 4), *INTEGERS, *FLOATS), *other_shapes((2, 4), torch.bool)],
    "segment_ids": [*bad_tensors((2, 4), *FLOATS, torch.bool, torch.complex64), *other_shapes((2, 4), torch.int64)],
    "positions": [*bad_tensors((2, 4), torch.bool, torch.complex64), *other_shapes((2, 4), torch.int64)],
    "cache": [0, 1, True, "cache", 2.5, torch.zeros(2, 2, 3, 8), *objects()],
}  # fmt: skip


def make_cache(key: Any, value: Any) -> KeyValueCache:
    cache = KeyValueCache()
    cache.key, cache.value = key, value
    return cache


def bad_caches() -> list[KeyValueCache]:
    """Caches with another batch, heads or head dim, with another type, or without keys or values."""
    right = torch.zeros(2, 2, 3, 8)
    wrong = [torch.zeros(s) for s in ((3, 2, 3, 8), (2, 4, 3, 8), (2, 2, 3, 6), (2, 2, 8), (0,), (2, 2, 3, 8, 1))]
    parts = [*wrong, "keys", 3, [1], None]
    return [make_cache(x, x) for x in parts if x is not None] + [
        made for x in parts for made in (make_cache(x, right), make_cache(right, x))
    ]


Try = tuple[str, Any, Callable[[], Any]]


def attempts() -> Iterator[Try]:
    """(argument, bad value, the call)."""
    layer = SelfAttention(32, 4, 2)
    module = AttentionMechanism("affine_gated", 32, 4, 8)
    for name, values in SETTINGS.items():
        for value in values:
            yield name, value, lambda n=name, v=value: Mechanism(**{n: v})
            yield name, value, lambda n=name, v=value: Mechanism.named("affine", **{n: v})
            yield name, value, lambda n=name, v=value: Mechanism.from_dict({"activation": "sigmoid", n: v})
    for value in [None, *bad_words()]:
        yield "mechanism", value, lambda v=value: as_mechanism(v)
        yield "mechanism", value, lambda v=value: Mechanism.named(v)
        yield "mechanism", value, lambda v=value: AttentionMechanism(v, 32, 4, 8)
        yield "mechanism", value, lambda v=value: AffineScale(v, 32, 4)
    for value in [None, 3, 2.5, True, "", "{", "[" * 100_000, '{"name": ', b"\xff", object(), [], {}, numpy.zeros(3)]:
        yield "text", value, lambda v=value: Mechanism.from_json(v)
    for value in ["[]", "null", "3", '"x"', b"2", "[1, 2]"]:
        yield "settings", value, lambda v=value: Mechanism.from_json(v)
    for name, values in SIZES.items():
        for value in [None, *values]:
            sizes = {"embed_dim": 32, "num_heads": 4, "head_dim": 8, name: value}
            yield name, value, lambda s=sizes: AttentionMechanism("affine", **s)
            yield name, value, lambda s=sizes: PRESETS["affine"].extra_parameters(**s)
    for name, values in DEVICE_AND_DTYPE.items():
        for value in values:
            yield name, value, lambda n=name, v=value: AttentionMechanism("affine", 32, 4, 8, **{n: v})
            yield name, value, lambda n=name, v=value: AffineScale(PRESETS["affine"], 32, 4, **{n: v})
    for name, values in LAYER.items():
        for value in values:
            given = {"embed_dim": 32, "num_heads": 4, name: value}
            yield name, value, lambda g=given: SelfAttention(**g)
    for name, values in CALL.items():
        for value in values:
            given = {"hidden": torch.zeros(2, 4, 32), name: value}
            yield name, value, lambda g=given: layer(**g)
            if name in ("mask", "positions"):
                yield name, value, lambda g=given: layer(**g, cache=KeyValueCache())
    for cache in bad_caches():
        yield "cache", cache, lambda c=cache: layer(torch.zeros(2, 4, 32), cache=c)
    yield from attempts_on_mechanism(module)
    yield from attempts_on_cache()


def attempts_on_mechanism(module: AttentionMechanism) -> Iterator[Try]:
    """Bad calls of an `AttentionMechanism`."""
    states = {"query": (2, 4, 4, 8), "key": (2, 2, 4, 8), "value": (2, 2, 4, 8)}
    good = {"hidden": torch.zeros(2, 4, 32), **{name: torch.zeros(shape) for name, shape in states.items()}}
    bad: dict[str, list[Any]] = {
        "hidden": [*CALL["hidden"], torch.zeros(3, 4, 32), torch.zeros(2, 5, 32)],
        **{
            name: [None, *bad_tensors(shape, *INTEGERS, torch.bool), *other_shapes(shape, torch.float32)[:5]]
            for name, shape in states.items()
        },
        "mask": CALL["mask"],
        "segment_ids": [*bad_tensors((2, 4), *FLOATS, torch.bool), *other_shapes((2, 4), torch.int64)],
        "token_mask": CALL["mask"],
        "window": LAYER["window"],
        "is_causal": [None, 0, 1, "True", 2.5, torch.tensor(True), *objects()],
        "softmax_scale": [NAN, INF, -INF, 10**400, -(10**400), 10**5000, True, "1", "", torch.tensor(1.0), *objects()],
        "impl": LAYER["impl"],
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            yield name, value, lambda n=name, v=value: module(**good | {n: v})
            if name in ("mask", "segment_ids", "window", "is_causal"):
                query_key = {"query": good["query"], "key": good["key"]}
                yield name, value, lambda n=name, v=value, g=query_key: module.bias_divisor(**g, **{n: v})


def attempts_on_cache() -> Iterator[Try]:
    """Bad calls of a `KeyValueCache`."""

    def held() -> KeyValueCache:
        cache = KeyValueCache()
        cache.append(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8))
        return cache

    states = torch.zeros(2, 2, 1, 8)
    shapes = [torch.zeros(s) for s in ((3, 2, 1, 8), (2, 4, 1, 8), (2, 2, 1, 6), (2, 2, 8), (), (2, 2, 1, 8, 1))]
    wrong = [None, *shapes, states.double(), states.to("meta"), *dense(states), 3, "x", *objects()]
    for value in wrong:
        yield "key", value, lambda v=value: held().append(v, states)
        yield "value", value, lambda v=value: held().append(states, v)
    for value in [-1, 4, 2**70, 10**5000, None, True, False, 2.0, NAN, "2", torch.tensor(2), *objects()]:
        yield "length", value, lambda v=value: held().crop(v)
    rows = [torch.tensor(x) for x in ([2], [-1], [0.0, 1.0], [True, False], [[0, 1]], 0)]
    for value in [*rows, torch.zeros(2).byte(), None, 0, 1, "0", [0, 1], slice(0, 1), *objects()]:
        yield "rows", value, lambda v=value: held().reorder(v)


def test_every_invalid_argument_is_named_in_the_error():
    tried = list(attempts())
    random.Random(SEED).shuffle(tried)  # a cached plan of an earlier call must not accept a later invalid call
    assert len(tried) >= AT_LEAST
    failures = []
    for name, value, call in tried:
        shown = (
            f"{name}={type(value).__name__} {'' if isinstance(value, RaisingRepr | torch.Tensor | int) else value!r}"
        )
        try:
            call()
        except (ValueError, TypeError) as error:
            if name not in str(error) or len(str(error)) > 600:
                failures.append(f"{shown}: {type(error).__name__} does not name the argument: {str(error)[:200]}")
        except Exception as error:
            failures.append(f"{shown}: {type(error).__name__}: {str(error)[:200]}")
        else:
            failures.append(f"{shown}: accepted")
    assert not failures, f"{len(failures)} of {len(tried)}:\n" + "\n".join(failures[:60])


def test_several_invalid_settings_raise():
    """Random constructions with one to three invalid settings: the error names one of them."""
    draw = random.Random(SEED)
    good = {"activation": "sigmoid", "bias_length": 64, "momentum": 0.5, "gate": True, "init_std": 0.1}
    for _ in range(1600):
        bad = {name: draw.choice(SETTINGS[name]) for name in draw.sample(sorted(SETTINGS), draw.randint(1, 3))}
        with pytest.raises((ValueError, TypeError)) as caught:
            Mechanism(**good | bad)
        assert any(name in str(caught.value) for name in bad)


def test_valid_arguments_are_accepted():
    for theta in (1, 1.0, 500_000, 1e6, None):
        SelfAttention(32, 4, rope_theta=theta)
    SelfAttention(32, 4, window=2**70, device="cpu", dtype=torch.bfloat16, impl="reference")
    SelfAttention(32, 4, 1, PRESETS["gated"], head_dim=6, device=torch.device("meta"))
    assert Mechanism.named("affine", bias_length=2**31 - 1).bias_length == 2**31 - 1
    layer = SelfAttention(32, 4, 2)
    hidden = torch.randn(2, 4, 32)
    whole = layer(hidden)
    for positions in (torch.arange(4).expand(2, 4), torch.arange(4)[None].int(), torch.arange(4.0)[None]):
        torch.testing.assert_close(layer(hidden, positions=positions), whole)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(hidden).dtype == torch.bfloat16


def test_a_huge_window_equals_no_window():
    wide, free = SelfAttention(32, 4, window=2**70), SelfAttention(32, 4)
    wide.load_state_dict(free.state_dict())
    hidden = torch.randn(2, 4, 32)
    assert torch.equal(wide(hidden), free(hidden))


def test_an_initial_value_must_fit_the_dtype():
    sink = Mechanism.named("sink", sink_start=1e6)
    AttentionMechanism(sink, 32, 4, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"sink_start of the mechanism must be at most 65504"):
        AttentionMechanism(sink, 32, 4, 8, dtype=torch.float16)


def test_a_layer_on_the_meta_device_returns_shapes():
    layer = SelfAttention(32, 4, 2, device="meta")
    assert layer(torch.zeros(2, 4, 32, device="meta")).shape == (2, 4, 32)
