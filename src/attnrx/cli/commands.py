"""The commands of attnrx. The decorator `command` registers a function as the command of the same name.

Functions of attnrx are called as `rx.NAME`. This imports their modules only on first use, so that --help is fast. Other
packages register commands in the same way, in modules that they name as entry points of the group `attnrx.commands`.
"""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attnrx as rx
from attnrx.cli import options
from attnrx.cli.options import COMMANDS, Outcome, Parser, command, option
from attnrx.support.errors import InvalidInput
from attnrx.support.progress import Log
from attnrx.support.tables import aligned_table
from attnrx.vit.maps import FITS

if TYPE_CHECKING:
    from torch import nn

__all__ = ["COMMANDS"]  # this registry contains attnrx's own commands once this module is imported

Part = TypeVar("Part")

# The quantities of the findings that judge each measured target. MACs and parameters are not measured, because plans
# meet these targets by construction.
MEASURED_TARGETS = {
    "latency": ("promised speed", "speed"),
    "max-drop": ("promised_change",),
    "max-kl": ("divergence",),
    "recall": ("index recall",),
}


def _shrink_options(parser: Parser) -> None:
    options.add_model(parser, "the model to make smaller")
    options.add_data(parser, "the images to plan and to verify on")
    target = parser.add_mutually_exclusive_group(required=True)
    limits = {"faster": "TIMES", "macs": "SHARE", "params": "SHARE", "max_kl": "DIVERGENCE", "size": "MB"}
    options.add_arguments(target, "shrink", **limits, recall="SHARE", max_drop=options.POINTS)
    options.add_out(parser, "the folder of the model, its file, evidence, report and card", "runs/shrunk", folder=True)
    options.add_arguments(parser, "shrink", "batch", "threads", "seed", "effort", "portable", "multiple", to="FORMAT")
    options.add_arguments(parser, "shrink", "keep_index")
    option(parser, "--no-onnx", bool, "write no model.onnx; with --to only the file of that format is written")
    option(parser, "--opset", options.COUNT, "the operator set version of model.onnx, 17 to 23 (23)")
    options.add_device(parser)


@command(
    "make a model smaller and faster for a target, without labels, and verify what it cost",
    "attnrx shrink timm:vit_tiny_patch16_224 --data imagenette224.parquet --faster 1.6 --out runs/shrunk",
    _shrink_options,
)
def shrink(arguments: Namespace, log: Log) -> Outcome:
    log(f"loading {arguments.model} and {arguments.data}")
    model = options.model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    splits = options.splits_argument(model, arguments)
    settings = options.given_arguments(arguments, "shrink")
    shrunk = rx.shrink(model, splits, **settings, folder=arguments.out, log=log)
    log(shrunk.summary())
    log("writing the folder")
    timing = {name: settings[name] for name in ("batch", "threads") if name in settings}
    version = {} if arguments.opset is None else {"opset": arguments.opset}
    onnx = False if arguments.no_onnx else None
    folder = shrunk.save(arguments.out, onnx, **version, original=model, **timing)
    deployed = folder / str(shrunk.evidence.about.get("file", "model.safetensors"))
    record = {
        "summary": shrunk.summary(),
        "folder": str(folder),
        "prescription": None if shrunk.prescription is None else str(shrunk.prescription),
        "files": rx.reports.written_files(folder),
        "evidence": shrunk.evidence.to_record(),
        "deploy": str(deployed),
    }
    lines: list[str] = [aligned_table(*rx.reports.files_table(folder)), f"report: {folder / 'report.html'}"]
    lines += [f"deploy: {deployed}", shrunk.summary()]
    failed = shrunk.evidence.failures
    missed = [is_target(finding, shrunk.target.quantity) for finding in failed]
    notes = (failure(finding, target) for finding, target in zip(failed, missed, strict=True))
    lines += notes  # the summary contains the warnings
    if shrunk.is_portable:
        record["loading_code"] = rx.models.loading_code(shrunk.model, folder)
        lines.append(f"without attnrx:\n\n{record['loading_code']}")
    return Outcome(record, tuple(lines), code=1 if any(missed) else 0)


def is_target(finding: "rx.Finding", quantity: str) -> bool:
    """Returns whether a finding checks the user's own target, rather than another prediction of the plan."""
    return finding.details.get("quantity") in MEASURED_TARGETS.get(quantity, ())


