"""Tiny checkpoints, a tokenizer and hand-written task records for the tests of evaluation."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from affine_attention import Mechanism
from affine_attention.hf import student
from tests.hf.models import spread

ROOT = Path(__file__).parent.parent.parent.parent
TEXT = ROOT / "affine_attention" / "lab" / "embedded" / "gutenberg_pd_mini.txt"
SHARED = ROOT.parent / "shared" / "data"
END = "<|endoftext|>"


@lru_cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(TEXT)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def tiny_model(mechanism: str = "affine", **settings: Any):
    """A student that is far from uniform: its choices differ by much more than rounding."""
    torch.manual_seed(0)
    mechanism_ = Mechanism.named(mechanism, **({"bias_length": 64} | settings))
    model = student("llama-1m", mechanism_, vocab_size=len(tiny_tokenizer()), num_hidden_layers=2)
    spread(model, 0.15)
    return model.eval()


def save_checkpoint(folder: Path, mechanism: str = "affine", **settings: Any) -> Path:
    tiny_model(mechanism, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def some_documents(count: int = 8) -> list[str]:
    """Documents of very different lengths, with characters of several bytes and words apart by more than a space."""
    words = TEXT.read_text(encoding="utf-8")[5000:60000].split(" ")
    documents, start = [], 0
    for index in range(count):
        size = 1 + (37 * index * index) % 160
        documents.append(" ".join(words[start : start + size]))
        start += size
    documents[1] += " — naïve café  \n two\n"
    return documents


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def _arc(questions: list[tuple[str, list[str], str]], labels: str) -> list[dict[str, Any]]:
    return [
        {"question": question, "choices": {"text": answers, "label": list(labels[: len(answers)])}, "answerKey": key}
        for question, answers, key in questions
    ]


# A few records of each task in the fields of the original data sets.
RECORDS: dict[str, list[dict[str, Any]]] = {
    "piqa": [
        {
            "goal": "How do you dry a wet hat?",
            "sol1": "Hang it by the fire. ",
            "sol2": "Put it in the sea.",
            "label": 0,
        },
        {"goal": "open a jar", "sol1": "Sing to the lid", "sol2": "Turn the lid round and round", "label": 1},
        {"goal": "Keep bread soft", "sol1": "in a box", "sol2": "in the sun all day long", "label": 0},
        {"goal": "To light a lamp,", "sol1": "pour water on it.", "sol2": "use a match.", "label": 1},
        {"goal": "Find a lost shoe", "sol1": "look under the bed", "sol2": "look at the moon", "label": 0},
    ],
    "arc_easy": _arc(
        [
            ("What falls from the clouds?", ["rain", "stones", "bread", "gold"], "A"),
            ("Which animal can fly?", ["a horse", "a sparrow", "a fish in the river"], "B"),
            ("What does a seed need?", ["water", "a hat", "a letter", "a very long story"], "A"),
            ("Where does the sun rise?", ["west", "north", "south", "east"], "D"),
        ],
        "ABCD",
    ),
    "arc_challenge": _arc(
        [
            ("Why does ice float?", ["It is warm", "It is lighter than water", "It is white", "It sings"], "2"),
            ("What makes a shadow?", ["light that is stopped", "wind", "sound", "cold rain"], "1"),
            ("Which is the hardest?", ["butter", "wool", "a diamond", "a cake"], "3"),
        ],
        "1234",
    ),
    "openbookqa": [
        {
            "question_stem": "The moon gives light because",
            "choices": {"text": ["it burns", "the sun shines on it", "it is old", "it is near"], "label": list("ABCD")},
            "answerKey": "B",
        },
        {
            "question_stem": "A bird keeps warm with",
            "choices": {"text": ["feathers", "stones", "songs", "the wind in the trees"], "label": list("ABCD")},
            "answerKey": " A",
        },
    ],
    "boolq": [
        {"passage": "The cat is a small animal.", "question": "is a cat an animal", "label": 1},
        {"passage": "Rivers run to the sea. — So it is said.", "question": "do rivers run uphill", "label": 0},
        {"passage": "Tin is a metal.", "question": "is tin a kind of wood", "label": 0},
    ],
    "winogrande": [
        {
            "sentence": "The fox could not catch the hare because _ was too quick.",
            "option1": "the fox",
            "option2": "the hare",
            "answer": "2",
        },
        {
            "sentence": "Ann thanked Bess, for _ had helped her.",
            "option1": "Ann",
            "option2": "Bess",
            "answer": "2",
        },
        {
            "sentence": "The box did not fit in the bag, as _ was too small.",
            "option1": "the bag",
            "option2": "the box",
            "answer": "1",
        },
    ],
    "lambada_openai": [
        {"text": "Alice looked at the white rabbit, and the rabbit looked at Alice"},
        {"text": "She had lost her hat. She looked everywhere, but nobody had seen the hat"},
        {"text": "the king and the queen and the king and the queen and the king"},
    ],
    "hellaswag": [
        {
            "activity_label": "Cooking",
            "ctx_a": "A man stands at a stove.",
            "ctx_b": "he",
            "endings": ["stirs the pot.", "flies away. [substeps] Up.", "eats the stove.", "reads  a tree."],
            "label": "0",
        },
        {
            "activity_label": "Home and Garden",
            "ctx_a": "[header] How to plant a tree [title] Dig a hole.",
            "ctx_b": "then",
            "endings": ["sleep in it", "put the tree in the hole", "paint the hole", "call the hole"],
            "label": "1",
        },
    ],
}


def ready_made(task: str, record: dict[str, Any]) -> dict[str, Any]:
    """The same item as a context, choices and the right one."""
    if task == "piqa":
        question, choices, gold = record["goal"], [record["sol1"], record["sol2"]], record["label"]
        return {"ctx": f"Question: {question}\nAnswer:", "choices": choices, "gold": gold}
    if task in ("arc_easy", "arc_challenge", "openbookqa"):
        gold = record["choices"]["label"].index(record["answerKey"].strip())
        stem = record.get("question_stem") or f"Question: {record['question']}\nAnswer:"
        return {"ctx": stem, "choices": record["choices"]["text"], "gold": gold}
    if task == "boolq":
        context = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
        return {"ctx": context, "choices": ["no", "yes"], "gold": record["label"]}
    if task == "winogrande":
        before, after = record["sentence"].split("_")
        contexts = [before + record["option1"], before + record["option2"]]
        return {"ctxs": contexts, "continuation": after.strip(), "gold": int(record["answer"]) - 1}
    if task == "lambada_openai":
        context, _, word = record["text"].rpartition(" ")
        return {"ctx": context, "target": f" {word}"}

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}")
    return {"ctx": context, "choices": [clean(text) for text in record["endings"]], "gold": int(record["label"])}


def write_records(folder: Path) -> Path:
    for task, records in RECORDS.items():
        write_lines(folder / f"{task}.jsonl", records)
    return folder


def write_contexts(folder: Path) -> Path:
    for task, records in RECORDS.items():
        write_lines(folder / f"{task}_test.jsonl", [ready_made(task, record) for record in records])
    return folder
