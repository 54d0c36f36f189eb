"""Students of a recipe differ only in their mechanism, and settings that do not fit are reported."""

from __future__ import annotations

import pytest
import torch

from affine_attention.hf import is_attached, student
from affine_attention.lab.inspection.capture import mechanism_layers
from affine_attention.lab.recipe import Recipe
from affine_attention.lab.training.student import build_student, check_fit, check_teacher, explain_attention
from affine_attention.nn.mechanism import PRESETS

from .runs import STUDENT


def recipe(mechanism="affine", **changes):
    return Recipe(**({"mechanism": mechanism, "student_changes": STUDENT, "sequence_length": 32} | changes))


def shared(model):
    return {name: tensor for name, tensor in model.state_dict().items() if ".affine." not in name}


def test_shared_weights_are_equal_for_one_seed():
    plain = shared(build_student(recipe("softmax", seed=3)))
    for name in PRESETS:
        torch.rand(7)  # whatever was drawn before
        own = shared(build_student(recipe(name, seed=3)))
        assert own.keys() == plain.keys()
        assert all(torch.equal(own[key], plain[key]) for key in plain), name
    other = shared(build_student(recipe("softmax", seed=4)))
    assert not torch.equal(other["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])


def test_building_one_draws_nothing_from_the_process():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_student(recipe())
    assert torch.equal(torch.rand(3), expected)


def test_a_plain_model_of_a_folder_gets_the_mechanism_and_keeps_its_outputs(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**STUDENT)).eval()
    plain.save_pretrained(tmp_path)
    model = build_student(recipe("affine", student=str(tmp_path), student_changes={})).eval()
    assert is_attached(model)
    assert mechanism_layers(model)[0].mechanism.bias
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError) as error:
        build_student(recipe(student=str(tmp_path)))
    assert "student_changes must be empty" in str(error.value)


def test_settings_that_do_not_fit_are_reported_with_valid_values():
    model = build_student(recipe())
    check_fit(recipe(), model, 320)
    with pytest.raises(ValueError) as error:
        check_fit(recipe(), model, 321)
    assert "ids up to 320" in str(error.value)
    assert "student_changes.vocab_size=321" in str(error.value)
    with pytest.raises(ValueError) as error:
        check_fit(recipe(sequence_length=9000), model, 320)
    assert "9000 exceeds the 8192 positions" in str(error.value)
    teacher = student("llama-1m", "softmax", **(STUDENT | {"vocab_size": 384, "max_position_embeddings": 16}))
    with pytest.raises(ValueError) as error:
        check_teacher(recipe(), model, teacher)
    assert "320 differs from the teacher's 384" in str(error.value)
    with pytest.raises(ValueError) as error:
        check_teacher(recipe(truncate_vocabulary=True), model, teacher)
    assert "the 16 positions of the teacher" in str(error.value)


@pytest.mark.parametrize("mechanism", sorted(PRESETS))
@pytest.mark.parametrize("document_boundaries", [False, True])
def test_the_attention_that_runs_is_explained(mechanism, document_boundaries):
    settings = recipe(mechanism, document_boundaries=document_boundaries)
    found = explain_attention(settings, build_student(settings), 2, torch.device("cpu"))
    assert found["implementation"] == "composed"
    assert "needs a CUDA GPU" in found["why"]
