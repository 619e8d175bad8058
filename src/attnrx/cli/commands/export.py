"""attnrx export: a model in, a file that runs without attnrx out, checked against the model."""

from argparse import Namespace
from dataclasses import fields, replace

import attnrx as rx
from attnrx.cli.inputs import load_model, splits_for
from attnrx.cli.options import OPSET, batch
from attnrx.cli.outcome import Outcome, Table
from attnrx.cli.parser import Parser, add_data, add_device, add_model, add_out
from attnrx.errors import InvalidInput
from attnrx.progress import Log

SUMMARY = "write a model as a file that runs without attnrx, checked against the model"
EXAMPLE = (
    "attnrx export slim --to onnx --out slim.onnx\n"
    "  attnrx export slim --to int8 --data imagenette --out slim-int8.onnx\n"
    "  attnrx verify slim.onnx --reference slim --data imagenette --checks accuracy,fidelity --out evidence.json"
)


def add(parser: Parser) -> None:
    """Declares the options."""
    add_model(parser)
    parser.add_argument(
        "--to",
        default="onnx",
        metavar="FORMAT",
        help="onnx, program (torch.export), aotinductor, openvino or int8, with knobs in brackets: onnx(opset=18), "
        "int8(images=128,method=percentile,attention=true) (onnx)",
    )
    add_out(parser, "the file; its facts go beside it, into PATH.json", kind="attnrx exported model")
    parser.add_argument(
        "--batch",
        type=batch,
        default="dynamic",
        metavar="N",
        help="images at once, or dynamic for any (dynamic)",
    )
    parser.add_argument("--opset", type=OPSET, metavar="N", help="the version of ONNX's operators, 18 to 23 (20)")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16", "float16"), help="of weights and images (the model's own)"
    )
    add_data(parser, "calibration of int8, and parity, on its training images (parity alone: noise)", required=False)
    add_device(parser)


def run(arguments: Namespace, log: Log) -> Outcome:
    """Exports, and tells what was compared."""
    form = _format(arguments)
    device = arguments.device if form.on_cuda else "cpu"
    model = load_model(arguments.model, device, arguments.weights, arguments.trust)
    calibration = None if arguments.data is None else splits_for(model, arguments).train
    log(f"writing {arguments.model} as {form.name}, and running it beside the model")
    exported = rx.export(
        model,
        arguments.out,
        form,
        batch=arguments.batch,
        precision=arguments.precision,
        calibration=calibration,
    )
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
    lines = f"takes {shape} at {facts['images']['precision']}; facts: {arguments.out}.json"
    record = {"exported": str(arguments.out), **facts}
    return Outcome(record, (Table(("parity", "value", "limit"), rows), lines, f"exported: {arguments.out}"))


def _format(arguments: Namespace) -> "rx.exporting.Format":
    form = rx.exporting.parse_format(arguments.to)
    if arguments.opset is None:
        return form
    if "opset" not in {field.name for field in fields(form)}:  # type: ignore[arg-type]
        raise InvalidInput(f"--opset {arguments.opset} goes with onnx and int8; {form.name} has no operators of ONNX.")
    return replace(form, opset=arguments.opset)  # type: ignore[type-var]
