"""From text to report: data, distillation, evaluation, inspection. Each stage reads and writes the folder of a run."""
