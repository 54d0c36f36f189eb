"""The torchtitan override against torchtitan itself on CPU: its configs, FSDP2, compilation and checkpoints."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.testing import assert_close

from affine_attention import attention as operator
from affine_attention.nn import PRESETS
from affine_attention.nn.commit import affine_scales
from tests.docs_commands import commands_of, fences
from tests.nn.test_distributed import free_port, in_group

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-titan")

from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtitan.components.checkpointer.base import ModelWrapper
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ConfigManager, OverrideConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import parallel_dims as titan_dims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp_to_forward
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention, VarlenAttention

from affine_attention import torchtitan as ours

OVERRIDE = "affine_attention.torchtitan.attention"
TOKENS = 24
SDPA = ScaledDotProductAttention.Config


def spec_of(
    family: Any = llama3, mechanism: Any = "affine_gated", inner: Any = None, layers: int = 2, **settings: Any
) -> Any:
    """The spec of torchtitan's debug model, cut to a few layers; mechanism=None leaves its attention as it is."""
    spec = family.model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = layer.attention.inner_attention if inner is None else inner
    if mechanism is not None:
        settings = {"mechanism": mechanism, **settings}
        apply_overrides(OverrideConfig(imports=[(OVERRIDE, settings)]), spec.model)
    return spec


def materialised(model: Any, seed: int = 0, buffer_device: torch.device | None = None) -> Any:
    """What torchtitan's trainer does with a model on the meta device; a buffer device means CPU offloading."""
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and not hasattr(tensor, "placements"):
            tensor.data.fill_(math.nan)  # memory of to_empty holds anything
    torch.manual_seed(seed)
    with torch.no_grad():
        model.init_weights(buffer_device=buffer_device)
    return model.train()


def on_meta(spec: Any) -> Any:
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    return model


def built(*args: Any, seed: int = 0, **kwargs: Any) -> Any:
    return materialised(on_meta(spec_of(*args, **kwargs)), seed)


def inner_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, ours.MechanismAttention)]


