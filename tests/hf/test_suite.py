"""The plugin that runs transformers' own tests on attached models: outcomes, and classes found by name or by file."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig
from transformers.models.auto.auto_factory import get_values

from affine_attention.hf.classes import affine_config_class

from . import suite


def test_a_failed_subtest_fails_its_test(monkeypatch):
    monkeypatch.setattr(suite, "_outcomes", {})
    for name, outcomes in {"mixed": ["passed", "failed", "passed"], "good": ["passed"], "none": ["skipped"]}.items():
        for outcome in outcomes:
            suite.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when="call", outcome=outcome))
    assert suite._outcomes == {"mixed": "failed", "good": "passed", "none": "skipped"}


def test_tests_find_attached_classes_by_name_and_by_file():
    values = suite._with_own_names(get_values)
    assert values({"llama": "LlamaModel", "bart": ("A", "B")}) == [
        "LlamaModel",
        "A",
        "B",
        "AffineLlamaModel",
        "AffineA",
        "AffineB",
    ]
    assert suite._file_of_family(affine_config_class(LlamaConfig)) == suite._file_of_family(LlamaConfig)


@pytest.mark.parametrize(("text", "said"), [("import missing_package", "missing_package"), ("", "no tests ran")])
def test_a_family_whose_tests_do_not_run_is_an_error(tmp_path, text, said):
    folder = tmp_path / "tests" / "models" / "llama"
    folder.mkdir(parents=True)
    (folder / "test_modeling_llama.py").write_text(text)
    with pytest.raises(SystemExit, match=rf"(?s)the tests of llama did not run:.*{said}"):
        suite.run(tmp_path, "llama", None, None, None)
