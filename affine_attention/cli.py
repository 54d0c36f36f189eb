"""The command `affine`: parse, build, call, nothing else."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .version import __version__
from .visible import printable, visible

MOST_SETTINGS = 1000  # of one command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; errors that a user can mend are one line, not a traceback (AFFINE_TRACEBACK=1 shows it)."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    records, warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = lambda *given, **more: printable(warning(*given, **more))
    try:
        if options.command in ("study", "evaluate", "inspect"):
            _quiet_transformers()
        return options.run(options) or 0
    except KeyboardInterrupt:
        print("affine: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `affine recipes | head`
        sys.stderr.close()
        return 0
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError, MemoryError) as error:
        if os.environ.get("AFFINE_TRACEBACK"):
            raise
        said = f"affine {options.command}: {str(error) or 'out of memory'}"
        # A line break is ours where a list follows. Elsewhere it is part of a name.
        _say(said if ":\n  " in said else visible(said), sys.stderr)
        return 2
    except Exception as error:  # a fault of this package or of a library: one line all the same
        if os.environ.get("AFFINE_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        _say(f"affine {options.command}: {reason} (unexpected; AFFINE_TRACEBACK=1 shows where)", sys.stderr)
        return 1
    finally:
        logging.setLogRecordFactory(records)
        warnings.formatwarning = warning


class _VisibleRecord(logging.LogRecord):
    """What libraries log, and what they warn of, repeats names from files, too."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


