"""A few queries against a cache, without gradients."""
