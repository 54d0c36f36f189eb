"""The whole equation in Triton, for every visibility that is a range of keys, on every GPU that Triton serves."""