class _Parser(argparse.ArgumentParser):
    """argparse repeats unknown arguments as they are: a shell pattern can expand to any file name."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="affine", description="Affine-Scaled Attention: distil, evaluate, look inside, report.")
    parser.add_argument("--version", action="version", version=f"affine_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_study,
        _add_train,
        _add_evaluate,
        _add_inspect,
        _add_report,
        _add_gradients,
        _add_tune,
        _add_cache,
        _add_recipes,
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", "train a student, from a teacher or from text alone", _train)
    _add_recipe_options(parser)
    parser.add_argument("--mechanism", default="affine", help="a preset's name (default: affine)")
    parser.add_argument("--out", type=_path, metavar="RUN", help="its folder (default: runs/RECIPE-MECHANISM-seedN)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved run and its cost, and stop")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: devices to plan for (default: 1)")
    parser.add_argument("--report-to", action="append", default=[], metavar="NAME", help="tensorboard, wandb, ...")
    parser.add_argument("--no-resume", action="store_true", help="refuse a folder that holds a run already")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _train(options: argparse.Namespace) -> int:
    from .lab.names import folder_name
    from .recipes import recipe

    built = recipe(options.recipe, options.mechanism, _settings(options))
    folder = options.out or Path("runs") / folder_name(f"{built.name}-{built.mechanism.name}-seed{built.seed}")
    if options.dry_run:
        from .lab.estimate import describe_run

        _say(describe_run(built, ranks=1 if options.ranks is None else options.ranks))
        return 0
    from .lab.training import train

    path = train(
        built,
        folder,
        resume=not options.no_resume,
        quiet=options.quiet or None,
        report_to=tuple(options.report_to),
        device=options.device,
        cache=options.cache,
    )
    _say(path)
    return 0


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", "perplexity on held-out text, and zero-shot tasks", _evaluate)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="folder of a run, or of a checkpoint")
    parser.add_argument(
        "--perplexity", action="append", default=[], metavar="NAME=FILE", help="a held-out set; may be given again"
    )
    parser.add_argument("--tasks", help="names with commas; `paper`: the paper's six and LAMBADA (default with data)")
    parser.add_argument("--task-data", type=_path, metavar="DIR", help="records of the tasks, to run without network")
    parser.add_argument("--limit", type=int, help="at most this many items of a task")
    parser.add_argument("--batch-size", type=int, help="sequences in a forward (default: chosen by the device)")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="dtype of the computation (default: fp32)")
    _add_engine(parser)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--output", type=_path, help="where the numbers go for a checkpoint that is not in a run")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("harness", "direct"),
        default="harness",
        help="lm-evaluation-harness, or our own scorer for ready-made contexts: the same accuracies, faster",
    )


def _evaluate(options: argparse.Namespace) -> int:
    from .lab.evaluation import evaluate, format_evaluation

    sets = dict(_pair(text) for text in options.perplexity)
    tasks = None if options.tasks is None else [name for name in options.tasks.split(",") if name]
    cache: dict[Any, Any] = {}  # the tokens of a task are made once for all runs
    for run in options.runs:
        found = evaluate(
            run,
            perplexity=sets,
            tasks=tasks,
            task_data=options.task_data,
            limit=options.limit,
            batch_size=options.batch_size,
            autocast=options.autocast,
            engine=options.engine,
            device=options.device,
            output=options.output,
            cache=cache,
        )
        _say(format_evaluation(run, found))
    return 0


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "look inside: row sums, first token, entropy, logits, maps", _inspect)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="folder of a run, or of a checkpoint")
    parser.add_argument("--text", help="a file to look at (default: the run's held-out text)")
    parser.add_argument("--sequences", type=int, default=10, help="how many (the paper: 10)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each (the paper: 1k)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--output", type=_path, metavar="DIR", help="where the numbers go for a bare checkpoint")


def _inspect(options: argparse.Namespace) -> int:
    from .lab.inspection import format_inspection, inspect

    for run in options.runs:
        found = inspect(
            run,
            text=options.text,
            sequences=options.sequences,
            length=options.length,
            device=options.device,
            output=options.output,
        )
        _say(format_inspection(run, found))
    return 0


def _add_report(commands: Any) -> None:
    parser = _command(commands, "report", "one page with the paper's tables and figures for these runs", _report)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="folder of a run")
    parser.add_argument("-o", "--output", type=_path, default=Path("report.html"), help="(default: report.html)")
    parser.add_argument("--markdown", type=_path, metavar="FILE", help="the same tables as GitHub markdown too")


def _report(options: argparse.Namespace) -> int:
    from .lab.report import report

    _say(report(options.runs, options.output, markdown=options.markdown))
    if options.markdown is not None:
        _say(options.markdown)
    return 0


def _add_gradients(commands: Any) -> None:
    parser = _command(commands, "gradients", "gradient norms of a log, as in the paper's Tables 4 and 5", _gradients)
    parser.add_argument("logs", nargs="+", type=_path, metavar="LOG", help="a run's folder, or any log.jsonl")
    parser.add_argument("--steps", type=int, default=500, help="the first so many steps (the paper: 500)")


def _gradients(options: argparse.Namespace) -> int:
    from .lab.inspection import format_statistics, gradient_statistics

    for log in options.logs:
        _say(format_statistics(log, gradient_statistics(log, last_step=options.steps)))
    return 0


def _add_tune(commands: Any) -> None:
    parser = _command(
        commands, "tune", "find the fastest tile sizes of the Triton kernels for this GPU, and save them", _tune
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D", help="default: 64 128")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the calls")
    parser.add_argument("--length", type=int, default=2048, metavar="T", help="of the sequences (default: 2048)")


def _tune(options: argparse.Namespace) -> int:
    from .ops.fused import HAS_TRITON

    if not HAS_TRITON:
        raise ImportError("Triton is needed, which is not installed; CUDA builds of torch bring it along")
    import torch

    if not torch.cuda.is_available():
        raise ValueError("a CUDA GPU is needed, and torch sees none; on the CPU there is nothing to tune")
    from .ops.fused.flash.tune import tune_and_save

    for line in tune_and_save(options.head_dims, getattr(torch, options.dtype), options.length):
        print(line, flush=True)
    return 0


def _add_cache(commands: Any) -> None:
    parser = _command(commands, "cache", "show what is kept to be used again, and empty it", _cache)
    parser.add_argument("--cache", type=_path, metavar="DIR", help="(default: the user's cache)")
    parser.add_argument("--clear", action="store_true", help="remove tokenized text, tokenizers and teachers' states")


def _cache(options: argparse.Namespace) -> int:
    from .cache import cache_entries, cache_limit, clear_cache, default_cache

    folder = options.cache or default_cache()
    if options.clear:
        _say(f"{folder}: {clear_cache(folder) / 1e9:.2f} GB freed")
        return 0
    entries = cache_entries(folder)
    total = sum(entry.bytes for entry in entries)
    _say(f"{folder}: {len(entries)} entries, {total / 1e9:.2f} GB of {cache_limit() / 1e9:g} (AFFINE_CACHE_LIMIT)")
    for entry in entries:
        _say(f"  {entry.path.name:<36}{entry.bytes / 1e9:>10.2f} GB")
    return 0


def _add_recipes(commands: Any) -> None:
    _command(commands, "recipes", "list the recipes, the mechanisms and every setting", _recipes)


def _recipes(options: argparse.Namespace) -> int:
    from .lab.recipe import setting_help
    from .nn.mechanism import PRESETS
    from .recipes import RECIPES

    print("recipes")
    for name, function in RECIPES.items():
        print(f"  {name:<22}{(function.__doc__ or '').splitlines()[0]}")
    print("\nmechanisms\n  " + ", ".join(PRESETS))
    print("\nsettings (--set key=value; mechanism.KEY and student_changes.KEY reach inside)")
    for name, text in setting_help().items():
        print(f"  {name:<22}{text}")
    return 0


def _add_study(commands: Any) -> None:
    parser = _command(commands, "study", "distil one student for each mechanism, evaluate, inspect, report", _study)
    _add_recipe_options(parser)
    parser.add_argument(
        "--mechanisms",
        default="softmax,sink,gated,affine,affine_gated",
        help="with commas (default: %(default)s)",
    )
    parser.add_argument("--seeds", default="0", help="numbers with commas (default: 0)")
    parser.add_argument("--teacher-steps", type=int, metavar="N", help="of the teacher, when the study trains it")
    parser.add_argument("--out", type=_path, default=Path("runs/study"), metavar="DIR", help="(default: runs/study)")
    parser.add_argument("--perplexity", action="append", default=[], metavar="NAME=FILE", help="a held-out set more")
    parser.add_argument("--tasks", help="names with commas, or `paper`; needs --task-data without network")
    parser.add_argument("--task-data", type=_path, metavar="DIR", help="records of the tasks, to run without network")
    _add_engine(parser)
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="students at a time, each in its process")
    parser.add_argument("--discard-weights", action="store_true", help="keep logs and results of a student, no weights")
    parser.add_argument("--plan", action="store_true", help="print what would run and its cost, and stop")
    parser.add_argument("--quiet", action="store_true", help="no live table")


def _study(options: argparse.Namespace) -> int:
    from .study import Plan, run_study

    plan = Plan(
        recipe=options.recipe,
        mechanisms=tuple(name for name in options.mechanisms.split(",") if name),
        seeds=tuple(_whole(seed) for seed in options.seeds.split(",") if seed),
        settings=_settings(options),
        teacher_steps=options.teacher_steps,
        perplexity=dict(_pair(text) for text in options.perplexity),
        tasks=None if options.tasks is None else tuple(name for name in options.tasks.split(",") if name),
        task_data=options.task_data,
        engine=options.engine,
    )
    if options.plan:
        _say(plan.describe())
        return 0
    try:
        page = run_study(
            plan,
            options.out,
            device=options.device,
            quiet=options.quiet or None,
            parallel=options.parallel,
            keep_weights=not options.discard_weights,
            cache=options.cache,
        )
        _say(page)
    except SystemExit:  # a signal: the step is saved
        _say(f"affine study: the same command goes on from here; what is done stays in {options.out}", sys.stderr)
        raise
    return 0


def _add_recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipe", default="tiny_cpu", help="see `affine recipes` (default: tiny_cpu)")
    parser.add_argument("--teacher", help="folder or hub name; none: plain cross-entropy")
    parser.add_argument("--data", action="append", metavar="SOURCE", help="file, folder, glob or hf:NAME; repeatable")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help="any setting of the recipe"
    )
    parser.add_argument("--device", help="cpu or cuda (default: a GPU where there is one)")
    parser.add_argument("--cache", type=_path, metavar="DIR", help="for tokenized text (default: the user's cache)")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    from .lab.recipe import parse_setting

    settings: dict[str, Any] = {}
    if options.teacher is not None:
        settings["teacher"] = None if options.teacher.lower() == "none" else options.teacher
    if options.data:
        settings["data"] = tuple(options.data)
    if len(options.settings) > MOST_SETTINGS:
        raise ValueError(f"--set may be given {MOST_SETTINGS} times, got {len(options.settings):,}")
    return settings | dict(parse_setting(text) for text in options.settings)


def _say(text: object, file: Any = None) -> None:
    """Prints with control characters spelled out: names come from files and folders of others."""
    print(printable(text), file=file or sys.stdout)


def _path(text: str) -> Path:
    """A path of the command line; an empty one, of an unset variable, is not the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must be named, got an empty text; is a variable unset?")
    return Path(text)


def _quiet_transformers() -> None:
    """No bar for each of the models that a command loads."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _pair(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not (file if equals else text).strip():
        raise ValueError(f"--perplexity must name a file, got {text!r}; is a variable unset?")
    return (name, file) if equals else (Path(text).name.split(".")[0], text)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a seed is a whole number, got {text!r}") from None