def make_batch(rows: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and positions of packed documents with 10, 7 and 7 tokens."""
    tokens = torch.randint(2048, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(10), torch.arange(7), torch.arange(7)])
    return tokens, positions.expand(rows, -1)


def loss_of(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    return model(tokens, positions=positions).float().logsumexp(-1).sum()


def optimizer_of(model: nn.Module, rate: float = 1e-3) -> Any:
    config = default_adamw(lr=rate)
    config.implementation = "foreach"
    return config.build(model_parts=[model])


def test_the_command_of_the_documentation_is_valid():
    page = Path(__file__).parent.parent / "docs/train.md"
    blocks = [block for language, block in fences(page) if language == "bash" and "torchtitan.train" in block]
    words = shlex.split(commands_of(blocks[0])[0])
    config: Any = ConfigManager().parse_args(words[words.index("torchtitan.train") + 1 :])
    (target, settings), *others = config.override.imports
    assert target == OVERRIDE
    assert not others
    assert settings["bias_length"] == config.training.seq_len
    layers = config.model_spec.model.layers[:1]
    config.model_spec.model.layers = layers
    apply_overrides(config.override, config)
    assert layers[0].attention.inner_attention.mechanism["name"] == settings["mechanism"]


def test_the_command_line_selects_a_mechanism():
    settings = {"mechanism": "affine_gated", "bias_length": 4096}
    config: Any = ConfigManager().parse_args(
        [
            "--module",
            "llama3",
            "--config",
            "llama3_debugmodel",
            "--override.imports",
            f"{OVERRIDE}={json.dumps(settings)}",
        ]
    )
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    layers = config.model_spec.model.layers
    assert {type(layer.attention) for layer in layers} == {ours.MechanismGQAttention.Config}
    assert layers[0].attention.inner_attention.mechanism["bias_length"] == 4096
    assert layers[0].attention.sharding_config is not None
    json.dumps(config.to_dict())


@pytest.mark.parametrize(
    ("inner", "window", "has_documents"),
    [
        (FlexAttention.Config(), None, True),
        (VarlenAttention.Config(window_size=(5, 0)), 6, True),
        (SDPA(), None, False),
    ],
    ids=["flex", "varlen window", "sdpa"],
)
def test_output_and_gradients_are_those_of_the_formula(inner, window, has_documents):
    layer = built(inner=inner, bias_length=16).layers["0"].attention.double()
    mechanism = layer.inner_attention
    mechanism.scale.running_alpha.fill_(0.3)
    x = torch.randn(2, TOKENS, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2), requires_grad=True)
    _, positions = make_batch()
    weights = [mechanism.scale.proj.weight, mechanism.gate_proj.weight, layer.wo.weight, layer.qkv_linear.wqkv.weight]
    out = layer(x, None, positions)
    found = torch.autograd.grad(out.square().sum(), [x, *weights])

    q, k, v = layer.qkv_linear(x)
    q, k = layer.rope(q, k, positions)
    alpha = (0.1 * x @ weights[0].T + 0.5).clamp(0, 1).transpose(1, 2)
    documents = (positions == 0).cumsum(1)
    visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().expand(2, 1, -1, -1)
    if window is not None:
        visible = visible & visible.new_ones(TOKENS, TOKENS).triu(1 - window)
    if has_documents:
        visible = visible & (documents[:, None, :, None] == documents[:, None, None])
    num_keys = visible.sum(-1).clamp(min=16)
    gate = torch.sigmoid(x @ weights[1].T).unflatten(-1, (16, 16)).transpose(1, 2)
    expected = operator(
        *(each.transpose(1, 2) for each in (q, k, v)), alpha=alpha, beta=(0.3 - alpha) / num_keys, gate=gate,
        mask=visible, impl="reference",
    )  # fmt: skip
    expected = layer.wo(expected.transpose(1, 2).flatten(2))
    tolerance = {"rtol": 1e-6, "atol": 1e-7}  # 0.3 in fp32
    assert_close(out, expected, **tolerance)
    for mine, right in zip(found, torch.autograd.grad(expected.square().sum(), [x, *weights]), strict=True):
        assert mine.abs().max() > 0
        assert_close(mine, right, **tolerance)


@pytest.mark.parametrize("family", [llama3, qwen3], ids=["llama3", "qwen3"])
def test_softmax_and_the_identity_start_are_torchtitans_attention(family):
    tokens, positions = make_batch()
    plain = built(family, None, SDPA())
    expected = plain(tokens, positions=positions)
    assert_close(built(family, "softmax", SDPA())(tokens, positions=positions), expected)
    model = built(family, "affine_gated", SDPA(), start="identity")
    assert_close(model(tokens, positions=positions), expected)
    assert len(model.state_dict()) == len(plain.state_dict()) + 2 * 3


def test_a_model_with_the_identity_start_takes_weights_of_plain_attention():
    """torchtitan's initial_load_in_hf ends with load_state_dict of the weights that the checkpoint has."""
    tokens, _ = make_batch()
    plain, spec = built(llama3, None, SDPA(), seed=5), spec_of(start="identity", inner=SDPA())
    model = materialised(on_meta(spec))
    adapter = spec.state_dict_adapter(spec.model, None)
    adapter._validate_hf_rope_config = lambda *_: None  # it reads a config.json, which this test does not have
    weights = ModelWrapper(plain).state_dict()
    ModelWrapper(model).load_state_dict(adapter.from_hf(adapter.to_hf(weights)))
    assert_close(model(tokens), plain(tokens))
    own = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(own)  # not scaled twice
    assert_close(model(tokens), plain(tokens))


def test_a_checkpoint_of_plain_attention_is_refused(tmp_path: Path):
    dcp.save(ModelWrapper(built(mechanism=None)).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    state = ModelWrapper(built()).state_dict()
    with pytest.raises(dcp.api.CheckpointException) as error:
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert "Missing key in checkpoint state_dict: layers.0.attention.inner_attention" in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_built_on_the_meta_device_starts_as_the_mechanism_says(name):
    device = torch.device("cpu") if name == "affine" else None
    model = materialised(on_meta(spec_of(qwen3, name)), buffer_device=device)
    for layer in inner_layers(model):
        starts = list(layer.starts())
        assert {id(start.tensor) for start in starts} >= {id(p) for p in layer.parameters()}
        for tensor, mean, std in starts:
            assert_close(tensor.mean().item(), mean, atol=4 * std / math.sqrt(tensor.numel()) + 1e-6, rtol=0)
            assert_close(tensor.std().item(), std, atol=0.05 * std + 1e-6, rtol=0)
    loss = loss_of(model, *make_batch(1))
    loss.backward()
    assert loss.isfinite()
    for scale in affine_scales(model):
        assert scale.running_alpha.dtype == torch.float32
        assert scale.collected.grad[-1] == TOKENS
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_running_average_is_committed_once_for_each_step():
    model, single = built(), built()
    optimizer, other = optimizer_of(model), optimizer_of(single)
    addresses = set()
    for step in range(3):
        tokens, positions = make_batch(4, seed=step)
        for part in range(2):  # gradient accumulation
            half = slice(2 * part, 2 * part + 2)
            loss_of(model, tokens[half], positions[half]).backward()
        loss_of(single, tokens, positions).backward()
        scales = [layer.scale for layer in inner_layers(model)]
        means = [(s.collected.grad[:-1] / (4 * TOKENS)).float() for s in scales]
        before = [s.running_alpha.clone() for s in scales]
        optimizer.step()
        other.step()
        for scale, old, mean, one in zip(scales, before, means, inner_layers(single), strict=True):
            assert_close(scale.running_alpha, 0.9 * old + 0.1 * mean)
            assert_close(scale.running_alpha, one.scale.running_alpha)
            addresses.add(scale.collected.grad.data_ptr())
            assert not scale.collected.grad.any()
        optimizer.state_dict()  # takes steps of the optimizers inside, with a rate of 0
        assert_close(scales[0].running_alpha, 0.9 * before[0] + 0.1 * means[0])
        optimizer.zero_grad()
        other.zero_grad()
    assert len(addresses) == 2  # one for each layer: a CUDA graph writes to the memory that it captured
    last = [scale.running_alpha.clone() for scale in scales]
    with torch.no_grad():
        loss_of(model, *make_batch())
    loss_of(model.eval(), *make_batch()).backward()
    optimizer.step()
    assert all(torch.equal(scale.running_alpha, old) for scale, old in zip(scales, last, strict=True))


def test_layers_compile_without_graph_breaks():
    model, compiled = built(layers=1), built(layers=1)
    SelectiveAC.Config().build(dump_folder="").apply(compiled)
    config = CompileConfig(enable=True, backend="aot_eager")
    apply_compile(compiled, compile_config=config, parallel_dims=SimpleNamespace(tp_enabled=False))  # fullgraph=True
    losses = []
    for each in (model, compiled):
        losses.append(loss_of(each, *make_batch()))
        losses[-1].backward()
    assert_close(*losses)
    for mine, right in zip(inner_layers(compiled), inner_layers(model), strict=True):
        assert_close(mine.scale.collected.grad, right.scale.collected.grad)
        assert_close(mine.scale.proj.weight.grad, right.scale.proj.weight.grad)


def make_dims(**degrees: int | str) -> Any:
    given = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, **degrees}
    world = math.prod(size for size in given.values() if isinstance(size, int))
    return titan_dims.ParallelDims(**given, world_size=world)


def load(model: nn.Module, checkpoint: str) -> None:
    """What torchtitan's checkpointer does."""
    wrapper = ModelWrapper(model)
    state = wrapper.state_dict()
    dcp.load(state, checkpoint_id=checkpoint)
    wrapper.load_state_dict(state)


def train_rank(rank: int, world: int, folder: str) -> None:
    """Trains with torchtitan's parallelize function, saves with DCP, and loads into a second model."""
    titan_dims.device_type = "cpu"
    dims = make_dims(dp_shard=world, spmd_backend="partial_dtensor")
    dims.build_mesh()

    def sharded() -> Any:
        spec = spec_of()
        model = spec.parallelize_fn(
            on_meta(spec),
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            compile_config=CompileConfig(),
            ac_config=FullAC.Config(),
            dump_folder=folder,
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        return materialised(model)

    model = sharded()
    load(model, f"{folder}/start")
    optimizer = optimizer_of(model)
    for step in range(2):
        tokens, positions = (x.chunk(world)[rank] for x in make_batch(4, seed=step))
        for part in range(2):
            loss_of(model, tokens[part : part + 1], positions[part : part + 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(ModelWrapper(model).state_dict(), checkpoint_id=f"{folder}/checkpoint")
    loaded = sharded()
    load(loaded, f"{folder}/checkpoint")
    whole = [
        {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in each.state_dict().items()}
        for each in (model, loaded)
    ]
    torch.save(whole, f"{folder}/{rank}.pt")


def worker(rank: int, world: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    in_group(rank, world, port, lambda: train_rank(rank, world, folder))


def test_fsdp_on_two_ranks_equals_one_process_and_keeps_the_average_in_its_checkpoint(tmp_path: Path):
    single = built()
    dcp.save(ModelWrapper(single).state_dict(), checkpoint_id=tmp_path / "start", no_dist=True)
    mp.spawn(worker, args=(2, free_port(), str(tmp_path)), nprocs=2)
    optimizer = optimizer_of(single)
    for step in range(2):
        loss_of(single, *make_batch(4, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    right = single.state_dict()
    assert right["layers.0.attention.inner_attention.scale.running_alpha"].min() > 0.05
    for rank in range(2):
        trained, loaded = torch.load(tmp_path / f"{rank}.pt")
        assert trained.keys() == loaded.keys() == right.keys()
        for name, expected in right.items():
            assert torch.equal(trained[name], loaded[name]), name
            assert_close(trained[name], expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def eight_ranks(monkeypatch):
    """A process group of eight ranks of which this process is the first; its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setattr(titan_dims, "device_type", "cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("degrees", "ranks"),
    [
        ({"dp_shard": 8}, None),
        ({"dp_replicate": 2, "dp_shard": 4}, None),
        ({"pp": 2, "dp_shard": 4}, [0, 1, 2, 3]),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, [0, 1, 2, 3]),
    ],
    ids=["fsdp", "hsdp", "pp+fsdp", "pp+hsdp"],
)
def test_the_average_is_reduced_over_the_ranks_with_the_same_layers(eight_ranks, degrees, ranks):
    dims = make_dims(**degrees, spmd_backend="partial_dtensor")
    names = ["dp_replicate", "fsdp"] if dims.dp_replicate_enabled else ["fsdp"]
    model = built()
    for layer in model.layers.values():
        fully_shard(layer, mesh=dims.get_mesh(names))
    group = ours._data_group(model)
    assert (group and dist.get_process_group_ranks(group)) == ranks


def test_the_type_system_of_torchtitan_knows_the_parameters(eight_ranks):
    import spmd_types as spmd

    layer = inner_layers(built(mechanism="sink"))[0]
    layer.parallelize(make_dims(dp_shard=8, spmd_backend="spmd_types"))
    assert all(spmd.get_local_type(parameter) for parameter in layer.parameters())
    assert layer.sink.shape == (16,)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"tp": 8}, "parallelism.tensor_parallel_degree must be 1"),
        ({"cp": 8}, "parallelism.context_parallel_degree must be 1"),
        ({"dp_shard": 8, "spmd_backend": "full_dtensor"}, "parallelism.spmd_backend must be"),
    ],
)
def test_other_ways_to_split_a_model_are_refused(degrees, words):
    with pytest.raises(ValueError) as error:
        inner_layers(built())[0].parallelize(make_dims(**degrees))
    assert words in str(error.value)


def test_context_parallelism_of_the_other_backend_is_refused():
    with pytest.raises(NotImplementedError) as error:
        apply_cp_to_forward(inner_layers(built()), SimpleNamespace())
    assert "MechanismAttention" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mechanism": "afine"}, "mechanism must be one of"),
        ({"bias_lenght": 4}, "a mechanism has no setting"),
        ({"start": "zero"}, "start must be one of 'fresh', 'identity', got 'zero'"),
        ({"mechanism": "sink", "start": "identity"}, "start=\"identity\" does not work for 'sink'"),
        ({"inner": VarlenAttention.Config(window_size=(-1, -1))}, "window_size of VarlenAttention must be (left, 0)"),
        ({"inner": ours.MechanismAttention.Config(mechanism={}, dim=4, n_heads=1, head_dim=4)}, "inner_attention must"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        spec_of(**settings)
    assert words in str(error.value)


def test_masks_are_refused():
    model = built()
    tokens, positions = make_batch()
    masks = built(mechanism=None).get_attention_masks(positions)
    with pytest.raises(ValueError) as error:
        model(tokens, positions=positions, attention_masks=masks)
    assert "attention_masks must be None" in str(error.value)


def test_all_settings_of_a_mechanism_can_be_given():
    settings = PRESETS["affine_centred"].to_dict() | {"init_std": 0.01}
    assert inner_layers(built(mechanism=settings))[0].mechanism.init_std == 0.01


def train_with_torchtitan(folder: Path, name: str, *options: str, ranks: int = 1) -> dict[int, dict[str, list[float]]]:
    """Runs torchtitan's trainer on CPU; returns the running averages of all layers after each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port",
               str(free_port()), "-m", "tests.torchtitan_on_cpu", "--module", "llama3", "--config", "llama3_debugmodel",
               "--override.imports", f'{OVERRIDE}={{"mechanism": "affine_gated", "bias_length": 64}}',
               "--training.seq_len", "64", "--training.local_batch_size", "2", "--training.global_batch_size", "8",
               "--training.disable_cuda_graphs", "--training.mixed_precision_param", "float32",
               "--optimizer.implementation", "foreach", "--checkpoint.enable", "--checkpoint.interval", "2",
               "--checkpoint.keep_latest_k", "0", "--dump_folder", name, *options]  # fmt: skip
    given = {"PYTHONPATH": str(Path(__file__).parent.parent), "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=os.environ | given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    steps: dict[int, dict[str, list[float]]] = {}
    for text in re.findall(r'{"step".*?}}', done.stdout):
        found = json.loads(text)
        seen = steps.setdefault(found["step"], {})
        assert all(seen.get(layer, values) == values for layer, values in found["averages"].items()), "ranks differ"
        seen |= found["averages"]
    return steps


@pytest.mark.slow
def test_the_trainer_trains_resumes_shards_and_pipelines(tmp_path: Path):
    """Four micro-batches a step: the averages after a resume are bitwise equal, those of a pipeline up to rounding."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    page = (Path(__file__).parent.parent / "docs/train.md").read_text()
    documents = [page[start : start + 500] for start in range(0, len(page), 500)]
    assets = tmp_path / "tests/assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    (assets / "c4_test/data.json").write_text("\n".join(json.dumps({"text": text}) for text in documents))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(vocab_size=500, special_tokens=[*special.values()]))
    tokenizer.save(str(assets / "tokenizer/tokenizer.json"))
    (assets / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))

    whole = train_with_torchtitan(tmp_path, "whole", "--training.steps", "4")
    assert list(whole) == [1, 2, 3, 4]
    for averages in whole.values():
        assert len(averages) == 6
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "resumed/checkpoint/step-2")
    assert train_with_torchtitan(tmp_path, "resumed", "--training.steps", "4") == {3: whole[3], 4: whole[4]}

    start = ["--checkpoint.initial_load_path", str(tmp_path / "whole/checkpoint/step-2"), "--training.steps", "2"]
    two = [*start, "--parallelism.spmd_backend", "partial_dtensor"]
    single = train_with_torchtitan(tmp_path, "single", *start)
    pipeline = ["--parallelism.pipeline_parallel_degree", "2", "--parallelism.pipeline_parallel_schedule", "1F1B",
                "--parallelism.pipeline_parallel_microbatch_size", "1"]  # fmt: skip
    compiled = ["--compile.enable", "--compile.backend", "aot_eager"]
    for name, options, tolerance in (
        ("pipeline", pipeline, 1e-5),
        ("sharded", compiled, 0.1),  # of other data: each rank reads its own documents
    ):
        steps = train_with_torchtitan(tmp_path, name, *two, *options, ranks=2)
        assert steps.keys() == single.keys()
        for step, averages in steps.items():
            assert averages.keys() == single[step].keys()
            for layer, values in averages.items():
                assert_close(torch.tensor(values), torch.tensor(single[step][layer]), rtol=tolerance, atol=0)
