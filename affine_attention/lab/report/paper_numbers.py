"""The numbers in Tables 1 to 5 of arXiv 2602.23057, and the settings in which they were measured (5.1, B.1)."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = {"paper_0_5b": "0.5B", "paper_1b": "1B", "paper_3b": "3B"}
STUDENTS = {"0.5B": "qwen1.5-0.5b", "1B": "llama-3.2-1b", "3B": "llama-3.2-3b"}
SETTINGS = {
    "steps": 9000,
    "global_batch": 1024,
    "sequence_length": 2048,
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "warmup_steps": 100,
    "student_changes": {},
}

# The tasks of Table 1 in order, by their names in lm-evaluation-harness.
TASKS = {
    "winogrande": "Wino",
    "piqa": "PIQA",
    "hellaswag": "Hella",
    "arc_challenge": "ARC-c",
    "arc_easy": "ARC-e",
    "boolq": "BoolQ",
}


@dataclass(frozen=True)
class Result:
    """One row of Table 1 or 2; accuracies in percent, in the order of TASKS."""

    size: str
    mechanism: str
    method: str
    delta_parameters: float
    loss: float
    perplexity: float
    accuracies: tuple[float, ...]
    average: float


TABLE_1 = (
    Result("0.5B", "softmax", "Baseline", 0.0, 2.82, 71.7, (52.6, 68.6, 45.1, 27.6, 51.5, 58.6), 50.6),
    Result("0.5B", "sink", "Sink", 0.0, 2.83, 81.5, (54.9, 68.2, 44.3, 26.7, 51.9, 58.7), 50.8),
    Result("0.5B", "affine", "Affine-Scaled", 0.4, 2.82, 70.6, (53.2, 68.8, 45.1, 28.2, 52.5, 60.2), 51.3),
    Result("1B", "softmax", "Baseline", 0.0, 2.73, 61.9, (55.6, 72.4, 53.1, 35.2, 62.5, 61.5), 56.7),
    Result("1B", "sink", "Sink", 0.0, 2.73, 68.3, (56.6, 72.7, 53.2, 34.0, 62.0, 61.7), 56.7),
    Result("1B", "affine", "Affine-Scaled", 1.0, 2.72, 58.9, (58.6, 71.7, 53.9, 35.2, 63.1, 60.8), 57.2),
    Result("3B", "softmax", "Baseline", 0.0, 2.65, 44.9, (59.0, 75.1, 60.8, 38.4, 68.1, 63.6), 60.8),
    Result("3B", "sink", "Sink", 0.0, 2.65, 48.5, (61.2, 75.7, 60.9, 40.2, 68.1, 63.5), 61.6),
    Result("3B", "affine", "Affine-Scaled", 2.1, 2.64, 40.8, (61.0, 74.8, 62.0, 41.5, 69.9, 65.1), 62.4),
)

PLUS = "Affine-Scaled + Gated"
TABLE_2 = (
    Result("1B", "softmax", "Baseline", 0.0, 2.73, 61.9, (55.6, 72.4, 53.1, 35.2, 62.5, 61.5), 56.7),
    Result("1B", "gated", "Gated", 67.1, 2.71, 56.6, (57.7, 71.9, 53.9, 33.9, 62.5, 62.8), 57.1),
    Result("1B", "affine_gated", PLUS, 68.2, 2.71, 56.2, (58.1, 72.0, 54.5, 35.3, 64.3, 64.0), 58.0),
    Result("3B", "softmax", "Baseline", 0.0, 2.65, 44.9, (59.0, 75.1, 60.8, 38.4, 68.1, 63.6), 60.8),
    Result("3B", "gated", "Gated", 264.2, 2.65, 44.6, (61.5, 74.4, 61.4, 40.4, 68.8, 63.1), 61.6),
    Result("3B", "affine_gated", PLUS, 266.3, 2.63, 42.7, (63.4, 74.6, 62.7, 41.2, 70.0, 66.4), 63.1),
)

# Average accuracy of the 1B model by activation (Table 3).
TABLE_3 = {"sigmoid": 57.6, "linear_clipping": 58.0}


@dataclass(frozen=True)
class Gradients:
    """One row of Tables 4 and 5 combined: gradient norms of steps 0 to 500."""

    size: str
    mechanism: str
    method: str
    mean: float
    std: float
    variance: float
    cv: float
    spikes_6: int
    spikes_9: int


TABLES_4_AND_5 = (
    Gradients("0.5B", "softmax", "Baseline", 0.563, 0.507, 0.257, 0.90, 40, 30),
    Gradients("0.5B", "sink", "Sink", 0.551, 0.509, 0.259, 0.92, 44, 31),
    Gradients("0.5B", "affine", "Affine-Scaled", 0.561, 0.451, 0.203, 0.80, 42, 22),
    Gradients("1B", "softmax", "Baseline", 0.907, 1.983, 3.934, 2.19, 53, 28),
    Gradients("1B", "sink", "Sink", 0.902, 1.988, 3.951, 2.20, 67, 35),
    Gradients("1B", "affine", "Affine-Scaled", 0.842, 1.702, 2.897, 2.02, 54, 27),
)
