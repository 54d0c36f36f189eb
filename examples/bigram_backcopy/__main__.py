"""Trains small transformers on the Bigram-Backcopy task and prints where their attention goes.

    python -m examples.bigram_backcopy                      # softmax, sink, head_gated and affine: a minute on a laptop
    python -m examples.bigram_backcopy --mechanisms all --layers 3 --steps 1500

At a token that is no trigger, attention has nothing to add. softmax must put its weight somewhere and picks <s>, whose
value shrinks: an attention sink. A mechanism with alpha or a gate can scale the output of the head down instead.
`studies/experiments/e3.py` runs eight mechanisms with five seeds; docs/experiments.md has the result.
"""

from __future__ import annotations

import argparse

import torch

from affine_attention import Mechanism

from .measure import measure
from .model import Setting, make_model, train
from .task import make_task

ALL = ("softmax", "off_by_one", "sink", "gated", "head_gated", "affine_no_bias", "affine", "affine_gated")
COLUMNS = ("mechanism", "bigram", "backcopy", "F_p", "F_w", "value", "scale")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mechanisms", nargs="+", default=["softmax", "sink", "head_gated", "affine"], metavar="NAME",
        help="presets, or all for eight of them",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names = list(ALL) if given.mechanisms == ["all"] else given.mechanisms
    for name in names:
        chosen = Mechanism.named(name)  # raises for an unknown one before anything is trained
        if chosen.weights != "softmax" or chosen.differential:
            raise ValueError(f"mechanisms must have softmax weights, whose part on <s> is measured, got {name!r}")
    torch.set_num_threads(1)  # the models are too small for more
    setting, task = Setting(layers=given.layers, steps=given.steps), make_task()
    data = task.sample(setting.batch * setting.steps, setting.length, seed=1000 + given.seed)
    held_out = task.sample(128, setting.length, seed=7)
    triggers = ", ".join(repr(letter) for letter in task.characters[:3])
    print(
        f"{setting.layers} layer(s), width {setting.width}, {setting.steps} steps of {setting.batch} x {setting.length}"
    )
    print(f"tokens; triggers are {triggers}; seed {given.seed}.\n")
    print(f"{COLUMNS[0]:<16}" + "".join(f"{column:>10}" for column in COLUMNS[1:-1]) + f"{COLUMNS[-1]:>16}")
    for name in names:
        model = make_model(task, setting, name, given.seed)
        train(model, data, setting)
        found = measure(model, task, held_out)
        layer = max(found["layers"], key=lambda each: each["first_softmax_bigram"])
        kind = "alpha" if "alpha" in layer else "gate" if "gate" in layer else None
        scale = "-" if kind is None else f"{layer[f'{kind}_bigram']:.2f} -> {layer[f'{kind}_backcopy']:.2f}"
        numbers = (
            found["loss_bigram_excess"], found["loss_backcopy"], layer["first_softmax_bigram"],
            layer["first_weight_bigram"], layer["value_norm_first"],
        )  # fmt: skip
        print(f"{name:<16}" + "".join(f"{number:>10.3f}" for number in numbers) + f"{scale:>16}", flush=True)
    print(
        "\nbigram, backcopy: loss above the entropy of the task, in nats. At tokens that are no triggers, in the layer"
    )
    print(
        "where it is largest: F_p, weight of the softmax part on <s>; F_w, weight alpha p + beta on <s>. value: norm of"
    )
    print("the value of <s> relative to the others. scale: alpha (or mean gate) at other tokens -> at triggers.")


if __name__ == "__main__":
    main()
