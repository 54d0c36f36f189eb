"""Turns a finished run into a model folder with a model card, ready for `push_to_hub` or `hf upload`.

    publish("runs/tiny_cpu-affine-seed0", "to-publish", license="apache-2.0")

The card states the mechanism, the settings, the fingerprint of the data, the results and the licence. Every name in it
may come from untrusted files and is escaped. Absolute paths are cut to their last part, since they name folders of the
machine. The written folder is loaded again, and its card is parsed, before the folder gets its name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from ..files import check_new_folder, creating_folder, existing_parent, expanded, open_regular, write_text
from ..hf.classes import MODULE_NAME
from ..hf.loading import load_model, load_tokenizer_of, model_folder
from ..messages import shown
from ..visible import visible
from .names import folder_name
from .recipe import Recipe
from .report.cells import Cell, Row, Table, text_cell
from .report.cells import shown as digits
from .report.collect import Run, load_run, number
from .report.groups import group_runs
from .report.markdown import inline, table_markdown
from .report.runs import flat, made_table, perplexity_table
from .report.text import short

SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".jinja")  # of the files of a model and its tokenizer
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,59}")
PAPER = "https://arxiv.org/abs/2602.23057"
MOST_ROWS = 200  # of a table of the card

BODY = """
# {title}

A language model with {mechanism} attention, trained with `affine-attention` {version}.

```python
import affine_attention.hf  # pip install "affine-attention[hf]": registers the classes of this model
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("OWNER/NAME")
tokenizer = AutoTokenizer.from_pretrained("OWNER/NAME")
```

## Mechanism

[Affine-Scaled Attention]({paper}) and its family:
out = gate * (alpha * softmax_with_sink(Q K^T / sqrt(D)) V + beta * sum of visible V).

{mechanism_table}

## Training

{recipe_table}

## Data

{data_table}

## Evaluation

{evaluation}

## Made with

{made}

## Licence

