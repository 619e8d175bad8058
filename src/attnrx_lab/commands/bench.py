"""attnrx bench: compares methods at equal budgets on several tasks, including their measured latency."""

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

import attnrx as rx
from attnrx.cli.options import (
    COUNT,
    Number,
    Outcome,
    Parser,
    add_data,
    add_model,
    add_out,
    add_running,
    add_split,
    chosen_images,
    command,
    default_device,
    is_fresh,
    model_argument,
    option,
    splits_argument,
)
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table
from attnrx_lab.commands.methods import SHARES, add_methods

if TYPE_CHECKING:
    from attnrx_lab import comparison

MACS = (0.7, 0.5, 0.35)  # the default of --macs without --faster
BATCHES = (1, 8, 64)  # the default of --batches without --data
TASKS = "classification,retrieval"  # the default of --tasks with --data


def _options(parser: Parser) -> None:
    add_model(parser)
    add_data(parser, "calibration from its training images, measurement on --split", required=False)
    add_out(parser, "a file per row, bench.json, bench.md and index.html; a run that was stopped goes on", folder=True)
    add_split(parser, "test")
    add_running(parser, 64)
    option(parser, "--calibration-images", COUNT, "training images that all methods are calibrated on", 96)
    tasks = f"some of classification, retrieval, dense and speed ({TASKS}; speed without --data)"
    option(parser, "--tasks", "TASK,TASK", tasks)
    add_methods(parser, required=False)
    budgets = parser.add_mutually_exclusive_group()
    costs = f"shares of the model's MACs ({','.join(map(str, MACS))})"
    option(budgets, "--macs", SHARES, costs)
    factors = Number(float, lambda kinds: kinds.each(kinds.FASTER, "numbers above 1, e.g. 1.3,1.6"), "X,X", True)
    option(budgets, "--faster", factors, "measured speeds in place of MACs: in --runtime, at the first of --batches")
    repeat = "measure N rows of the table again, with the next seed: exit code 1 if intervals differ"
    option(parser, "--repeat", COUNT, repeat)
    timing = parser.add_argument_group("latency, beside the model as its library ships it")
    batches = Number(int, lambda kinds: kinds.each(kinds.BATCH, "numbers from 1 to 65536, e.g. 1,8"), "N,N", True)
    option(timing, "--batches", batches, "images at once (not timed; 1,8,64 without --data)")
    threads = Number(int, lambda kinds: kinds.each(kinds.THREADS, "numbers from 1 to 1024, e.g. 1,2"), "N,N", True)
    option(timing, "--threads", threads, "CPU threads (as many as torch takes)")
    option(timing, "--precision", ("float32", "bfloat16", "float16"), "", "float32")
    runtime = (
        "the runtime of all models, the reference's too: eager, compiled, or a format of `attnrx export`, e.g. onnx"
    )
    option(timing, "--runtime", "RUNTIME", runtime, "eager")
    # A single round has no spread, so at least two rounds are needed for an interval.
    rounds = Number(int, lambda kinds: kinds.whole(2, 100_000))
    option(timing, "--rounds", rounds, "rounds in which both take turns", 20)
    option(timing, "--clock", ("wall", "cpu", "cuda"), "cpu: for a machine that is busy")


@command(
    "make the table of the field: methods at equal budgets, by task, with their measured latency",
    "attnrx bench timm:vit_tiny_patch16_224 --data imagenette --tasks classification,dense --macs 0.7,0.5 --out bench",
    _options,
)
def bench(arguments: Namespace, log: Log) -> Outcome:
    """Measures the rows that are missing from the folder, and shows the table. With --repeat, measures rows again."""
    from attnrx.nouns.target import Target
    from attnrx.support.atomic_writes import file_lock
    from attnrx_lab import comparison

    has_data, device = arguments.data is not None, arguments.device or default_device()
    names = [name.strip() for name in (arguments.tasks or (TASKS if has_data else "speed")).split(",")]
    tasks = tuple(comparison.TASKS[name].name for name in dict.fromkeys(names))
    if not has_data and tasks != ("speed",):
        raise InvalidInput(f"--tasks {arguments.tasks} needs images: give --data, or leave --tasks out to time only.")
    given = None if arguments.methods is None else comparison.parse_methods(arguments.methods)
    rates = _rates(arguments, device)
    if is_fresh(arguments.model) and arguments.weights is None and not has_data:
        model = rx.models.build_model(arguments.model, seed=0)  # random weights, so that nothing is downloaded
    else:
        model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    if has_data:
        splits = splits_argument(model, arguments, log)
        calibration = splits.train.take(min(arguments.calibration_images, len(splits.train)))
        test = chosen_images(splits, arguments)
    else:
        # Methods compress on the CPU. The protocols move copies of the models to their device.
        model = model.to("cpu")
        calibration = test = comparison.noise_images(model)
    shares = [Target("macs", share) for share in arguments.macs or MACS]
    targets = [Target("latency", 1 / factor) for factor in arguments.faster or ()] or shares
    methods = tuple(given or comparison.field_methods(model))
    about = rates, arguments.seed, arguments.batch_size
    field = comparison.FieldBench(model, calibration, test, tasks, methods, tuple(targets), *about)
    with file_lock(arguments.out, seconds=0.0):  # because two processes would measure the same rows
        if arguments.repeat is not None:
            return _repeated(field.repeat(arguments.out, arguments.repeat, log), arguments.out)
        rows = field.run(arguments.out, log)
    tables = [table.to_text() for table in comparison.tables_of(rows)]
    path = f"{arguments.out}/index.html"
    record = rx.serialization.read_json(f"{arguments.out}/bench.json")
    return Outcome(record, (*tables, comparison.about_rows(rows), f"page: {path}"))


def _rates(arguments: Namespace, device: str) -> "comparison.Rates | None":
    """Returns the timing settings, or None if latency is not measured."""
    from attnrx_lab import comparison

    batches = arguments.batches or (None if arguments.data is not None and not arguments.faster else BATCHES)
    if arguments.clock == "cuda" and not device.startswith("cuda"):
        raise InvalidInput(
            f"--clock cuda times streams of a CUDA device, and the models are on {device}; take wall or cpu, or "
            "--device cuda where there is one."
        )
    conditions = rx.costs.Conditions(device, arguments.precision, None, arguments.runtime == "compiled")
    # Outside PyTorch, models run as exported files. These conditions set the precision of the files.
    in_torch = arguments.runtime in ("eager", "compiled")
    runtime = None if in_torch else rx.exporting.parse_format(arguments.runtime)
    protocols = tuple(
        rx.costs.LatencyProtocol(replace(conditions, threads=count), arguments.rounds, clock=arguments.clock)
        for count in arguments.threads or (None,)
    )
    return None if batches is None else comparison.Rates(batches, protocols, runtime=runtime)


def _repeated(repeats: "list[comparison.Repeat]", out: str) -> Outcome:
    """Returns the table of repeated rows."""
    if not repeats:
        raise InvalidInput(f"--repeat: {out} has no measured rows of these methods and budgets; run without it first.")
    columns = ("task", "method", "budget", "measure", "stored", "again", "verdict")
    held = sum(repeat.holds for repeat in repeats)
    rows = [dict(zip(columns, repeat.cells, strict=True)) for repeat in repeats]
    table = aligned_table(columns, tuple(repeat.cells for repeat in repeats))
    verdict = f"{held} of {len(repeats)} rows hold: their intervals overlap with the intervals of the table"
    return Outcome({"repeats": rows, "held": held}, (table, verdict), 0 if held == len(repeats) else 1)
