"""One script a subject; results go to benchmarks/results/."""
