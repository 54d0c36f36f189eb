"""`python -m affine_attention` is the command `affine`, for torchrun and for machines without scripts on the path."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
