"""A teacher is complete, frozen, read without pickles, and has the student's tokens."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from affine_attention.hf.loading import model_folder
from affine_attention.lab.distill.loss import DistillLoss
from affine_attention.lab.distill.teacher import check_same_tokens, load_teacher, load_teacher_tokenizer
from tests.hf.models import make_model, make_tokens, plain_model

DATA = Path(__file__).parents[4] / "shared" / "data"


def words(*tokens, splits=pre_tokenizers.Whitespace):
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.pre_tokenizer = splits()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0])


@pytest.mark.parametrize("make", [plain_model, make_model])
def test_it_is_the_same_model_frozen(make, tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    teacher = load_teacher(tmp_path)
    assert not teacher.training
    assert not any(p.requires_grad for p in teacher.parameters())
    ids = make_tokens()
    torch.testing.assert_close(teacher(ids).logits, model(ids).logits)
    assert load_teacher(str(tmp_path), dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_the_folder_of_a_run(tmp_path):
    plain_model("llama").save_pretrained(tmp_path / "model")
    assert model_folder(tmp_path) == str(tmp_path / "model")
    assert load_teacher(tmp_path).config.hidden_size == 32
    assert load_teacher_tokenizer(tmp_path) is None


def test_the_tokenizer_in_its_folder(tmp_path):
    plain_model("llama").save_pretrained(tmp_path)
    words("?", "a", "b").save_pretrained(tmp_path)
    check_same_tokens(words("?", "a", "b"), load_teacher_tokenizer(tmp_path))


def test_a_pickle_is_not_read(tmp_path):
    model = plain_model("llama")
    model.config.save_pretrained(tmp_path)

    class Boom:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"weight": Boom()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        load_teacher(tmp_path)
    assert "pytorch_model.bin" in str(error.value)
    assert "save_pretrained" in str(error.value)
    assert not (tmp_path / "ran").exists()


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    import json

    plain_model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Odd", "AutoModelForCausalLM": "odd.OddModel"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Odd: pass\n")
    with pytest.raises(ValueError):
        load_teacher(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_teacher_with_random_parts_is_rejected(tmp_path):
    from safetensors.torch import load_file, save_file

    plain_model("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError) as error:
        load_teacher(tmp_path)
    assert "no weights for model.layers.0.mlp.up_proj.weight" in str(error.value)


def test_invalid_folders(tmp_path):
    with pytest.raises(FileNotFoundError) as missing:
        load_teacher(tmp_path / "nowhere")
    assert "nowhere" in str(missing.value)
    with pytest.raises(ValueError) as empty:
        load_teacher(tmp_path)
    assert "no config.json" in str(empty.value)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError) as file:
        load_teacher(tmp_path / "file")
    assert "got the file" in str(file.value)
    assert model_folder("somebody/model") == "somebody/model"


def test_the_same_tokens():
    check_same_tokens(words("?", "a", "b"), words("?", "a", "b", "c"))
    with pytest.raises(ValueError) as error:
        check_same_tokens(words("?", "a", "b", "c"), words("?", "b", "a"))
    for part in ("has 4 tokens, the teacher's 3", "3 of the student's", "'a' is 1 for the student and 2", "tokenizer="):
        assert part in str(error.value)
    with pytest.raises(ValueError) as error:
        check_same_tokens(words("?", "s"), words("?", "s", splits=pre_tokenizers.WhitespaceSplit))
    assert "split text differently" in str(error.value)


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "teacher").is_dir(), reason="the quantised SmolLM2 is not on this machine")
def test_the_quantised_teacher_becomes_an_ordinary_one(tmp_path):
    from studies.smollm2.make_teacher import make_teacher

    make_teacher(DATA / "teacher", tmp_path)
    teacher, tokenizer = load_teacher(tmp_path, dtype=torch.bfloat16), load_teacher_tokenizer(tmp_path)
    assert len(tokenizer) == teacher.config.vocab_size == 49152
    spec = importlib.util.spec_from_file_location("load_smollm2", DATA / "teacher" / "load_smollm2.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    expected, _ = loader.load(str(DATA / "teacher"), torch.bfloat16)
    state = teacher.state_dict()
    assert all(torch.equal(state[name], x) for name, x in expected.items())
    assert state.keys() - expected.keys() == {"lm_head.weight"}
    text = (DATA / "heldout" / "wikitext2_raw_test.txt").read_text()[:8000]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :1024]
    with torch.no_grad():
        parts = DistillLoss(0, 1)(teacher.float(), None, {"input_ids": ids, "labels": ids})
    # 13.7 in the first thousand tokens of WikiText-2, about 28 in the first ten thousand.
    assert math.exp(parts.ce_sum / parts.tokens) == pytest.approx(13.7, rel=0.02)
