"""Plain causal and full attention: cuDNN's kernels between a prologue and an epilogue."""
