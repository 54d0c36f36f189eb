"""The command line `affine`: parses arguments and calls the package."""

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

MOST_SETTINGS = 1000  # --set options per command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. User errors are shown as one line; AFFINE_TRACEBACK=1 shows the traceback."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    records, warning = logging.getLogRecordFactory(), warnings.formatwarning
    logging.setLogRecordFactory(_VisibleRecord)
    warnings.formatwarning = lambda *given, **more: printable(warning(*given, **more))
    try:
        if options.command in ("study", "convert", "evaluate", "inspect", "publish"):
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
        # Our own messages have a line break only before a list; any other line break is part of a name.
        _say(said if ":\n  " in said else visible(said), sys.stderr)
        return 2
    except Exception as error:  # a bug in this package or a library
        if os.environ.get("AFFINE_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        _say(f"affine {options.command}: {reason} (unexpected; AFFINE_TRACEBACK=1 shows where)", sys.stderr)
        return 1
    finally:
        logging.setLogRecordFactory(records)
        warnings.formatwarning = warning


class _VisibleRecord(logging.LogRecord):
    """Escapes control characters in log messages and warnings of libraries, which may contain untrusted names."""

    def getMessage(self) -> str:
        return printable(super().getMessage())


class _Parser(argparse.ArgumentParser):
    """Escapes control characters in errors of argparse, which repeats unknown arguments unchanged."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="affine", description="Affine-Scaled Attention: distil, evaluate, inspect and report.")
    parser.add_argument("--version", action="version", version=f"affine_attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _add_study,
        _add_train,
        _add_convert,
        _add_evaluate,
        _add_inspect,
        _add_report,
        _add_compare,
        _add_publish,
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
    parser = _command(commands, "train", "train a student, with or without a teacher", _train)
    _add_recipe_options(parser)
    parser.add_argument("--mechanism", default="affine", help="name of a preset (default: affine)")
    parser.add_argument("--out", type=_path, metavar="RUN", help="run folder (default: runs/RECIPE-MECHANISM-seedN)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings and the cost, then exit")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --dry-run: number of devices (default: 1)")
    _add_report_to(parser)
    parser.add_argument("--no-resume", action="store_true", help="fail if the folder already holds a run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_report_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report-to", action="append", default=[], metavar="NAME", help="tensorboard, trackio, wandb, ...; repeatable"
    )


def _train(options: argparse.Namespace) -> int:
    from .lab.names import folder_name
    from .recipes import recipe

    built = recipe(options.recipe, options.mechanism, _settings(options))
    folder = options.out or Path("runs") / folder_name(f"{built.name}-{built.mechanism.name}-seed{built.seed}")
    if options.dry_run:
        from .lab.estimate import describe_run

        _say(
            describe_run(
                built.located(folder), ranks=built.sequence_parallel if options.ranks is None else options.ranks
            )
        )
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


def _add_convert(commands: Any) -> None:
    parser = _command(commands, "convert", "write a checkpoint with a mechanism that keeps its logits", _convert)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of save_pretrained, run folder, or hub name")
    parser.add_argument("--mechanism", default="affine", help="name of a preset (default: affine)")
    parser.add_argument("--out", type=_path, required=True, metavar="DIR", help="new folder for the checkpoint")
    parser.add_argument(
        "--set", action="append", default=[], dest="settings", metavar="KEY=VALUE",
        help="change a setting of the mechanism, such as bias_length=4096; repeatable",
    )  # fmt: skip
    parser.add_argument("--tokens", type=int, default=256, help="tokens on which logits are compared (default: 256)")
    parser.add_argument("--device", help="cpu or cuda, for the comparison (default: a GPU if there is one)")


def _convert(options: argparse.Namespace) -> int:
    from .lab.conversion import convert
    from .lab.recipe import parse_setting
    from .nn import Mechanism

    mechanism = Mechanism.named(options.mechanism, **dict(parse_setting(text) for text in options.settings))
    _say(convert(options.checkpoint, options.out, mechanism, tokens=options.tokens, device=options.device))
    return 0


def _add_evaluate(commands: Any) -> None:
    parser = _command(commands, "evaluate", "measure perplexity on held-out text, and zero-shot tasks", _evaluate)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="run folder or checkpoint folder")
    parser.add_argument(
        "--perplexity", action="append", default=[], metavar="NAME=FILE", help="a held-out text; repeatable"
    )
    parser.add_argument("--tasks", help="comma-separated; `paper`: the paper's six and LAMBADA")
    parser.add_argument("--task-data", type=_path, metavar="DIR", help="folder of task files, for offline use")
    parser.add_argument("--limit", type=int, help="maximum number of items per task")
    parser.add_argument("--batch-size", type=int, help="sequences per forward (default: by device)")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="dtype of the computation (default: fp32)")
    _add_engine(parser)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--output", type=_path, help="output file for a checkpoint outside of a run")
    _add_instruments(parser)
    parser.add_argument("--sequences", type=int, default=8, help="sequences for the instruments (default: 8)")


def _add_instruments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--instruments", help="all, or some of eviction,quantisation,length: losses without the first key, in low "
        "precision, and by position",
    )  # fmt: skip


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=("harness", "direct"),
        default="harness",
        help="lm-evaluation-harness, or a faster built-in scorer for ready-made contexts with the same accuracies",
    )


def _evaluate(options: argparse.Namespace) -> int:
    from .lab.evaluation import evaluate, format_evaluation

    sets = dict(_pair(text) for text in options.perplexity)
    tasks = _names(options.tasks)
    cache: dict[Any, Any] = {}  # task data is tokenised once for all runs
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
            instruments=_names(options.instruments),
            sequences=options.sequences,
            cache=cache,
        )
        _say(format_evaluation(run, found))
    return 0


def _add_inspect(commands: Any) -> None:
    parser = _command(commands, "inspect", "measure attention: row sums, first token, entropy, logits, maps", _inspect)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="run folder or checkpoint folder")
    parser.add_argument("--text", help="text file (default: the run's held-out text)")
    parser.add_argument("--sequences", type=int, default=10, help="number of sequences (default and paper: 10)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence (default and paper: 1024)")
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--output", type=_path, metavar="DIR", help="output folder for a checkpoint outside of a run")


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
    parser = _command(commands, "report", "write one page with the paper's tables and figures", _report)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="run folder")
    parser.add_argument("-o", "--output", type=_path, default=Path("report.html"), help="(default: report.html)")
    parser.add_argument("--markdown", type=_path, metavar="FILE", help="also write the tables as GitHub markdown")


def _report(options: argparse.Namespace) -> int:
    from .lab.report import report

    _say(report(options.runs, options.output, markdown=options.markdown))
    if options.markdown is not None:
        _say(options.markdown)
    return 0


def _add_compare(commands: Any) -> None:
    parser = _command(commands, "compare", "print the differences between runs: settings, results, attention", _compare)
    parser.add_argument("runs", nargs="+", type=_path, metavar="RUN", help="run folder; the first is the reference")


def _compare(options: argparse.Namespace) -> int:
    from .lab.report import compare_runs

    _say(compare_runs(options.runs))
    return 0


def _add_publish(commands: Any) -> None:
    parser = _command(commands, "publish", "write a model folder with a model card for the Hugging Face Hub", _publish)
    parser.add_argument("folder", type=_path, metavar="RUN", help="folder of a finished run")
    parser.add_argument("--out", type=_path, required=True, metavar="DIR", help="new folder for the model")
    parser.add_argument("--license", required=True, help="identifier on the Hub, such as apache-2.0 or cc-by-4.0")


def _publish(options: argparse.Namespace) -> int:
    from .lab.publication import publish

    _say(publish(options.folder, options.out, license=options.license))
    return 0


def _add_gradients(commands: Any) -> None:
    parser = _command(commands, "gradients", "gradient-norm statistics, as in the paper's Tables 4 and 5", _gradients)
    parser.add_argument("logs", nargs="+", type=_path, metavar="LOG", help="run folder or log.jsonl")
    parser.add_argument("--steps", type=int, default=500, help="number of steps (default and paper: 500)")


def _gradients(options: argparse.Namespace) -> int:
    from .lab.inspection import format_statistics, gradient_statistics

    for log in options.logs:
        _say(format_statistics(log, gradient_statistics(log, last_step=options.steps)))
    return 0


def _add_tune(commands: Any) -> None:
    parser = _command(
        commands, "tune", "find and save the fastest tile sizes of the Triton kernels for this GPU", _tune
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="D", help="default: 64 128")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="of the inputs")
    parser.add_argument("--length", type=int, default=2048, metavar="T", help="of the sequences (default: 2048)")


def _tune(options: argparse.Namespace) -> int:
    from .ops.fused import HAS_TRITON

    if not HAS_TRITON:
        raise ImportError("Triton is not installed; it is part of CUDA builds of torch")
    import torch

    if not torch.cuda.is_available():
        raise ValueError("tuning needs a CUDA GPU, but torch sees none")
    from .ops.fused.flash.tune import tune_and_save

    for line in tune_and_save(options.head_dims, getattr(torch, options.dtype), options.length):
        print(line, flush=True)
    return 0


def _add_cache(commands: Any) -> None:
    parser = _command(commands, "cache", "show or empty the cache", _cache)
    parser.add_argument("--cache", type=_path, metavar="DIR", help="cache folder (default: the user's cache)")
    parser.add_argument("--clear", action="store_true", help="remove tokenized text, tokenizers and teacher states")


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
    print("\nsettings (--set KEY=VALUE; nested: mechanism.KEY and student_changes.KEY)")
    for name, text in setting_help().items():
        print(f"  {name:<22}{text}")
    return 0


def _add_study(commands: Any) -> None:
    parser = _command(commands, "study", "train one student per mechanism and seed, evaluate, inspect, report", _study)
    _add_recipe_options(parser, "change a setting; KEY=A,B,C trains every student with each value; repeatable")
    parser.add_argument(
        "--mechanisms",
        default="softmax,sink,gated,affine,affine_gated",
        help="comma-separated, or `all` presets (default: %(default)s)",
    )
    parser.add_argument("--seeds", default="0", help="comma-separated numbers (default: 0)")
    parser.add_argument("--teacher-steps", type=int, metavar="N", help="steps of the teacher, if the study trains one")
    parser.add_argument("--out", type=_path, default=Path("runs/study"), metavar="DIR", help="(default: runs/study)")
    parser.add_argument(
        "--perplexity", action="append", default=[], metavar="NAME=FILE", help="a held-out text; repeatable"
    )
    parser.add_argument("--tasks", help="comma-separated, or `paper`; offline use needs --task-data")
    parser.add_argument("--task-data", type=_path, metavar="DIR", help="folder of task files, for offline use")
    _add_engine(parser)
    _add_instruments(parser)
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="students at a time, each in its own process"
    )
    parser.add_argument("--discard-weights", action="store_true", help="keep logs and results, not the weights")
    _add_report_to(parser)
    parser.add_argument("--plan", action="store_true", help="print the runs and their cost, then exit")
    parser.add_argument("--quiet", action="store_true", help="no live table")


def _study(options: argparse.Namespace) -> int:
    from .study import Plan, parse_settings, run_study
    from .study.plan import named_mechanisms

    sources = _source_settings(options)
    settings, sweeps = parse_settings(options.settings)
    plan = Plan(
        recipe=options.recipe,
        mechanisms=named_mechanisms(options.mechanisms),
        seeds=tuple(_whole(seed) for seed in options.seeds.split(",") if seed),
        settings=sources | settings,
        sweeps=sweeps,
        teacher_steps=options.teacher_steps,
        perplexity=dict(_pair(text) for text in options.perplexity),
        tasks=_names(options.tasks),
        task_data=options.task_data,
        engine=options.engine,
        instruments=_names(options.instruments) or (),
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
            report_to=tuple(options.report_to),
        )
        _say(page)
    except SystemExit:  # on a signal, after the step was saved
        _say(f"affine study: run the same command again to resume; finished runs are in {options.out}", sys.stderr)
        raise
    return 0


def _add_recipe_options(parser: argparse.ArgumentParser, of_set: str = "change a setting; repeatable") -> None:
    parser.add_argument("--recipe", default="tiny_cpu", help="see `affine recipes` (default: tiny_cpu)")
    parser.add_argument("--teacher", help="folder or hub name; `none`: plain cross-entropy")
    parser.add_argument("--data", action="append", metavar="SOURCE", help="file, folder, glob or hf:NAME; repeatable")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE", help=of_set)
    parser.add_argument("--device", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--cache", type=_path, metavar="DIR", help="cache folder (default: the user's cache)")


def _source_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that have options of their own: --teacher and --data."""
    settings: dict[str, Any] = {}
    if options.teacher is not None:
        settings["teacher"] = None if options.teacher.lower() == "none" else options.teacher
    if options.data:
        settings["data"] = tuple(options.data)
    if len(options.settings) > MOST_SETTINGS:
        raise ValueError(f"--set may be given at most {MOST_SETTINGS} times, got {len(options.settings):,}")
    return settings


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    from .lab.recipe import parse_setting

    return _source_settings(options) | dict(parse_setting(text) for text in options.settings)


def _say(text: object, file: Any = None) -> None:
    """Prints with control characters escaped: names may come from untrusted files."""
    print(printable(text), file=file or sys.stdout)


def _path(text: str) -> Path:
    """A path; rejects an empty string, which an unset variable gives and which would mean the working directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be an empty string; is a variable unset?")
    return Path(text)


def _quiet_transformers() -> None:
    """Switches off the progress bars of loading models."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _pair(text: str) -> tuple[str, str]:
    name, equals, file = text.partition("=")
    if not (file if equals else text).strip():
        raise ValueError(f"--perplexity must name a file, got {text!r}; is a variable unset?")
    return (name, file) if equals else (Path(text).name.split(".")[0], text)


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name for name in text.split(",") if name)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"a seed must be an integer, got {text!r}") from None
