"""Experiments whose designs were written before their runs; README.md lists them."""