def failure(finding: "rx.Finding", target: bool) -> str:
    """Returns a line of text about a failed finding: the user's `target` was missed, or only a prediction was wrong."""
    value, limit = (f"{each:.4g} {finding.unit}".rstrip() for each in (finding.value, finding.limit or 0.0))
    start = "target missed" if target else "worse than the plan predicted (not your target)"
    return f"{start}: {finding.claim}: {value}, limit {limit}"


def _elastic_options(parser: Parser) -> None:
    options.add_model(parser, "the model to make smaller")
    options.add_data(parser, "the images to plan and to verify on")
    budgets = parser.add_mutually_exclusive_group(required=True)
    options.add_arguments(budgets, "elastic", faster="TIMES", macs="SHARES", params="SHARES")
    options.add_out(parser, "the folder of the sizes; load PATH@macs=0.65 or PATH@faster=1.4", folder=True)
    options.add_arguments(parser, "elastic", "batch", "threads", "seed", "effort", "portable", "multiple")
    options.add_device(parser)


@command(
    "make several sizes of a model in one folder, to load the best one within a budget",
    "attnrx elastic timm:vit_tiny_patch16_224 --data imagenette224.parquet --macs 0.8,0.6 --out runs/sizes",
    _elastic_options,
)
def elastic(arguments: Namespace, log: Log) -> Outcome:
    log(f"loading {arguments.model} and {arguments.data}")
    model = options.model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    settings = options.given_arguments(arguments, "elastic")
    sizes = rx.elastic(model, options.splits_argument(model, arguments), arguments.out, **settings, log=log)
    return Outcome(sizes.to_record(), (*map(str, sizes.sizes), f"sizes: {sizes.folder}"))


LOSSES = "terms added to the task, e.g. target_rank:16:0.1 perturbation_robustness:layers=3/4 task:0 (no smoothing)"


def _train_options(parser: Parser) -> None:
    options.add_model(parser)
    options.add_data(parser, "the training data")
    options.add_out(parser, "the folder of the run: model, history, training.json, checkpoints", folder=True)
    tokens = f"train with token pruning or merging: {options.POLICY}; predictors are initialized from --seed"
    option(parser, "--tokens", "POLICY", tokens)
    knobs = parser.add_argument_group("training")
    fields = {name: field.value for name, field in options.parameters("TrainingConfig").items()}
    # Settings that are a single number, a flag or a choice become options as they are.
    plain = [name for name, kind in fields.items() if kind != "TEXT" and not getattr(kind, "several", False)]
    options.add_arguments(knobs, "TrainingConfig", *plain)
    option(knobs, "--losses", "LOSS", LOSSES, nargs="+")
    option(knobs, "--no-task", bool, "train without the task loss: labels are not read")
    option(knobs, "--teacher", "MODEL", "the teacher of distillation losses: a folder or timm:NAME")
    option(knobs, "--teacher-weights", "FILE", "the weights of a teacher timm:NAME, in a local file")


