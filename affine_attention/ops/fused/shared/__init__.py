"""Code shared by the kernel families: launches, tile sizes, functions on tiles, sums of values, the side stream."""
