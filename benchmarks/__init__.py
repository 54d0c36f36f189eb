"""One script per subject; results go to benchmarks/results/."""