@command(
    "train a model, or resume an interrupted run",
    "attnrx train svda:cifar10 --data cifar10 --out runs/cifar10 --epochs 4 --seed 42",
    _train_options,
)
def train(arguments: Namespace, log: Log) -> Outcome:
    # The losses are parsed first, so that a typo is reported before the dataset is loaded.
    settings = options.given_arguments(arguments, "TrainingConfig")
    teaching = {"teacher": arguments.teacher, "weights": arguments.teacher_weights}
    shared = {knob: value for knob, value in teaching.items() if value is not None}
    # Without these options, TrainingConfig's default losses are used, which smooth the labels.
    if arguments.losses or shared or arguments.no_task:
        settings["losses"] = options.parse_losses(arguments.losses or (), shared, not arguments.no_task)
    config = rx.TrainingConfig(**settings)
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    model, splits = _model_and_data(arguments, config.seed, log)
    if arguments.batch_size is None and len(splits.train) < config.batch_size:
        # The batch is made smaller, so that an epoch has at least four steps if there are enough images.
        config = replace(config, batch_size=max(1, len(splits.train) // 4))
        log(f"{splits.name} has {len(splits.train)} training images: a batch is {config.batch_size} of them")
    if policy is not None:
        # The policy is attached before training, because its predictors are trained together with the model.
        model = _reducing(model, policy, config, log)
    trained = rx.train(model, splits, config, arguments.out, log=log)
    accuracy = trained.record["accuracy"]
    best = accuracy["best_epoch"]  # None if the validation images do not have the model's labels
    names = ("test", "validation, last epoch", "validation, best epoch" + ("" if best is None else f" ({best})"))
    shares = (accuracy[name] for name in ("test", "validation", "best_validation"))
    rows = [(name, "-" if each is None else f"{100 * each:.2f} %") for name, each in zip(names, shares, strict=True)]
    record = {"model": str(trained.folder), **{key: trained.record[key] for key in ("accuracy", "steps", "seconds")}}
    return Outcome(record, (aligned_table(("", "accuracy"), rows), f"model and history: {trained.folder}"))


def _reducing(
    model: "nn.Module", policy: "rx.tokens.TokenPolicy", config: "rx.TrainingConfig", log: Log
) -> "nn.Module":
    """Returns the model with the token policy attached. Predictors are initialized from the run's seed."""
    if policy.reducer.learned and "keep_ratio" not in [loss.name for loss in config.losses]:
        log(
            f"warning: {policy.reducer} is trained with sampled masks, and without the loss keep_ratio their shares "
            "may differ from the policy's; add --losses keep_ratio."
        )
    from attnrx.nouns.prescription import TokenPrescription

    tokens = TokenPrescription(policy, seed=config.seed)
    return rx.realize(model, rx.prescribe(model, {"tokens": tokens}))


def _model_and_data(arguments: Namespace, seed: int, log: Log) -> "tuple[nn.Module, rx.data.Splits]":
    """Returns the model and its data. A saved model determines the preprocessing. A new model is built for the data."""
    # A new model is built twice. The first model sets the image size with which the data are loaded. The second model
    # has the channels, classes and normalization of the data.
    model = rx.load(arguments.model, seed, weights=arguments.weights, trust=arguments.trust)
    family = rx.models.own_family(arguments.model)
    if family is None or not family.fits_data or Path(arguments.model).exists():
        return model, options.splits_argument(model, arguments, log)
    channels, size, _ = family.input_shape(model)
    splits = options.load_splits(arguments, image_size=size)
    for note in splits.notes:
        log(f"{splits.name}: {note}")
    classes = len(splits.class_names)
    if (splits.channels, classes) != (channels, rx.models.num_outputs(*family.heads(model))):
        log(f"{arguments.model} is built for this data: {splits.channels} channels, {classes} classes")
    scale = splits.normalization
    shape = {"channels": splits.channels, "classes": classes, "image_size": splits.image_size}
    shape["geometry"] = splits.geometry
    return rx.models.build_model(arguments.model, seed, mean=scale.mean, std=scale.std, **shape), splits


# The readings in the printed table. The file contains all readings.
SHOWN = ("effective_rank", "effective_rank_mix", "sparsity", "alignment", "selectivity")


def _diagnose_options(parser: Parser) -> None:
    options.add_model(parser)
    options.add_data(parser, "the images to run the model on")
    options.add_out(parser, "the diagnosis: a JSON file, and its tensors in a second file", kind="attnrx diagnosis")
    options.add_split(parser, "validation")
    options.add_running(parser, 64)
    options.add_arguments(parser, "diagnose", "moments")


@command(
    "measure the spectra and indicators of every layer and head of a model",
    "attnrx diagnose runs/cifar10 --data cifar10 --out diagnosis.json",
    _diagnose_options,
)
def diagnose(arguments: Namespace, log: Log) -> Outcome:
    model = options.model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    images = options.chosen_images(options.splits_argument(model, arguments, log), arguments)
    log(f"diagnosing {arguments.model} on {len(images):,} images")
    settings = options.given_arguments(arguments, "diagnose")
    diagnosis = rx.diagnose(model, images, batch_size=arguments.batch_size, seed=arguments.seed, **settings)
    path = diagnosis.save(arguments.out)
    record = {
        "diagnosis": str(path),
        "fingerprint": diagnosis.fingerprint,
        "images": len(images),
        "notes": diagnosis.about.get("notes", []),
        "layers": rx.serialization.read_json(path)["layers"],
    }
    # Which readings a diagnosis contains depends on the form of attention.
    names = [name for name in SHOWN if all(name in layer.readings for layer in diagnosis.layers)]
    rows = tuple(
        (
            f"layer {index + 1}, head {head + 1}",
            str(int(layer.spectrum.rank[row])),
            *(f"{float(layer.readings[name][row]):.3f}" for name in names),
        )
        for index, layer in enumerate(diagnosis.layers)
        for row, head in enumerate(layer.spectrum.heads)
    )
    table = aligned_table(("", "rank", *(name.replace("_", " ") for name in names)), rows)
    return Outcome(record, (table, f"diagnosis: {path}"))


SUBJECT = (
    "the file of a diagnosis; or, for tokens=POLICY alone, a model: a saved folder, timm:NAME, hf:ID, or a name such "
    "as dense:cifar10"
)
RULES = (
    "the rule of every map: qk=RULE for query and key, vo=RULE for value and output, fc1=RULE, fc2=RULE for the MLP, "
    "hidden=RULE for its hidden units, heads=RULE for whole heads, tokens=POLICY. RULE: NAME:KNOB,..., joined by & and "
    "|, e.g. total_rank:0.5, uniform_rank:0.5,metric=weights, 'energy_retention:0.9 | top_rank:8'. POLICY: "
    + options.POLICY
)


def _prescribe_options(parser: Parser) -> None:
    parser.add_argument("diagnosis", metavar="DIAGNOSIS", help=SUBJECT)
    option(parser, "--weights", "FILE", "the weights of a model that is given by its name, in a local file")
    options.add_trust(parser)
    option(parser, "--rules", "MAP=RULE", RULES, nargs="+", required=True)
    options.add_arguments(parser, "prescribe", "portable", "multiple")
    kind = "attnrx prescription"
    options.add_out(parser, "the prescription: a JSON file, and a second file if it has tensors", kind=kind)


@command(
    "decide which directions, heads and tokens of a model to prune",
    "attnrx prescribe diagnosis.json --rules qk=energy_retention:0.90 --out prescription.json",
    _prescribe_options,
)
def prescribe(arguments: Namespace, log: Log) -> Outcome:
    """Makes and saves the prescription."""
    # A rule may contain spaces, at which the shell splits it, so the arguments are joined again.
    rules = rx.rules.split_maps(" ".join(arguments.rules))
    settings = options.given_arguments(arguments, "prescribe")
    prescription = rx.prescribe(_diagnosis(arguments), rules, **settings)
    path, tokens, depth = prescription.save(arguments.out), prescription.tokens, prescription.depth
    notes = list(prescription.about.get("notes", ()))
    record = {
        "prescription": str(path),
        "rules": dict(prescription.rules),
        "removed_share": prescription.removed_share,
        "notes": notes,
        "ranks": [list(ranks) for ranks in prescription.ranks],
        "reasons": [list(layer.qk.reasons) for layer in prescription.layers],
        "depth": depth and {"removed": list(depth.removed), "reasons": list(depth.reasons)},
        "tokens": tokens
        and {"policy": str(tokens.policy), "reasons": list(tokens.reasons), "must_be_trained": tokens.must_be_trained},
    }
    rows = tuple(
        (
            f"layer {index + 1}",
            " ".join(map(str, layer.qk.ranks)),
            str(layer.qk.directions if layer.qk.is_shared else layer.qk.keep.shape[1]),
            str(int((~layer.heads).sum())),
        )
        for index, layer in enumerate(prescription.layers)
    )
    table = aligned_table(("", "kept directions per head", "of", "heads pruned"), rows)
    removed = f"{100 * prescription.removed_share:.2f} % of the directions are removed; the file has the reasons"
    warnings = (f"warning: {note}" for note in notes)
    reasons = [why for part in (depth, tokens) if part is not None for why in part.reasons]
    return Outcome(record, (table, removed, *reasons, *warnings, f"prescription: {path}"))


def _diagnosis(arguments: Namespace) -> "rx.Diagnosis | nn.Module":
    """Loads the diagnosis, or the model that was named instead: a folder, an elastic size, or KIND:NAME."""
    from attnrx.nouns.elastic import is_elastic  # imports torch

    path, elastic = Path(arguments.diagnosis), arguments.diagnosis.rpartition("@")[0]  # FOLDER@macs=0.6
    if path.is_dir() or (elastic and is_elastic(elastic)) or (":" in arguments.diagnosis and not path.exists()):
        return rx.load(arguments.diagnosis, weights=arguments.weights, trust=arguments.trust)
    if arguments.weights is not None:
        raise InvalidInput(f"--weights needs the name of a model, and {arguments.diagnosis} is none; omit it.")
    return rx.Diagnosis.load(arguments.diagnosis)


BY = (
    "compress deletes what is pruned, mask sets it to zero; or the name of another compression, which the form of the "
    "attention brings"
)
REPAIR = (
    "fit the weights of the compressed model, block by block, to the outputs of the original's blocks on --data "
    "without labels, in this many steps per attention and per MLP, e.g. 300"
)
DISTILL = (
    "fit all weights together to the outputs of the original on --data without labels, with tokens pruned and merged, "
    "in this many passes over the images, e.g. 2; last of the fits"
)


def _realize_options(parser: Parser) -> None:
    options.add_model(parser, "the model of the prescription")
    option(parser, "--prescription", "FILE", "the prescription to apply", required=True)
    options.add_out(parser, "the folder of the new model; an existing model in it is replaced", folder=True)
    option(parser, "--by", "NAME", BY, "compress")
    option(parser, "--repair", options.STEPS, REPAIR, 0)
    option(parser, "--distill", options.STEPS, DISTILL, 0)
    options.add_data(parser, "training images for fits of strengths and weights", required=False)
    calibration = "training images for compressions that fit strengths, --repair and --distill"
    option(parser, "--calibration-images", options.COUNT, calibration, 512)
    option(parser, "--seed", options.SEED, "seeds --repair and --distill", 0)
    options.add_device(parser)


@command(
    "apply a prescription to a model, as a mask or by compression",
    "attnrx realize runs/cifar10 --prescription prescription.json --out slim",
    _realize_options,
)
def realize(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.change.realization.realizing import fits_of, fits_record, realize_and_fit  # imports torch
    from attnrx.vit.spec import compression_of

    # The output folder is checked before the model is realized, because --repair takes long.
    rx.models.require_model_folder(arguments.out)
    compression = compression_of(arguments.by)
    prescription = rx.Prescription.load(arguments.prescription)
    model = options.model_argument(arguments.model, arguments.device, arguments.weights, arguments.trust)
    # The settings are saved with the model, because the check `controls` must realize other prescriptions in the same
    # way.
    how = {name: getattr(arguments, name) for name in ("by", *FITS, "calibration_images")}
    fits = fits_of({name: how[name] for name in FITS}, arguments.seed)
    how |= fits_record(*fits)
    # The data are loaded only if something is fitted on them.
    images, fitted = None, [f"--{name}" for name in FITS if getattr(arguments, name)]
    fitted += [f"--by {arguments.by}"] * (compression is not None and compression.fit is not None)
    if fitted:
        if arguments.data is None:
            requested = " and ".join(fitted)
            raise InvalidInput(f"{requested}: fitted on images, and --data names none; add --data NAME.")
        train = options.splits_argument(model, arguments, log, distinct=True).train
        images = train.take(min(arguments.calibration_images, len(train)))
    slim = realize_and_fit(model, prescription, images, fits, arguments.by)
    prescription = replace(prescription, about={**prescription.about, "realized": how})
    portable = bool(prescription.about.get("portable"))
    folder = rx.save(slim, arguments.out, prescription=prescription, portable=portable)
    changes, table = _cost_changes(*(rx.models.family_of(each).costs(each) for each in (model, slim)))
    record = {"model": str(folder), **how, **changes, "removed_share": prescription.removed_share}
    lines = [table, f"model: {folder}"]
    if portable:
        record["loading_code"] = rx.models.loading_code(rx.load(folder), folder)
        lines.append(f"without attnrx:\n\n{record['loading_code']}")
    return Outcome(record, tuple(lines))


CHECKS = (
    "names with knobs in brackets: accuracy(most_drop=0.5),robustness(severities=3,corruptions=fog/snow); "
    "controls(draws=10) compares with rank-matched ones, promises with the plan (accuracy, fidelity, calibration, "
    "costs and latency, where data and models allow them)"
)


def _verify_options(parser: Parser) -> None:
    parser.add_argument("candidate", help="the folder of a realized model, or a file that was exported")
    option(parser, "--reference", "MODEL", "the model it was made from", required=True)
    option(parser, "--weights", "FILE", "the weights of a reference timm:NAME, in a local file")
    options.add_trust(parser)
    options.add_data(parser, "the images to compare both models on")
    option(parser, "--out", "FILE", "the evidence, one JSON file (printed only)")
    parser.kind = "attnrx evidence"
    origin = parser.add_argument_group("origin of the candidate")
    option(origin, "--prescription", "FILE", "(the one in the candidate's folder)")
    option(origin, "--diagnosis", "FILE", "needed for controls")
    checks = parser.add_argument_group("checks")
    option(checks, "--checks", "CHECKS", CHECKS)
    options.add_split(parser, "test")
    options.add_running(parser, 256)


@command(
    "collect evidence of what a candidate costs against its reference",
    "attnrx verify runs/cifar10-slim --reference runs/cifar10 --data cifar10 --out evidence.json",
    _verify_options,
)
def verify(arguments: Namespace, log: Log) -> Outcome:
    # The checks are parsed before the models are loaded, so that a typo is reported at once.
    checks = None if arguments.checks is None else rx.checks.parse_checks(arguments.checks)
    if arguments.diagnosis is not None and "controls" not in [check.name for check in checks or ()]:
        raise InvalidInput("--diagnosis belongs to the check controls: add it to --checks, or omit --diagnosis.")
    diagnosis = None if arguments.diagnosis is None else rx.Diagnosis.load(arguments.diagnosis)
    prescription = None if arguments.prescription is None else rx.Prescription.load(arguments.prescription)
    candidate = options.model_argument(arguments.candidate, arguments.device, trust=arguments.trust)
    reference = options.model_argument(arguments.reference, arguments.device, arguments.weights, arguments.trust)
    splits = options.splits_argument(reference, arguments, log, distinct=True)
    images = options.chosen_images(splits, arguments)
    log(f"verifying {arguments.candidate} on {len(images):,} images")
    evidence = rx.verify(
        candidate,
        reference,
        images,
        checks,
        origin=arguments.candidate,
        prescription=prescription,
        diagnosis=diagnosis,
        splits=splits,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
    )
    if arguments.out is not None:
        evidence.save(arguments.out)
    for note in (*evidence.about["notes"], *evidence.warnings):
        log(f"warning: {note}")
    # The record is converted to JSON text and back, which replaces NaN by null.
    record = {"evidence": arguments.out, **json.loads(rx.serialization.json_text(evidence.to_record()))}
    written = f"evidence: {arguments.out or 'printed only; --out FILE writes it'}"
    return Outcome(record, (str(evidence), written, evidence.summary), code=1 if evidence.failures else 0)


def _figures_options(parser: Parser) -> None:
    kinds = "diagnoses, prescriptions, elastic indexes and comparisons"
    parser.add_argument("results", nargs="+", metavar="PATH", help=f"the files of {kinds}, or folders that hold some")
    options.add_out(parser, "the folder of the figures; those of the same names are replaced", folder=True)
    option(parser, "--formats", ("svg", "pdf", "csv"), "the files of every figure (all)", nargs="+")


@command(
    "draw spectra, ranks, tokens and trade-offs as SVG and PDF for a paper, with their numbers as CSV",
    "attnrx figures diagnosis.json comparison.json runs/shrunk --out figures",
    _figures_options,
)
def figures(arguments: Namespace, log: Log) -> Outcome:
    named = {} if arguments.formats is None else {"formats": list(dict.fromkeys(arguments.formats))}
    written = rx.figures(arguments.results, arguments.out, **named)
    names = list(dict.fromkeys(path.stem for path in written))
    record = {"folder": arguments.out, "files": [path.name for path in written]}
    return Outcome(record, (f"{len(names)} figures: {', '.join(names)}", f"folder: {arguments.out}"))


FORMATS = (
    "onnx, program (torch.export), aotinductor, openvino or int8, with knobs in brackets: onnx(opset=18), "
    "int8(images=128), openvino(precision=bf16), openvino(precision=int8)"
)


def _export_options(parser: Parser) -> None:
    options.add_model(parser)
    option(parser, "--to", "FORMAT", FORMATS, "onnx")
    options.add_out(parser, "the file; its facts are written to PATH.json", kind="attnrx exported model")
    options.add_arguments(parser, "export", "batch", "features", precision=("float32", "bfloat16", "float16"))
    options.add_data(
        parser, "training images for calibration of int8 and for parity (parity: on noise)", required=False
    )
    options.add_device(parser)


@command(
    "write a model as a file that runs without attnrx, checked against the model",
    "attnrx export slim --to onnx --out slim.onnx\n"
    "  attnrx export slim --to int8 --data imagenette --out slim-int8.onnx\n"
    "  attnrx verify slim.onnx --reference slim --data imagenette --checks accuracy,fidelity --out evidence.json",
    _export_options,
)
def export(arguments: Namespace, log: Log) -> Outcome:
    form = rx.exporting.parse_format(arguments.to)
    # A file for a CPU runtime is compared with the model on the CPU.
    device = arguments.device if form.on_cuda else "cpu"
    model = options.model_argument(arguments.model, device, arguments.weights, arguments.trust)
    splits = None if arguments.data is None else options.splits_argument(model, arguments, log)
    calibration = None if splits is None else splits.train
    # The exported file contains the class names, so that it can be used without the data.
    names = () if splits is None else rx.exporting.fitting_names(model, splits.class_names)
    log(f"writing {arguments.model} as {form.name}, and comparing its outputs with the model's")
    settings = options.given_arguments(arguments, "export")
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


def _push_options(parser: Parser) -> None:
    parser.add_argument("folder", help="a model saved by attnrx, with its card and evidence")
    parser.add_argument("repository", metavar="OWNER/NAME", help="the repository; created if missing")
    options.add_arguments(parser, "push_to_hub", "private", license="NAME", base_model="OWNER/NAME")


@command(
    "upload a saved model to the Hugging Face hub, with its card and evidence",
    "attnrx push slim someone/slim-vit --license apache-2.0 --base-model timm/vit_tiny_patch16_224\n"
    "  afterwards hub:someone/slim-vit is the name of the model: attnrx costs hub:someone/slim-vit",
    _push_options,
)
def push(arguments: Namespace, log: Log) -> Outcome:
    log(f"uploading {arguments.folder} to {arguments.repository}")
    about = options.given_arguments(arguments, "push_to_hub")
    address = rx.push_to_hub(arguments.folder, arguments.repository, **about)
    name = f"hub:{arguments.repository}"
    return Outcome({"model": name, "address": address}, (f"model: {name}", address))


def _report_options(parser: Parser) -> None:
    option(parser, "--candidate", "FOLDER", "its evidence and prescription are shown, unless given")
    options.add_trust(parser)
    option(parser, "--evidence", "FILE", "the file of `attnrx verify`")
    option(parser, "--prescription", "FILE", "the file of `attnrx prescribe`")
    option(parser, "--diagnosis", "FILE", "the file of `attnrx diagnose`")
    options.add_out(parser, "the page", kind="attnrx report")


@command(
    "write diagnosis, prescription and evidence into one HTML page",
    "attnrx report --candidate runs/cifar10-slim --diagnosis diagnosis.json --out report.html",
    _report_options,
)
def report(arguments: Namespace, log: Log) -> Outcome:
    from attnrx.workflows.verify import stored_folder  # imports torch

    name = arguments.candidate
    candidate = None if name is None else rx.load(name, trust=arguments.trust)
    folder = None if name is None else stored_folder(name)
    evidence = _part(rx.Evidence.load, arguments.evidence, folder, "evidence.json")
    # Evidence about another model must not be shown with this candidate, because no reader would notice the mistake.
    if evidence is not None and candidate is not None:
        evidence.require(rx.models.model_fingerprint(candidate), f"--candidate {name}")
    about = {} if name is None else {"candidate": _public(name)}
    content = rx.reports.ReportContent(
        title=f"attnrx: {_public(name or arguments.out)}",
        # Fields of the evidence replace others of the same name, because they describe the numbers on the page.
        about=about if evidence is None else {**about, **evidence.about},
        prescription=_part(rx.Prescription.load, arguments.prescription, folder, "prescription.json"),
        diagnosis=_part(rx.Diagnosis.load, arguments.diagnosis),
        evidence=evidence,
    )
    path = rx.write_report(arguments.out, content)
    outcome = None if evidence is None else evidence.outcome
    return Outcome({"report": str(path), "bytes": path.stat().st_size, "outcome": outcome}, (f"report: {path}",))


def _public(path: str) -> str:
    """Returns a path to show on a published page. An absolute path is reduced to its last part, to hide the folders."""
    return Path(path).name if Path(path).is_absolute() else path


def _part(
    load: Callable[[Path | str], Part], given: str | None, folder: Path | None = None, name: str = ""
) -> Part | None:
    """Loads the file `given`, or an optional file of the candidate if `given` is None.

    The optional file is `name` in the candidate's `folder`. Returns None if it does not exist.
    """
    # A file that the user names must exist. The files in the candidate's folder are optional.
    if given is None and folder is not None and (folder / name).exists():
        return load(folder / name)
    return None if given is None else load(given)


def _costs_options(parser: Parser) -> None:
    parser.add_argument(
        "model", help="a name such as timm:deit_small_patch16_224, whose weights are not needed, or a saved folder"
    )
    options.add_trust(parser)
    option(parser, "--tokens", "POLICY", f"the costs with token pruning or merging: {options.POLICY}")


@command(
    "compute the parameters and MACs of a model, with or without a token policy",
    "attnrx costs timm:deit_small_patch16_224 --tokens spot:0.7@4,7,10 --json",
    _costs_options,
)
def costs(arguments: Namespace, log: Log) -> Outcome:
    """Computes a model's costs in closed form. If you name an architecture, no weights are loaded."""
    # The policy is parsed first, so that an error in it is reported before the model is built, which may be slow.
    policy = None if arguments.tokens is None else rx.tokens.parse_policy(arguments.tokens)
    if options.is_fresh(arguments.model) and not arguments.trust:
        import torch

        with torch.device("meta"):  # tensors on this device have a shape, but need no memory and no download
            model = rx.models.build_model(arguments.model)
    else:
        model = rx.load(arguments.model, trust=arguments.trust)
    family = rx.models.family_of(model)
    costs = family.costs(model)
    record: dict[str, Any] = {"model": arguments.model, **costs.to_record()}
    if policy is None:
        return Outcome(record, (_parts_table(costs), *_token_lines(costs)))
    after = family.costs(model, tokens=policy)
    changes, table = _cost_changes(costs, after)
    # "compressed" comes last, because its record replaces the shorter one in `changes`.
    record |= {**changes, "policy": arguments.tokens, "compressed": after.to_record()}
    return Outcome(record, (_parts_table(after), table, *_token_lines(after)))


def _cost_changes(original: "rx.costs.ModelCosts", smaller: "rx.costs.ModelCosts") -> tuple[dict[str, Any], str]:
    """Returns a record and a table of two models' costs, with savings in percent of the first model's costs."""
    record: dict[str, Any] = {
        name: {"params": each.params, "macs": each.macs}
        for name, each in (("original", original), ("compressed", smaller))
    }
    rows = []
    for name, unit in (("parameters", "params"), ("MACs", "macs")):
        before, after = getattr(original, unit), getattr(smaller, unit)
        record[f"{unit}_down_percent"] = saved = 100 * (before - after) / max(before, 1)
        rows.append((name, f"{before:,}", f"{after:,}", f"{saved:.3f} %"))
    return record, aligned_table(("", "original", "realized", "saved"), rows)


def _parts_table(costs: "rx.costs.ModelCosts") -> str:
    """Returns a table with the costs of a model's parts, and their sum. Parts without costs are left out."""
    parts = [(name.replace("_", " "), part) for name, part in costs.parts.items() if part.params or part.macs]
    rows = [(name, f"{each.params:,}", f"{each.macs:,}") for name, each in (*parts, ("all", costs.total))]
    return aligned_table(("part", "parameters", "MACs"), tuple(rows))


def _token_lines(costs: "rx.costs.ModelCosts") -> tuple[str, ...]:
    """Returns a line with each layer's number of tokens, or no line if all layers have the same number."""
    if len(set(costs.tokens)) < 2:
        return ()
    return (f"tokens, layer by layer: {' '.join(map(str, costs.tokens))}",)
