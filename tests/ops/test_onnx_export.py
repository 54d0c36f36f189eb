"""torch.onnx.export of `attention`: onnxruntime computes the same, also at other lengths than the exported one."""

from __future__ import annotations

import pytest
import torch

from affine_attention import SelfAttention, attention

pytest.importorskip("onnxscript", reason="needs onnx, onnxscript and onnxruntime")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnx, onnxscript and onnxruntime")


class Call(torch.nn.Module):
    """A call of the operator with parameters and inputs by name."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.sink = torch.nn.Parameter(torch.linspace(-1, 2, 4))
        self.norm_weight = torch.nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, query, key, value, alpha, mask, ids):
        options = {}
        if "sink" in self.kind:
            options["sink"] = self.sink
        if "affine" in self.kind:
            options |= {"alpha": alpha, "beta": (0.5 - alpha) / 16}
        if "gate" in self.kind:
            options["gate"] = query.sigmoid()
        if "padding" in self.kind:
            options["mask"] = mask
        if "documents" in self.kind:
            options |= {"segment_ids": ids, "window": 4}
        if "norm" in self.kind:
            # Not 1: a row that sees one key would be excluded whole, and the norm would divide rounding errors.
            options |= {"norm_weight": self.norm_weight, "exclusion": 0.5}
        return attention(query, key, value, is_causal=True, **options)


def make(length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    mask = torch.ones(2, length, dtype=torch.bool)
    mask[0, :3] = False
    ids = (torch.arange(length) > 4).long().expand(2, -1).contiguous()
    return (normal(2, 4, length, 16), normal(2, 2, length, 16), normal(2, 2, length, 16),
            normal(2, 4, length).sigmoid(), mask, ids)  # fmt: skip


def run(path, inputs) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])


SLOW = pytest.mark.slow
KINDS = [
    "sink padding",
    "sink affine norm padding",
    pytest.param("softmax", marks=SLOW),
    pytest.param("affine gate", marks=SLOW),
    pytest.param("affine documents", marks=SLOW),
]


@pytest.mark.parametrize("kind", KINDS)
def test_onnxruntime_computes_the_same_at_any_length(kind, tmp_path):
    model = Call(kind).eval()
    length = torch.export.Dim("length", min=2, max=64)
    names = ("query", "key", "value", "alpha", "mask", "ids")
    shapes = {name: {dim: length} for name, dim in zip(names, (2, 2, 2, 2, 1, 1), strict=True)}
    program = torch.onnx.export(model, make(9), dynamo=True, verbose=False, dynamic_shapes=shapes)
    path = tmp_path / "model.onnx"
    program.save(path)
    for length in (9, 21):
        inputs = make(length)
        # onnxruntime sums in another order: a few units in the last place of numbers of order 1.
        torch.testing.assert_close(
            run(path, dict(zip(names, inputs, strict=True))), model(*inputs).detach(), rtol=1e-5, atol=4e-6
        )


def test_a_layer_is_exported(tmp_path):
    layer = SelfAttention(64, num_heads=4, num_kv_heads=2, mechanism="affine_gated").eval()
    hidden = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0))
    torch.onnx.export(layer, (hidden,), dynamo=True, verbose=False).save(tmp_path / "layer.onnx")
    torch.testing.assert_close(
        run(tmp_path / "layer.onnx", {"hidden": hidden}), layer(hidden).detach(), rtol=1e-5, atol=4e-6
    )