{license}
"""


def publish(run: str | Path, out: str | Path, *, license: str) -> Path:
    """Writes a folder with the model of a finished run and a model card, and returns it.

    Args:
        run: the folder of a finished run.
        out: the new folder; it must not exist.
        license: identifier of the licence as on the Hub, such as "apache-2.0" or "cc-by-4.0". You choose it: it depends
            on the data and on the teacher.

    Raises:
        ValueError: the run is not finished or damaged, its model folder holds files that are no part of a model, or the
            identifier is not one.
        OSError: `out` exists, or it cannot be written.
    """
    if not isinstance(license, str) or not LICENSE.fullmatch(license):
        raise ValueError(
            f'license must be an identifier of the Hub in lower case, such as "apache-2.0", "mit" or "cc-by-4.0", got '
            f"{shown(license)}"
        )
    target = expanded(out, "out")
    check_new_folder(target)
    found = load_run(run)
    if not found.folder.finished:
        raise ValueError(
            f"{run} holds no finished model ({found.status}); let `affine train` finish, without --discard-weights"
        )
    recipe = found.folder.recipe()
    folder = Path(model_folder(found.folder.model, "the model of the run"))
    files = _files_of(folder)
    with creating_folder(target) as temporary:
        try:
            for path in files:
                with open_regular(path) as source, open(temporary / path.name, "xb") as copy:
                    shutil.copyfileobj(source, copy)
        except OSError as error:
            free = shutil.disk_usage(existing_parent(target)).free
            raise OSError(f"{target} could not be written: {error} ({free:,} bytes free on its disk)") from error
        load_model(temporary, "the published model")
        load_tokenizer_of(temporary, "the published model")
        write_text(temporary / "README.md", model_card(found, recipe, license))
    return target


def model_card(run: Run, recipe: Recipe, license: str) -> str:
    """The model card of a run: metadata that the Hub reads, and the tables. Raises if it cannot be parsed."""
    from huggingface_hub import ModelCard, ModelCardData

    title = short(f"{run.recipe_name} {run.mechanism_name}", 80)
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["affine-attention", _tag(run.mechanism_name)],
        model_name=folder_name(title),
        eval_results=_eval_results(run) or None,
    )
    made = group_runs([run])
    heading, tables = _data_tables(run)
    body = BODY.format(
        title=inline(title),
        mechanism=inline(short(run.mechanism_name, 60)),
        version=inline(short(_version(run), 40)),
        paper=PAPER,
        mechanism_table=_settings_table("Settings of the mechanism", "As in config.json.", recipe.mechanism.to_dict()),
        recipe_table=_settings_table("Settings of the run", "See `affine recipes`.", _without_paths(recipe)),
        data_table=heading + "\n\n" + table_markdown(tables),
        evaluation="\n\n".join(table_markdown(table) for table in (_tasks_table(run), perplexity_table(made))),
        made=table_markdown(made_table(made)),
        license=f"The weights are published under `{license}`.",
    )  # fmt: skip
    text = f"---\n{data.to_yaml()}\n---\n{body}"
    if ModelCard(text).data.to_dict() != data.to_dict():
        raise ValueError(f"the model card of {run.folder.path} cannot be parsed again; does a name in it break YAML?")
    return text


def _files_of(folder: Path) -> list[Path]:
    """The files to copy; raises for links, folders, pickles and code that does not belong to a model of ours."""
    files = sorted(folder.iterdir())
    for path in files:
        is_ours = path.suffix in SUFFIXES or path.name == f"{MODULE_NAME}.py"
        if path.is_symlink() or not path.is_file() or not is_ours:
            raise ValueError(
                f"{visible(path)} is no part of a model: only regular files {', '.join(SUFFIXES)} and {MODULE_NAME}.py "
                "are published; remove it"
            )
    return files


def _version(run: Run) -> str:
    versions = run.manifest.get("versions")
    return str(versions.get("affine_attention", "")) if isinstance(versions, dict) else ""


def _tag(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()[:60]).strip("-") or "attention"


def _settings_table(title: str, caption: str, settings: dict[str, Any]) -> str:
    rows = [Row([text_cell(name), text_cell(value)]) for name, value in list(flat(settings).items())[:MOST_ROWS]]
    return table_markdown(Table(title, title, caption, ["Setting", "Value"], rows, missing="None."))


def _without_paths(recipe: Recipe) -> dict[str, Any]:
    """The settings without the mechanism, and with paths of the machine cut to their last part."""
    settings = recipe.to_dict()
    settings.pop("mechanism")
    return {name: _cut(value) for name, value in settings.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_cut(entry) for entry in value]
    if isinstance(value, dict):
        return {name: _cut(entry) for name, entry in value.items()}
    if isinstance(value, str) and value.startswith(("/", "~", "..", "beside:", "file:")):
        return Path(value.removeprefix("beside:")).name
    return value


def _data_tables(run: Run) -> tuple[str, Table]:
    data = run.manifest.get("data")
    data = data if isinstance(data, dict) else {}
    rows: list[Row] = []
    for part, name in (("training", "sources"), ("held out", "heldout")):
        sources = data.get(name)
        for source in sources if isinstance(sources, list) else []:
            if isinstance(source, dict) and len(rows) < MOST_ROWS:
                size = number(source.get("bytes"))
                rows.append(Row([
                    text_cell(part), text_cell(_cut(str(source.get("name", "")))), Cell(digits(size, 0)),
                    text_cell(source.get("sha256") or source.get("fingerprint") or "–"),
                ]))  # fmt: skip
    fingerprint = inline(short(data.get("fingerprint") or "unknown", 80))
    tokens = digits(number(run.manifest.get("train_tokens")), 0)
    words = (
        f"Fingerprint of the training data: {fingerprint}, {tokens} tokens; trained on {digits(run.tokens, 0)} tokens."
    )
    table = Table("data", "Files", "sha256 of every byte.", ["Part", "File", "Bytes", "sha256"], rows,
                  missing="The run names no files.")  # fmt: skip
    return words, table


def _tasks_table(run: Run) -> Table:
    rows = []
    for name, entry in _entries(run, "tasks"):
        rows.append(Row([
            text_cell(name), text_cell(entry.get("metric", "")), Cell(digits(number(entry.get("value")), 4)),
            Cell(digits(number(entry.get("stderr")), 4)), Cell(digits(number(entry.get("n")), 0)),
        ]))  # fmt: skip
    return Table("tasks", "Zero-shot tasks", "Scored without examples in the prompt.",
                 ["Task", "Metric", "Value", "Std. error", "Items"], rows,
                 missing="No task was measured; `affine evaluate RUN --tasks paper` does it.")  # fmt: skip


def _entries(run: Run, key: str) -> list[tuple[str, dict[str, Any]]]:
    table = run.evaluation.get(key)
    pairs = table.items() if isinstance(table, dict) else ()
    return [(name, entry) for name, entry in pairs if isinstance(entry, dict)][:MOST_ROWS]


def _eval_results(run: Run) -> list[Any]:
    """The results as the Hub's model index lists them."""
    from huggingface_hub import EvalResult

    found = []
    for name, entry in _entries(run, "perplexity"):
        if (value := number(entry.get("token"))) == value:
            found.append(_result(EvalResult, name, "perplexity", value))
    for name, entry in _entries(run, "tasks"):
        if (value := number(entry.get("value"))) == value:
            found.append(_result(EvalResult, name, short(entry.get("metric", "acc"), 40), value))
    return found


def _result(kind: Any, name: str, metric: str, value: float) -> Any:
    label = short(name, 80)
    return kind(task_type="text-generation", dataset_type=_tag(label), dataset_name=label, metric_type=metric,
                metric_value=value)  # fmt: skip
