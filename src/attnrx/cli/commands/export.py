"""attnrx export: writes a model as a file that runs without attnrx, and compares its outputs with the model's."""

from argparse import Namespace

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.inputs import model_argument, splits_argument
from attnrx.cli.outcome import Outcome
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table

SUMMARY = "write a model as a file that runs without attnrx, checked against the model"
EXAMPLE = (
    "attnrx export slim --to onnx --out slim.onnx\n"
    "  attnrx export slim --to int8 --data imagenette --out slim-int8.onnx\n"
    "  attnrx verify slim.onnx --reference slim --data imagenette --checks accuracy,fidelity --out evidence.json"
)
FORMATS = (
    "onnx, program (torch.export), aotinductor, openvino, executorch or int8, with knobs in brackets: onnx(opset=18), "
    "int8(images=128,tolerance=0.05), openvino(precision=bf16), openvino(precision=int8)"
)


def add(parser: options.Parser) -> None:
    options.add_model(parser)
    options.option(parser, "--to", "FORMAT", FORMATS, "onnx")
    options.add_out(parser, "the file; its facts are written to PATH.json", kind="attnrx exported model")
    options.add_arguments(
        parser, "export", "features", batch=options.batch, precision=("float32", "bfloat16", "float16")
    )
    options.add_data(
        parser, "training images for calibration of int8 and for parity (parity: on noise)", required=False
    )
    options.add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    form = rx.exporting.parse_format(arguments.to)
    # A runtime for the CPU is compared with the model on the CPU.
    device = arguments.device if form.on_cuda else "cpu"
    model = model_argument(arguments.model, device, arguments.weights, arguments.trust)
    splits = None if arguments.data is None else splits_argument(model, arguments)
    calibration = None if splits is None else splits.train
    # The file has class names, so that it can be used without the data.
    names = () if splits is None else rx.exporting.fitting_names(model, splits.class_names)
    log(f"writing {arguments.model} as {form.name}, and comparing its outputs with the model's")
    settings = options.given_arguments(arguments, "batch", "precision", "features")
    exported = rx.export(model, arguments.out, form, **settings, calibration=calibration, class_names=names)
    facts = exported.facts
    rows = tuple(
        (
            each["claim"],
            f"{each['value']:.3g} {each['unit']}".rstrip(),
            "" if each["limit"] is None else f"{each['limit']:g}",
        )
        for each in facts["parity"]
    )
    size = facts["images"]["batch"]
    shape = " x ".join(map(str, (size or "N", *facts["images"]["shape"])))
    lines = (
        f"takes {shape} at {facts['images']['precision']}; facts: {arguments.out}.json",
        f"exported: {arguments.out}",
    )
    record = {"exported": str(arguments.out), **facts}
    return Outcome(record, (aligned_table(("parity", "value", "limit"), rows), *lines))
