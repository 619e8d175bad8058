"""attnrx bench: the measured latency of a model and of several ways of compressing it."""

from argparse import Namespace
from dataclasses import replace

import attnrx as rx
from attnrx.cli.options import (
    SEED,
    Number,
    Outcome,
    Parser,
    add_device,
    add_model,
    add_out,
    command,
    default_device,
    is_fresh,
    model_argument,
    option,
)
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table
from attnrx_lab.commands.methods import add_methods

SHARES = (0.5,)  # the default of --shares where --macs is not given


def _options(parser: Parser) -> None:
    add_model(parser)
    add_out(parser, "the speeds, one JSON file", kind="attnrx speeds")
    add_methods(parser, SHARES)
    batches = Number(int, lambda kinds: kinds.each(kinds.BATCH, "numbers from 1 to 65536, e.g. 1,8"), "N,N", True)
    option(parser, "--batches", batches, "images at once", "1,8,64")
    threads = Number(int, lambda kinds: kinds.each(kinds.THREADS, "numbers from 1 to 1024, e.g. 1,2"), "N,N", True)
    option(parser, "--threads", threads, "CPU threads (as many as torch takes)")
    option(parser, "--precision", ("float32", "bfloat16", "float16"), "", "float32")
    runtime = (
        "the runtime of all models, the reference's too: eager, compiled, or a format of `attnrx export`, e.g. onnx"
    )
    option(parser, "--runtime", "RUNTIME", runtime, "eager")
    # One round has no spread, and so no interval.
    rounds = Number(int, lambda kinds: kinds.whole(2, 100_000))
    option(parser, "--rounds", rounds, "rounds in which all take turns", 20)
    option(parser, "--clock", ("wall", "cpu", "cuda"), "cpu: for a machine that is busy")
    add_device(parser)
    option(parser, "--seed", SEED, "feeds fresh weights and every random draw", 0)


@command(
    "compress one model in several ways, and time each beside the model as its library ships it",
    "attnrx bench timm:deit_small_patch16_224 --methods 'spot=tokens=spot:0.7@4,7,10' 'tome=tokens=tome:0.7@4,7,10' "
    "--batches 1,8,64 --threads 1,2 --out speeds.json",
    _options,
)
def bench(arguments: Namespace, log: Log) -> Outcome:
    """Diagnoses on noise, makes every method, and times all in turns with the reference implementation."""
    from attnrx_lab import comparison

    macs = arguments.macs or ()
    shares = () if macs else arguments.shares or SHARES
    methods = comparison.parse_methods(arguments.methods)
    device = arguments.device or default_device()
    if arguments.clock == "cuda" and not device.startswith("cuda"):
        raise InvalidInput(
            f"--clock cuda times streams of a CUDA device, and the models are on {device}; take wall or cpu, or "
            "--device cuda where there is one."
        )
    if is_fresh(arguments.model) and arguments.weights is None:  # random weights, so that nothing is downloaded
        model = rx.models.build_model(arguments.model, seed=0).to(device)
    else:
        model = model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    device = str(next(model.parameters()).device)
    conditions = rx.costs.Conditions(device, arguments.precision, None, arguments.runtime == "compiled")
    # The models of another runtime are files, which are written for the precision of these conditions.
    in_torch = arguments.runtime in ("eager", "compiled")
    runtime = None if in_torch else rx.exporting.parse_format(arguments.runtime)
    threads = arguments.threads or (None,)
    protocols = tuple(
        rx.costs.LatencyProtocol(replace(conditions, threads=count), arguments.rounds, clock=arguments.clock)
        for count in threads
    )
    rates = comparison.Rates(arguments.batches, protocols, shares, macs, runtime)
    # Methods are made on the CPU; the protocols place copies of the models on their device.
    bench = comparison.noise_bench(model.to("cpu"), arguments.seed)
    speeds = comparison.compare_speeds(bench, methods, rates, log, arguments.out)
    latency = speeds.speeds[0].latency  # hardware, clock and rounds are the same in all
    summary = (
        f"{latency.hardware}, torch {latency.torch_version}, {latency.conditions.precision}, "
        f"{arguments.runtime}, {latency.clock} clock, {latency.rounds} rounds; "
        "speed-ups are medians over rounds with 95 % intervals, against the model as its library ships it"
    )
    table = aligned_table(comparison.SPEED_COLUMNS, tuple(each.cells for each in speeds.speeds))
    return Outcome(rx.serialization.read_json(arguments.out), (table, summary, f"speeds: {arguments.out}"))
