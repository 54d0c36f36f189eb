"""All of the equation in Triton, for every visibility but dense masks, on every GPU that Triton supports."""
