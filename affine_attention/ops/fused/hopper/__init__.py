"""Plain causal attention on Hopper with the whole equation in one kernel each for forward and backward."""
