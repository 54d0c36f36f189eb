"""Attacks the package as a hostile but fair tester would: `make attack`."""
