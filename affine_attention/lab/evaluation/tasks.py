"""Turns a folder of task data into lm-evaluation-harness tasks that need no network.

A file is named after its task and, optionally, its split: `piqa.jsonl`, `arc_easy_test.jsonl`. It holds either the
original records of the data set (json lines, parquet or arrow; the harness's own task definition is used) or ready-made
contexts, one json object per line, in one of three forms:

    {"ctx": "Question: ..\\nAnswer:", "choices": ["yes", "no"], "gold": 0}          one context, several continuations
    {"ctxs": ["Ann met Bo, so Ann", ".. so Bo"], "continuation": "left.", "gold": 1}  several contexts, one continuation
    {"ctx": "She opened the", "target": " door"}                                    the last word, as in LAMBADA

A space is inserted between a context and its continuation, but not before a target.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ...files import kind, open_regular, parse_json
from ...messages import did_you_mean

LONGEST_LINE = 16 * 2**20  # bytes of one item


class Task(NamedTuple):
    """A task of the harness: the metric that tables report, the split, the definition file and the fields it needs."""

    metric: str
    split: str
    definition: str  # in lm_eval/tasks
    fields: tuple[str, ...]


# The paper does not name its metrics. Tables report acc_norm (normalised by answer length) if the harness computes it,
# else acc; all metrics are stored.
TASKS: dict[str, Task] = {
    "winogrande": Task(
        "acc", "validation", "winogrande/default.yaml", ("sentence", "option1", "option2", "answer")
    ),
    "piqa": Task("acc_norm", "validation", "piqa/piqa.yaml", ("goal", "sol1", "sol2", "label")),
    "hellaswag": Task(
        "acc_norm", "validation", "hellaswag/hellaswag.yaml", ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    ),
    "arc_challenge": Task("acc_norm", "test", "arc/arc_challenge.yaml", ("question", "choices", "answerKey")),
    "arc_easy": Task("acc_norm", "test", "arc/arc_easy.yaml", ("question", "choices", "answerKey")),
    "boolq": Task("acc", "validation", "super_glue/boolq/default.yaml", ("passage", "question", "label")),
    "lambada_openai": Task("acc", "test", "lambada/lambada_openai.yaml", ("text",)),
    "openbookqa": Task("acc_norm", "test", "openbookqa/openbookqa.yaml", ("question_stem", "choices", "answerKey")),
}  # fmt: skip
DEFAULT_TASKS = ("winogrande", "piqa", "hellaswag", "arc_challenge", "arc_easy", "boolq", "lambada_openai")
LOCAL = "_local"  # suffix of the harness's name for a task that is read from a file: piqa_local

SPLITS = {"": "", "test": "test", "val": "validation", "valid": "validation", "validation": "validation",
          "dev": "validation", "train": "train"}  # fmt: skip
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}  # loaders of `datasets`
FORMS = {
    "choices": ("ctx", "choices", "gold"),
    "contexts": ("ctxs", "continuation", "gold"),
    "target": ("ctx", "target"),
}


class TaskFile(NamedTuple):
    """A file of task data. `form` is one of FORMS, or "records" for the original records."""

    task: str
    split: str
    path: Path
    form: str

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the harness computes for ready-made contexts of this task."""
        if self.form == "target":
            return ("perplexity", "acc")
        if self.form == "contexts" or (self.task in TASKS and TASKS[self.task].metric == "acc"):
            return ("acc",)
        return ("acc", "acc_norm")

    @property
    def metric(self) -> str:
        """The metric that tables report."""
        return TASKS[self.task].metric if self.task in TASKS else self.metrics[-1]

    def sha256(self) -> str:
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def find_tasks(task_data: Path | str) -> dict[str, TaskFile]:
    """The tasks that a folder has data for. If a task has several files, the split that the harness uses is chosen."""
    folder = Path(task_data)
    if not folder.is_dir():
        raise FileNotFoundError(f"task_data must be a folder of task files, got {folder}")
    candidates: dict[str, list[tuple[str, Path]]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in READERS and path.is_file() and not path.name.startswith("."):
            task, split = split_name(path.stem)
            if split != "train":
                candidates.setdefault(task, []).append((split, path))
    found = {}
    for task, files in candidates.items():
        wanted = TASKS[task].split if task in TASKS else "test"
        preference = [wanted, "", "test", "validation"]
        split, path = min(files, key=lambda entry: (preference.index(entry[0]), entry[1]))
        form = form_of(path, task)
        if form is not None:
            found[task] = TaskFile(task, split, path.resolve(), form)
    if not found:
        raise ValueError(
            f"task_data={str(folder)!r} holds no task; name a file after its task, like piqa.jsonl or "
            f"arc_easy_test.jsonl ({', '.join(TASKS)}), or give ready-made contexts (ctx, choices, gold) any name"
        )
    return found


def split_name(stem: str) -> tuple[str, str]:
    """("arc_easy", "test") for "arc_easy_test"; a name without a split has the split ""."""
    for ending, split in SPLITS.items():
        for mark in "_-.":
            if ending and stem.endswith(mark + ending):
                return stem[: -len(mark + ending)], split
    return stem, ""


def form_of(path: Path, task: str) -> str | None:
    """The form of a file, from the fields of its first record; None for a file that is not a task."""
    fields = first_fields(path)
    for form, needed in FORMS.items():
        if path.suffix in (".jsonl", ".json") and fields.issuperset(needed):
            return form
    if task not in TASKS:
        return None
    missing = [name for name in TASKS[task].fields if name not in fields]
    if missing:
        raise ValueError(
            f"{path} must hold original records of {task} (fields {', '.join(TASKS[task].fields)}) or ready-made "
            f"contexts (ctx, choices, gold); its first record lacks {', '.join(missing)} and has "
            f"{', '.join(sorted(fields)) or 'nothing'}"
        )
    return "records"


def first_fields(path: Path) -> set[str]:
    if READERS[path.suffix] == "json":
        return set(next((item for _, item in _objects(path)), {}))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(f'{path} needs pyarrow; pip install "affine-attention[eval]"') from error
    try:
        if path.suffix == ".parquet":
            return set(pyarrow.parquet.read_schema(path).names)
        with pyarrow.memory_map(str(path)) as source:
            try:
                return set(pyarrow.ipc.open_stream(source).schema.names)
            except pyarrow.ArrowInvalid:
                return set(pyarrow.ipc.open_file(source).schema.names)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a complete {path.suffix} file ({reason}); is it truncated?") from error


def read_items(file: TaskFile) -> Iterator[dict[str, Any]]:
    """The ready-made items of a file, validated; errors name the line."""
    for where, item in _objects(file.path):
        missing = [name for name in FORMS[file.form] if name not in item]
        if missing:
            raise ValueError(f"{where}: must have the fields {', '.join(FORMS[file.form])}, lacks {missing[0]}")
        for name in FORMS[file.form]:
            if name in ("choices", "ctxs"):
                if not isinstance(item[name], list) or not item[name] or not all(map(_is_text, item[name])):
                    raise ValueError(f"{where}: {name} must be a list of non-empty strings")
            elif name != "gold" and not isinstance(item[name], str):
                raise ValueError(f"{where}: {name} must be a string, got {kind(item[name])}")
        if file.form != "target":
            several = item["choices" if file.form == "choices" else "ctxs"]
            if type(item["gold"]) is not int or not 0 <= item["gold"] < len(several):
                raise ValueError(f"{where}: gold must be 0 to {len(several) - 1}, got {repr(item['gold'])[:80]}")
        yield item


def check_items(file: TaskFile) -> None:
    """Raises ValueError if the file is empty or has an item that cannot be scored."""
    if not sum(1 for _ in read_items(file)):
        raise ValueError(f"{file.path} must hold at least one item, got none")


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of each non-empty line."""
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{where}: must have at most {LONGEST_LINE:,} bytes, got more")
            if not line.strip():
                continue
            try:
                item = parse_json(line, "it")
            except ValueError as error:
                raise ValueError(f"{where}: not a json object ({error}); write one json object per line") from error
            if not isinstance(item, dict):
                raise ValueError(f"{where}: not a json object but {kind(item)}; write one json object per line")
            yield where, item


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def choose_tasks(names: Iterable[str] | None, found: dict[str, TaskFile]) -> list[TaskFile]:
    """The files of the requested tasks; None: all of DEFAULT_TASKS that the folder has."""
    if names is None:
        chosen = [found[name] for name in DEFAULT_TASKS if name in found]
        if not chosen:
            raise ValueError(f"task_data holds none of {', '.join(DEFAULT_TASKS)}; name tasks of {', '.join(found)}")
        return chosen
    chosen = []
    for name in names:
        if name not in found:
            hint = "" if name in TASKS else did_you_mean(name, [*found, *TASKS])
            raise ValueError(f"task_data has no file for the task {name!r}{hint}; it has {', '.join(found)}")
        chosen.append(found[name])
    return chosen


def write_tasks(task_data: Path | str, directory: Path | str, tasks: Iterable[str] | None = None) -> list[str]:
    """Writes a task definition for each task of a folder, for the harness's command line; returns the task names.

    >>> write_tasks("evals", "definitions")  # doctest: +SKIP
    ['arc_challenge_local', 'arc_easy_local', ..]

    Then `lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True --tasks piqa_local --include_path
    definitions`. Definitions hold the absolute path of the data.
    """
    found = find_tasks(task_data)
    chosen = list(found.values()) if tasks is None else choose_tasks(tasks, found)
    return [write_definition(file, Path(directory)) for file in chosen]


def write_definition(task: TaskFile | str, directory: Path) -> str:
    """Writes a harness definition that reads the task from its file, or for a name the harness's own definition."""
    import yaml

    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(task, TaskFile):
        settings = definition(task)
    else:
        settings = {"include": str(harness_folder() / "tasks" / TASKS[task].definition), "task": task, "tag": None}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    (directory / f"{settings['task']}.yaml").write_text(text, encoding="utf-8")
    return settings["task"]


def definition(file: TaskFile) -> dict[str, Any]:
    """The harness's definition of a local task."""
    split = TASKS[file.task].split if file.form == "records" else "test"
    settings: dict[str, Any] = {
        "task": file.task + LOCAL,
        "dataset_path": READERS[file.path.suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(file.path)}},
        "training_split": None,
        "validation_split": None,
        "test_split": None,
        "fewshot_split": None,
    }
    settings[f"{split}_split"] = split
    if file.form == "records":
        return {"include": str(harness_folder() / "tasks" / TASKS[file.task].definition), **settings, "tag": None}
    text, choices, target = {
        "choices": ("ctx", "choices", "gold"),
        # If doc_to_text is an index, the harness uses the choices as contexts.
        "contexts": ("gold", "ctxs", "continuation"),
        "target": ("ctx", None, "target"),
    }[file.form]
    return settings | {
        "output_type": "loglikelihood" if file.form == "target" else "multiple_choice",
        "doc_to_text": text,
        "doc_to_target": target,
        **({"doc_to_choice": choices} if choices else {}),
        "metric_list": [
            {
                "metric": metric,
                "aggregation": "perplexity" if metric == "perplexity" else "mean",
                "higher_is_better": metric != "perplexity",
            }
            for metric in file.metrics
        ],
        "metadata": {"version": 1.0},
    }


def harness_folder() -> Path:
    """Where lm-evaluation-harness is installed."""
    try:
        import lm_eval
    except ImportError as error:
        raise ImportError(
            'tasks need lm-evaluation-harness 0.4.10 or newer: pip install "affine-attention[eval]"; ready-made '
            'contexts do not need it with engine="direct"'
        ) from error
    return Path(lm_eval.__file__).parent
