"""Turns text into packed token batches: sources, tokenizer, held-out split, packing, order, fingerprint.

>>> corpus = prepare("corpus/*.train.txt.xz", tokenizer="tokenizer.json", sequence_length=2048)  # doctest: +SKIP
>>> corpus.train_dataset(num_sequences=1024, seed=0)[0]["input_ids"].shape  # doctest: +SKIP
torch.Size([2048])
"""

from .corpus import Corpus, check_same_data, check_vocabulary
from .heldout import heldout_documents
from .packing import collate
from .preparation import prepare
from .sources import read_documents
from .tokenizer import load_tokenizer, train_tokenizer

__all__ = [
    "Corpus",
    "check_same_data",
    "check_vocabulary",
    "collate",
    "heldout_documents",
    "load_tokenizer",
    "prepare",
    "read_documents",
    "train_tokenizer",
]
