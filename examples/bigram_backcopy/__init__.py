"""Attention sinks from scratch: the Bigram-Backcopy task of Guo et al. (arXiv 2410.13835), for every mechanism."""
