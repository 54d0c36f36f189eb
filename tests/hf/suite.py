"""Runs transformers' own common tests on models with a mechanism, and names those that pass on the plain model alone.

    make hf-suite TRANSFORMERS_TESTS=../transformers [SUITE="--families llama qwen2 --select test_generate"]

TRANSFORMERS_TESTS is a checkout of transformers of about the installed version (its folders tests, utils and src);
the tests run against the installed library. They need the packages parameterized and timeout-decorator.

Each family runs twice in a process of its own: plain, and with this file as a pytest plugin that replaces every model
class of a test by its `Affine...` class. A test counts if it passes on the plain model. `KNOWN` holds the reasons for
those that cannot pass on an attached model; any other failure makes the command fail.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

MECHANISM, RESULTS = "AFFINE_SUITE_MECHANISM", "AFFINE_SUITE_RESULTS"  # variables of the environment
CLASSES = ("base_model_class", "causal_lm_class", "sequence_classification_class", "token_classification_class",
           "question_answering_class", "conditional_generation_class")  # fmt: skip
# Test names without their class, and why they cannot pass on a model with a mechanism.
_OWN_NAMES = "the names eager and sdpa choose implementations of the operator and are stored under names of ours"
KNOWN: dict[str, str] = {
    "test_attention_mask_composition": "the test reads the additive mask of eager attention, and ours is boolean",
    "test_attn_implementation_composite_models": _OWN_NAMES,
    "test_can_init_all_missing_weights": "W_a is drawn outside of the function whose draws the test seeds",
    "test_can_set_attention_dynamically": _OWN_NAMES,
    "test_can_set_attention_dynamically_composite_model": _OWN_NAMES,
    "test_config_attn_implementation_setter": _OWN_NAMES,
    "test_sdpa_can_dispatch_composite_models": _OWN_NAMES,
    "test_sdpa_can_dispatch_non_composite_models": _OWN_NAMES,
    "test_inherits_generation_mixin": "the test looks at the direct bases of a class alone",
    "test_retain_grad_hidden_states_attentions": "returned weights are computed a second time, beside the output",
}
_outcomes: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """As a plugin: models of the collected tests get the mechanism that the environment names."""
    name = os.environ.get(MECHANISM)
    if not name:
        return
    common: Any = sys.modules["tests.test_modeling_common"]
    common.get_values = _with_own_names(common.get_values)
    common.inspect = types.SimpleNamespace(**vars(inspect) | {"getfile": _file_of_family})
    for kind in {item.cls for item in items if getattr(item, "cls", None) is not None}:
        if hasattr(kind, "all_model_classes"):
            kind.setUp = _with_mechanism(kind.setUp, name)
            _replace_imported(sys.modules[kind.__module__])


def pytest_runtest_logreport(report: Any) -> None:
    # A test with subtests has a report for each of them, and passes by itself where one of them failed.
    if _outcomes.get(report.nodeid) != "failed" and (report.when == "call" or report.outcome != "passed"):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    if os.environ.get(RESULTS):
        Path(os.environ[RESULTS]).write_text(json.dumps(_outcomes))


def _file_of_family(thing: Any) -> str:
    """A test reads the year of a family in the file of its configuration class."""
    return inspect.getfile(getattr(thing, "plain_class", thing))


def _with_own_names(get_values: Any) -> Any:
    """Tests find the heads and labels of a class by its name in transformers' mappings, which have no Affine.."""

    def values(mapping: Any) -> list[Any]:
        found = get_values(mapping)
        return [*found, *(f"Affine{value}" for value in found if isinstance(value, str))]

    return values


def _replace_imported(module: Any) -> None:
    """Some tests build a class by the name under which their file imports it."""
    from transformers import PreTrainedModel

    for name, value in list(vars(module).items()):
        if isinstance(value, type) and issubclass(value, PreTrainedModel) and value.config_class is not None:
            setattr(module, name, _affine(value))


def _affine(kind: Any) -> Any:
    from affine_attention.hf.classes import AffineModelMixin, affine_model_class

    return kind if issubclass(kind, AffineModelMixin) else affine_model_class(kind)


def _with_mechanism(set_up: Any, name: str) -> Any:
    from affine_attention import Mechanism
    from affine_attention.hf.classes import affine_config_class, mark_part

    def attached(config: Any) -> Any:
        if not hasattr(config, "affine_attention"):
            config.affine_attention = {"mechanism": Mechanism.named(name).to_dict(), "start": "fresh"}
            config.__class__ = affine_config_class(type(config))
            config._attn_implementation = None
            mark_part(config)
        return config

    def setUp(test: Any) -> None:
        set_up(test)
        tester = test.model_tester
        make = tester.get_config
        tester.get_config = lambda *args, **kwargs: attached(make(*args, **kwargs))
        for attribute in CLASSES:
            if getattr(tester, attribute, None) is not None:
                setattr(tester, attribute, _affine(getattr(tester, attribute)))
        test.all_model_classes = tuple(_affine(kind) for kind in test.all_model_classes)

    return setUp


def run(checkout: Path, family: str, mechanism: str | None, select: str | None, logs: Path | None) -> dict[str, str]:
    """Runs the tests of a family in a new process and returns the outcome of each by its name."""
    files = sorted((checkout / "tests" / "models" / family).glob("test_modeling_*.py"))
    if not files:
        raise SystemExit(f"families must be folders of {checkout / 'tests' / 'models'}, got {family!r}")
    here = Path(__file__).resolve()
    paths = [here.parent, here.parents[2], checkout, checkout / "utils", os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)), RESULTS: str(results), "HF_HUB_OFFLINE": "1",
            MECHANISM: mechanism or "",
        }  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-p", here.stem, "-p", "no:cacheprovider", "--noconftest", "-q",
                   "-rs", "--durations=20", "-c", os.devnull, "--rootdir", str(checkout), *map(str, files)]  # fmt: skip
        command += ["-k", select] if select else ["-k", "not Integration"]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / f"{family}-{mechanism or 'plain'}.log").write_text(done.stdout + done.stderr)
        if done.returncode not in (0, 1) or not results.is_file():  # tests failed is 1; no test ran is 2 and more
            raise SystemExit(f"the tests of {family} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return dict(json.loads(results.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of transformers, or its folder tests")
    parser.add_argument("--families", nargs="+", default=["llama", "qwen2"])
    parser.add_argument("--mechanism", default="affine")
    parser.add_argument("--select", help="an expression for pytest's -k")
    parser.add_argument("--logs", type=Path, help="a folder for pytest's output of each run")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    checkout = checkout.parent if checkout.name == "tests" else checkout
    if not (checkout / "tests" / "models").is_dir():
        parser.error(f"checkout must contain tests/models, got {given.checkout}; clone huggingface/transformers")
    unknown = 0
    for family in given.families:
        plain = run(checkout, family, None, given.select, given.logs)
        attached = run(checkout, family, given.mechanism, given.select, given.logs)
        passed = {name for name, outcome in plain.items() if outcome == "passed"}
        lost = sorted(name for name in passed if attached.get(name) != "passed")
        print(
            f"{family}: {len(passed)} pass plain, {len(passed) - len(lost)} of them with {given.mechanism}", flush=True
        )
        for name in lost:
            test = name.rpartition("::")[2]
            reason = KNOWN.get(test.partition("[")[0])
            unknown += reason is None
            print(f"  {test}: {attached.get(name, 'not run')}; {reason or 'NOT KNOWN'}", flush=True)
    sys.exit(1 if unknown else 0)


if __name__ == "__main__":
    main()
