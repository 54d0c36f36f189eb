"""Attacks the package with crashes, damage and hostile input: `make attack`."""
