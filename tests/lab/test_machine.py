"""Results record the machine and the versions that made them."""

from __future__ import annotations

import torch

from affine_attention.lab.machine import describe_machine, now


def test_the_machine_is_described():
    machine = describe_machine("cpu")
    assert torch.__version__.startswith(machine["versions"]["torch"].split("+")[0])
    assert machine["device"].startswith("cpu")
    assert machine["date"][:16] == now()[:16]
