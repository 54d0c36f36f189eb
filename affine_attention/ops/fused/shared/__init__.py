"""What the kernel families share: launches, tile sizes, tiles, sums of values, the side stream."""
