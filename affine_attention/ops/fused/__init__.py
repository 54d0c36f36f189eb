"""Triton kernels of the operator; imported on first use."""
