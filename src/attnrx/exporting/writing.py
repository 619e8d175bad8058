"""Captures a model, writes it to a temporary file, compares the file with eager PyTorch, and moves it to its path."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from attnrx.data import ImageData, ImageSet
from attnrx.data.model_data import dataset_classes, images_for, num_classes, preprocessing_of
from attnrx.exporting.exported import (
    KIND,
    SCHEMA,
    Exported,
    Images,
    facts_path,
    present_facts,
    present_script,
    remove_export,
    require_export_path,
    require_replaceable_files,
    sealed_script,
)
from attnrx.exporting.formats import PRECISIONS, ROUNDING, Format, dtype_name, raising, script_path
from attnrx.exporting.runtime_formats import parse_format
from attnrx.nouns.effort import PRECISE, final_rounds
from attnrx.nouns.evidence import FAILS, Finding, against_limit
from attnrx.support.arguments import BATCH, IMAGES, TEXT, checked, each, either, instance, one_of, optional
from attnrx.support.atomic_writes import flush, full_disk, scratch_folder, temporary_folder
from attnrx.support.errors import CheckpointError, InvalidInput, NotSupported
from attnrx.support.modules import copy_module, fixed_weights, joined, tensors_of
from attnrx.support.optional import installed_versions
from attnrx.support.progress import track
from attnrx.support.records import to_dict
from attnrx.support.shapes import Float, Tensor
from attnrx.support.storage import file_sha256, write_json, write_text
from attnrx.vit.attention import Attention, AttentionCapture, Backend, Portable, using
from attnrx.vit.costs import Conditions, LatencyComparison, LatencyProtocol, compare_latency
from attnrx.vit.costs.measured import PRECISIONS as TIMED_PRECISIONS
from attnrx.vit.models import TokenReduction, described_tokens, family_of, model_fingerprint, require_ordinary_weights
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.models.working.adoption_proof import PLAIN_PACKAGES
from attnrx.vit.outputs import Embeddings, Logits, Multilabel, OutputKind, Several, output_kind_of, output_sizes

DYNAMIC = "dynamic"
GRAPH_BYTES = 2**18  # the approximate size of a file without its weights
# Batch sizes to capture a model and to compare its file, if the file's batch size is dynamic. The capture needs more
# than one image, because torch.export treats a size of 1 as a constant.
CAPTURED, COMPARED, AT_ONCE = 2, (1, 3, 8), 8
# A runtime calibrates and compares AT_ONCE images at a time, and keeps the activations of all layers. So a large model
# gets fewer images, which take at most MACS_AT_ONCE multiply-accumulates together, but at least CAPTURED.
MACS_AT_ONCE = 4e10
# Batch sizes and rounds for timing a file. A file with a fixed batch size is timed at that size.
TIMED, ROUNDS = (1, 32), 20
# The share of images whose logits may differ in models with token reduction. Rounding may swap two tokens with nearly
# equal scores, and rounding to bfloat16 or 8 bits swaps some tokens in most images. A wrong file differs in all images.
# `verify` measures what a file loses.
MAY_DIFFER, MAY_DIFFER_AT_LOW_PRECISION = 0.1, 0.5
# Some models select by order. To emulate rounding, their images get relative noise, ROUNDED_BY times the allowed
# difference, in ROUNDED_TIMES draws. In a file, MORE_DIFFER times as many numbers may differ as this noise changes, but
# at most the share MOST_DIFFERENT.
ROUNDED_BY, ROUNDED_TIMES, MORE_DIFFER, MOST_DIFFERENT = 0.1, 3, 3.0, 0.3
PACKAGES = ("attnrx", "torch", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf")


class PatchFeatures(nn.Module):
    """Wraps a model to return the final features of all patches, [batch, patches, width].

    Pruned or merged tokens are restored.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "batch channels height width"]) -> Float[Tensor, "batch patches features"]:
        return family_of(self.model).patch_features(self.model, images)


@dataclass(frozen=True, eq=False)
class ExportSubject:
    """The model to export, in evaluation mode, with the file's input and the facts for PATH.json.

    `calibration` holds normalized images. Without these images, the file is compared with the model on noise. `outputs`
    is the kind of the model's outputs, or None for patch features. `at_once` is how many images a runtime calibrates at
    a time, if the file's batch size is dynamic.
    """

    model: nn.Module
    images: Images
    calibration: ImageSet | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    outputs: OutputKind | None = None
    at_once: int = AT_ONCE

    @classmethod
    def of(
        cls,
        model: nn.Module,
        form: Format,
        batch: int | str = DYNAMIC,
        precision: str | None = None,
        calibration: ImageSet | None = None,
    ) -> "ExportSubject":
        """Copies a model of a known family, converts it to `precision`, and collects its facts.

        Raises:
            NotSupported: The model takes inputs that an exported file cannot take.
        """
        family = family_of(model)
        if (inputs := family.inputs(model)) is not None:
            inputs.require_exportable(family.input_shape(model))
        require_ordinary_weights(model)
        # The copy is changed, so the caller's model keeps its mode, device and precision.
        converted = copy_module(model).eval()
        converted = converted if form.on_cuda else converted.cpu()
        is_inside = isinstance(model, Adopted) and model.around is not None
        if is_inside:
            converted = _Answer(converted, has_several=isinstance(output_kind_of(model), Several))
        converted = converted if precision is None else converted.to(PRECISIONS[precision])
        weight = next(converted.parameters())
        fixed = batch if isinstance(batch, int) else None
        shape, item = family.input_shape(model), () if inputs is None else inputs.item(family.input_shape(model))
        images = Images(shape, dtype_name(weight.dtype), fixed, str(weight.device), item)
        mean, std = family.normalization(model)
        costs, outputs = family.costs(model), output_kind_of(model)
        facts = {
            "model": {
                "family": family.name,
                "fingerprint": model_fingerprint(model),
                "parameters": costs.params,
                "macs": costs.macs,
                "tokens": described_tokens(model),
            },
            "normalization": {"mean": list(mean), "std": list(std)},
            "preprocessing": preprocessing_of(model).to_dict() if shape[0] in (1, 3) and not item else None,
            "class_names": list(family.class_names(model)) if isinstance(outputs, Logits | Multilabel) else [],
            "output": "logits" if isinstance(outputs, Logits) else outputs.name,
        }
        if is_inside and isinstance(outputs, Several):
            facts["outputs"] = dict(output_sizes(model))
        at_once = min(max(int(MACS_AT_ONCE / max(costs.macs, 1)), CAPTURED), AT_ONCE)
        return cls(converted, images, calibration, facts, outputs, at_once)

    @property
    def of_items(self) -> nn.Module:
        """The model, wrapped so that it accepts inputs in the file's shape."""
        return _OfItems(self.model, self.images.shape).eval() if self.images.item else self.model

    def example(self, batch: int) -> Tensor:
        """Returns a batch of zeros in the shape that the file takes."""
        images = self.images
        return torch.zeros(batch, *images.sizes, dtype=images.dtype, device=images.device)

    @property
    def noun(self) -> str:
        """The word for a single number in the outputs."""
        if self.outputs is None:
            return "feature"
        return "feature of the embedding" if isinstance(self.outputs, Embeddings) else self.outputs.noun

    def batches(self, count: int) -> list[Tensor]:
        """Returns batches for calibrating a file and for comparing it with the model.

        The batches hold about `count` calibration images. If there are no calibration images, they hold noise.

        Raises:
            InvalidInput: The number of calibration images is smaller than the file's batch size.
        """
        size = self.images.batch or self.at_once
        if self.calibration is not None:
            images = self.calibration.take(min(max(count, size), len(self.calibration)))
            batches = [batch.images for batch in images.batches(size, device=self.images.device)]
            # A runtime calibrates by running the graph, which may only take a fixed batch size.
            full_batches = [each for each in batches if self.images.batch is None or len(each) == size]
            if not full_batches:
                raise InvalidInput(f"{len(images)} images for a file that takes {size} at once: give at least {size}.")
            return [each.to(self.images.dtype) for each in full_batches]
        generator = torch.Generator().manual_seed(0)
        # Noise is drawn in float64 and then converted, so all precisions get the same noise.
        sizes = COMPARED if self.images.batch is None else (size, size)
        noise = [torch.randn(each, *self.images.shape, generator=generator, dtype=torch.float64) for each in sizes]
        return [each.to(self.images.device, self.images.dtype) for each in noise]


@checked(
    to=instance("a format, e.g. 'onnx' or 'openvino(precision=bf16)'", str, Format),
    batch=either(f"the number of images that the file takes at once, or {DYNAMIC!r}", BATCH, one_of(DYNAMIC)),
    precision=optional(one_of(*PRECISIONS)),
    calibration=optional(IMAGES),
    class_names=each(TEXT, "a list with the name of every class"),
)
@verb
def export(
    model: nn.Module,
    path: Path | str,
    to: Format | str = "onnx",
    *,
    batch: int | str = DYNAMIC,
    precision: str | None = None,
    calibration: ImageData | None = None,
    class_names: Sequence[str] = (),
    features: bool = False,
) -> Exported:
    """Writes a model as a file that runs without attnrx, and returns the file as a module.

    The outputs of the file are compared with the model's. If they differ by more than rounding (by more than
    `most_difference` for int8), no file is written. PATH.json contains the model's fingerprint, the images' shape and
    preprocessing, the class names, versions, and the measured parity. An ONNX file also contains the preprocessing and
    the class names.

    To classify an image, run the script run_NAME.py, which is written beside an ONNX or OpenVINO file. It only needs
    the runtime, NumPy and Pillow, and preprocesses images like the model's library. If there is an earlier export at
    the path, it is replaced, together with its script. Your other files are never overwritten.

    Args:
        model: The model. If it has no classifier, the file returns its embeddings and has no class names.
        path: The file to write.
        to: A format or its text: onnx, program (torch.export), aotinductor, openvino or int8, with options in brackets,
            e.g. openvino(precision=bf16).
        batch: The number of images that the file takes at once, or dynamic for any number (dynamic).
        precision: The precision of weights and images (the model's own).
        calibration: Images, normalized for the model, for comparing the file with the model. By default, noise is used.
            int8 requires images, because it is also calibrated on them.
        class_names: The name of every class. By default, the model's own names. If it has none, the names of the
            calibration dataset are used (e.g. an ImageFolder), provided that it has the same number of classes.
        features: Whether the file returns the features of all patches instead of the model's output.

    Returns:
        The file as a module, which runs in the runtime of the format.

    Raises:
        NotSupported: The model cannot be written in this format, or the file's outputs differ from the model's.
        InvalidInput: The suffix, the batch or the precision is invalid, or a file that attnrx did not write would be
            overwritten.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> file = rx.export(rx.load(vit), "model.onnx")  # compared with the model before it is written
        >>> file.path.name
        'model.onnx'
    """
    form = parse_format(to) if isinstance(to, str) else to
    wanted = max(form.wanted, batch if isinstance(batch, int) else AT_ONCE)  # the number of calibration images
    images = None if calibration is None else images_for(model, calibration, "calibration", limit=wanted)
    subject = ExportSubject.of(model, form, batch, precision, images)
    class_names = class_names or fitting_names(model, dataset_classes(calibration))
    if class_names:
        if len(class_names) != (classes := num_classes(model)):
            raise InvalidInput(f"{len(class_names)} class_names for a model with {classes} classes: give one for each.")
        subject = replace(subject, facts={**subject.facts, "class_names": list(class_names)})
    if features:
        facts = {**subject.facts, "class_names": [], "output": "features"}
        subject = replace(subject, model=PatchFeatures(subject.model).eval(), facts=facts, outputs=None)
    return write_exported(subject, path, form)


def fitting_names(model: nn.Module, class_names: Sequence[str]) -> tuple[str, ...]:
    """Returns a dataset's class names if the model has the same number of classes but no names, else ()."""
    fits = len(class_names) == num_classes(model) > 0
    return tuple(class_names) if fits and not family_of(model).class_names(model) else ()


def precision_for(model: nn.Module, form: Format) -> str | None:
    """Returns the `precision` at which to export a model, or None for the model's own precision.

    The model keeps its own precision if the format supports this precision and models can be timed in it. Otherwise,
    the function returns "float32".
    """
    dtype = next(model.parameters()).dtype
    return None if dtype in form.dtypes and dtype_name(dtype) in TIMED_PRECISIONS else "float32"


def subject_of(model: nn.Module, form: Format, calibration: ImageSet, class_names: Sequence[str] = ()) -> ExportSubject:
    """Returns an `ExportSubject` for a file with a dynamic batch size, at the precision that `precision_for` returns.

    If the model has no class names, `class_names` are written to the file. If `class_names` is empty, the calibration
    dataset's class names are used.
    """
    subject = ExportSubject.of(model, form, precision=precision_for(model, form), calibration=calibration)
    names = fitting_names(model, class_names or dataset_classes(calibration))
    return replace(subject, facts={**subject.facts, "class_names": list(names)}) if names else subject


@verb
def compare_with_original(
    exported: Exported,
    original: nn.Module,
    *,
    calibration: ImageData | None = None,
    threads: int | None = None,
    batches: Sequence[int] = TIMED,
    rounds: int = ROUNDS,
) -> tuple[LatencyComparison, ...]:
    """Times a file against the original model in the same format, and adds the speeds to PATH.json.

    The original is exported with its own library's attention. Both files run alternately in the same runtime, with
    `threads` CPU threads. Both are timed at the file's batch size or, if this is dynamic, at every size in `batches`.
    Timing takes at most `rounds` rounds. It takes fewer if passes are long, and ends as soon as the speed is precise.
    """
    wanted = max(exported.form.wanted, exported.images.batch or AT_ONCE)
    images = None if calibration is None else images_for(original, calibration, "calibration", limit=wanted)
    size, precision = exported.images.batch, exported.images.precision
    subject = ExportSubject.of(original, exported.form, size or DYNAMIC, precision, images)
    library = bare_subject(family_of(original).library_model(original), subject)
    conditions = Conditions(exported.images.device, precision, threads)
    noise, macs = torch.Generator().manual_seed(0), family_of(original).costs(original).macs
    comparisons = list[LatencyComparison]()
    with scratch_folder() as folder:
        other = write_exported(library, folder / f"original{exported.form.suffix}", exported.form)
        for batch in batches if size is None else (size,):
            most = min(rounds, final_rounds(batch, macs, of_files=True))
            # If passes are long, there are only a few rounds, and one round is enough to warm up.
            protocol = LatencyProtocol(conditions, most, warmup=min(max(most // 6, 1), 5), enough=PRECISE)
            images = torch.randn(batch, *exported.images.shape, generator=noise)
            comparisons.append(compare_latency(exported, other, images, protocol))
    baseline = {"baseline": f"the original as {exported.form.name}"}
    exported.facts["speeds"] = [
        asdict(each) | baseline | {"image_shape": list(each.image_shape)} for each in comparisons
    ]
    write_json(facts_path(exported.path), exported.facts)
    return tuple(comparisons)


def write_exported(subject: ExportSubject, path: Path | str, form: Format, is_compared: bool = True) -> Exported:
    """Writes a file and its facts, and returns the file as a module. Without `is_compared`, outputs are not compared.

    Raises:
        NotSupported: The model cannot be captured, or the file's outputs differ from the model's. No file is written.
        InvalidInput: The format needs calibration images, and there are none.
        CheckpointError: The files cannot be written.
    """
    path = Path(path)
    form.require(path, subject.images.dtype)
    # A subject without facts has no known family, e.g. the reference of a timing. Only images with 1 or 3 channels have
    # preprocessing.
    classifies = subject.facts.get("preprocessing") is not None and isinstance(subject.outputs, Logits)
    example = form.example(path) if classifies else None
    require_export_path(path, form, with_script=example is not None)
    if form.calibrated and subject.calibration is None:
        raise InvalidInput(f"{form.name} is calibrated on images: give calibration images of the model's task.")
    batches = subject.batches(form.wanted)
    steps = track(("capturing", "writing", "comparing"), f"writing a file for {form.runtime}")
    next(steps)
    images = subject.images
    capture_images = subject.example(images.batch or CAPTURED)
    shapes, advice = None, ""
    problem = "this model cannot be captured by torch.export"
    if images.batch is None:
        shapes = ({0: torch.export.Dim("batch", min=1)},)
        problem = "this model cannot be exported for batches of any size"
        advice = "Give batch=N, the number of images that the file is to take at once."
    with raising(problem, advice):
        program = captured(subject.of_items, capture_images, shapes)
    next(steps)
    with temporary_folder(path) as room:
        written = room / path.name
        with raising(f"this model cannot be written as {form.name}"):
            # A full disk is reported here, because `raising` would report that the format does not support the model.
            size = GRAPH_BYTES + sum(tensor.nbytes for tensor in program.state_dict.values())
            try:
                form.write(program, written, [*map(images.as_items, batches)])
            except Exception as error:
                reason = (error.strerror or error) if isinstance(error, OSError) else full_disk(room, size)
                if reason is None:
                    raise
                raise CheckpointError(f"cannot write {path.name}: {reason}. It was not written.") from error
        described = {"images": subject.images.described(), **subject.facts}
        if subject.facts:
            form.describe(written, described)
        # The main file comes last, because `_put` must move it after the files that it needs.
        files = {each.name: file_sha256(each) for each in sorted(room.iterdir(), key=lambda each: each == written)}
        next(steps)
        # The file is compared in the temporary folder, so a file that differs from the model never gets to its path.
        findings = _parity(subject, form, written, batches) if is_compared else ()
        steps.close()
        facts = {
            "kind": KIND,
            "schema": SCHEMA,
            "format": to_dict(form),
            "files": files,
            **described,
            "parity": [to_dict(finding, typed=False) for finding in findings],
            "versions": installed_versions(*PACKAGES),
        }
        _put(room, path, facts)
    if example is not None:
        write_text(script_path(path), sealed_script(example))
    elif (outdated := present_script(path)) is not None:
        outdated.unlink()
    return Exported(path, form, subject.images, facts).eval()


def captured(model: nn.Module, example: Tensor, shapes: tuple[dict[int, Any]] | None) -> torch.export.ExportedProgram:
    """Captures a model, or a part of it, for inputs like the example. `shapes` says which sizes are dynamic."""
    with torch.no_grad(), _portable(model, example), _FourAxes(), free_lengths(model):
        program = torch.export.export(model, (example,), dynamic_shapes=shapes)
    return _simplified(program)


class _FourAxes(TorchFunctionMode):
    """Adds a head axis of size 1 to attention that has none, such as SAM's, because ONNX requires this axis."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and args and args[0].ndim == 3:
            args = [value.unsqueeze(1) if isinstance(value, Tensor) else value for value in args]
            if (mask := kwargs.get("attn_mask")) is not None:
                kwargs = {**kwargs, "attn_mask": mask.unsqueeze(-3)}
            return func(*args, **kwargs).squeeze(1)
        return func(*args, **kwargs)


@contextmanager
def free_lengths(model: nn.Module) -> Iterator[None]:
    """Lets `len(images)` in a user's module return the dynamic batch size.

    Python's own `len` returns a plain number, which fixes the batch size in torch.export and in a trace. No PyTorch
    mode can change this. So each module of the model, which is attnrx's own copy, temporarily gets copies of its
    class's methods as attributes, which hide the methods of the class. The copies have the same code and the same
    globals, except for a different `len`. The user's classes and modules are not changed. Calls through `super()` still
    reach the original methods, so the user has to write `images.shape[0]` in those.
    """
    methods = {kind: _methods_with_free_lengths(kind) for kind in {type(part) for part in model.modules()}}
    hiding = [
        (part, name, function)
        for part in model.modules()
        for name, function in methods[type(part)].items()
        if name not in part.__dict__
    ]
    try:
        for part, name, function in hiding:
            part.__dict__[name] = MethodType(function, part)
        yield
    finally:
        for part, name, _ in hiding:
            part.__dict__.pop(name, None)


def _methods_with_free_lengths(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """Returns copies of the methods that the user wrote for a class. In them, `len` returns a tensor's first size."""
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    spaces: dict[str, dict[str, Any]] = {}  # global names by module, shared by a copy and the functions that it calls

    def freed(function: FunctionType) -> FunctionType:
        module = function.__globals__["__name__"]
        if module not in spaces:
            spaces[module] = {**function.__globals__, "len": _free_length}
            called = {name: each for name, each in spaces[module].items() if is_users(each, module)}
            spaces[module].update({name: freed(each) for name, each in called.items()})
        copied = FunctionType(
            function.__code__, spaces[module], function.__name__, function.__defaults__, function.__closure__
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        return copied

    def is_users(each: object, module: str | None = None) -> bool:
        if not isinstance(each, FunctionType) or "len" in each.__globals__:
            return False
        name = each.__globals__.get("__name__", "")
        return name.split(".")[0] not in PLAIN_PACKAGES and module in (None, name)

    return {name: freed(each) for name, each in methods.items() if is_users(each)}


def _free_length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) else len(value)


@contextmanager
def _portable(model: nn.Module, example: Tensor) -> Iterator[None]:
    """Runs the model's attention as one operation per layer, and computes its combined weights in advance.

    If a token reducer reads the attention of a layer, the layer keeps its backend.
    """

    def portable(backend: Backend) -> Backend:
        if isinstance(backend, AttentionCapture):
            return backend if backend.wanted else Portable(backend.sizes)
        return backend if backend.watches else Portable()

    layers = [module for module in model.modules() if isinstance(module, Attention)]
    backends = [portable(layer.backend) for layer in layers]
    with using(layers, backends), fixed_weights() if layers else nullcontext():
        if layers:
            model(example)  # computes the constants
        yield


def _simplified(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Removes operations that change nothing or have no users, and weights that no operation uses.

    Stack traces are also removed, because they name folders on this machine.
    """
    graph, aten = program.graph, torch.ops.aten
    for part in program.graph_module.modules():  # the branches of a condition are graphs, too
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    for node in graph.nodes:
        if node.target is aten.dropout.default or (node.target is aten.slice.Tensor and _takes_all(*node.args[1:])):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        # A constant was computed from these weights, and nothing uses them any more.
        if spec.kind != InputKind.USER_INPUT and not node.users:
            graph.erase_node(node)
            program.graph_signature.input_specs.remove(spec)
            if spec.target in program.state_dict:
                del program.state_dict[spec.target]
    program.graph_module.recompile()
    return program


def _takes_all(dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> bool:
    """Returns whether aten.slice with these arguments returns its whole input, as it does for a `:` in an index."""
    return not start and step == 1 and (stop is None or stop == sys.maxsize)


def _parity(subject: ExportSubject, form: Format, path: Path, batches: Sequence[Tensor]) -> tuple[Finding, ...]:
    """Compares the file's outputs with the model's on the same images.

    With token reduction, rounding may swap tokens, so some of the images whose outputs differ are left out. Their share
    of all images is at most MAY_DIFFER, or MAY_DIFFER_AT_LOW_PRECISION if the format has low precision.

    Raises:
        NotSupported: The file does not run, or its outputs differ.
    """
    exported = Exported(path, form, subject.images, {})

    def outputs_of(model: Callable[[Tensor], Any]) -> Sequence[Tensor]:  # [images, numbers] each
        tensors = (tensors_of(model(batch)).values() for batch in batches)
        return joined([[tensor.double().reshape(len(tensor), -1).cpu() for tensor in each] for each in tensors])

    with raising(f"the file written as {form.name} does not run", f"{path.name} was not written."), torch.no_grad():
        expected, actual = outputs_of(subject.model), outputs_of(exported)
    # NaN in the file's outputs counts as an infinite difference. The shape is [outputs, images].
    differences = torch.stack(
        [(one - other).abs().amax(-1).nan_to_num(nan=inf) for one, other in zip(expected, actual, strict=True)]
    )
    # If there are several outputs, the differences of each are relative to its own largest number.
    sizes = torch.stack([each.abs().amax(-1) for each in expected]).clamp(min=torch.finfo(torch.float64).tiny)
    difference = differences.amax(0)
    # `shares` has each image's largest difference relative to its largest logit, in increasing order.
    shares, order = (differences / sizes).amax(0).sort()
    limit, images = form.limit(subject.images.dtype), len(shares)
    prunes_tokens = any(isinstance(module, TokenReduction) for module in subject.model.modules())
    may_differ = MAY_DIFFER_AT_LOW_PRECISION if limit >= ROUNDING[torch.bfloat16] else MAY_DIFFER
    allowed = int(may_differ * images) if prunes_tokens else 0
    # Only images that differ are excluded. The largest difference is computed over all other images.
    differing = min(allowed, int((shares > limit).sum()))
    share, largest = float(shares[images - differing - 1]), float(difference[order][: images - differing].max())
    noun, kind = subject.noun, subject.outputs
    claim = f"largest difference of a {noun}, exported against eager, as a share of the largest {noun}"
    details = {"quantity": "parity", "largest_difference": largest, "images_left_out": differing}
    verdict = against_limit(share, limit, n=images, at_least=False)
    parity = Finding("parity", claim, share, **verdict, details=details)
    agreement = None
    if isinstance(kind, Logits | Multilabel):
        agreement = 100 * float(kind.agreement(kind.decisions(expected[0]), kind.decisions(actual[0])).mean())
    if parity.outcome == FAILS:
        if (by_rounding := _by_rounding(subject, outputs_of, expected, actual, limit)) is not None:
            return (by_rounding,)
        what = "labels" if isinstance(kind, Multilabel) else "class"
        kept = "" if agreement is None else f", and {agreement:.0f} % of {images} images keep their {what}"
        raise NotSupported(
            f"the file written as {form.name} does not match the model: a {noun} differs by {largest:.3g}, "
            f"{share:.3g} of the largest where {limit:g} is allowed{kept}. {path.name} was not written."
        )
    if agreement is None:
        return (parity,)
    same_class = "images that exported and eager put into the same class"
    if isinstance(kind, Multilabel):
        same_class = "labels that exported and eager give to the same images"
    return parity, Finding("parity", same_class, agreement, "%", n=images, details={"quantity": "agreement"})


def _by_rounding(
    subject: ExportSubject,
    outputs_of: Callable[[Callable[[Tensor], Any]], Sequence[Tensor]],
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    limit: float,
) -> Finding | None:
    """Explains a file's difference from the model by rounding, or returns None if rounding does not explain it.

    Some models select by order, e.g. a detector that selects the proposals with the highest scores. If scores are
    nearly equal, rounding may change the selection, and the outputs then differ completely. For comparison, the model
    itself runs on images with a relative noise of ROUNDED_BY times `limit`. In both cases, some share of the numbers
    differs by more than `limit`. Rounding explains the difference if the share for the file is at most MORE_DIFFER
    times the share for the noisy images, and at most MOST_DIFFERENT.
    """
    if limit >= ROUNDING[torch.bfloat16]:
        return None
    generator = torch.Generator().manual_seed(0)

    def rounded(images: Tensor) -> Any:
        noise = torch.randn(images.shape, generator=generator).to(images)
        return subject.model(images * (1 + ROUNDED_BY * limit * noise))

    def share_of(others: Sequence[Tensor]) -> float:
        """Returns the share of numbers that differ from the model's by more than `limit` of the largest number."""
        differ = [
            ((one - other).abs() > limit * one.abs().amax(-1, keepdim=True)) | other.isnan()
            for one, other in zip(expected, others, strict=True)
        ]
        return float(torch.cat(differ, -1).double().mean())

    with torch.no_grad():
        by_file, by_noise = share_of(actual), max(share_of(outputs_of(rounded)) for _ in range(ROUNDED_TIMES))
    if by_file > MORE_DIFFER * by_noise or by_file > MOST_DIFFERENT:
        return None
    claim = (
        f"share of the {subject.noun}s that differ by more than {limit:g} of the largest, exported against eager: "
        f"rounding the images changes {100 * by_noise:.2g} % in eager"
    )
    details = {"quantity": "parity", "by_rounding": by_noise}
    verdict = against_limit(100 * by_file, 100 * MORE_DIFFER * by_noise, n=len(expected[0]), at_least=False)
    return Finding("parity", claim, 100 * by_file, "%", **verdict, details=details)


def _put(room: Path, path: Path, facts: Mapping[str, Any]) -> None:
    """Moves the exported files from the folder `room` to their path.

    A file and its facts cannot be replaced in one step. Until both are replaced, the new facts therefore also contain
    the earlier facts, and the file's hash shows which facts are valid. With several files, hashes cannot show this, so
    the earlier export is removed first. The facts are written before the files. If the export is interrupted, the facts
    then show which files belong to it.
    """
    files = facts["files"]
    if len(files) > 1:
        require_replaceable_files(path, [path.with_name(name) for name in files])
        remove_export(path)
    earlier = present_facts(path)
    # Facts without their files do not count as an export.
    write_json(facts_path(path), facts if earlier is None else {**facts, "earlier": earlier})
    for name in files:
        # The content is flushed before the rename, as in `write_atomically`. Otherwise a power failure could leave a
        # new name without content.
        flush(room / name)
        (room / name).replace(path.with_name(name))
    if earlier is not None:
        write_json(facts_path(path), facts)
        for name in earlier["files"].keys() - files.keys():  # files that only the earlier export had
            path.with_name(name).unlink(missing_ok=True)


class _OfItems(nn.Module):
    """Wraps an image model so that it accepts inputs with the axes of the user's module, e.g. videos."""

    def __init__(self, model: nn.Module, shape: tuple[int, int, int]):
        super().__init__()
        self.model, self.shape = model, shape

    def forward(self, items: Tensor) -> Any:
        return self.model(items.flatten(1).unflatten(1, self.shape))


class _Answer(nn.Module):
    """Wraps a model to return the first tensor of its outputs, e.g. the logits of a transformers model.

    With `has_several`, all tensors are returned.
    """

    def __init__(self, model: nn.Module, has_several: bool = False):
        super().__init__()
        self.model, self.has_several = model, has_several

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        tensors = tuple(tensors_of(self.model(images)).values())
        return tensors if self.has_several else tensors[0]


def bare_subject(model: nn.Module, like: ExportSubject) -> ExportSubject:
    """Returns an `ExportSubject` for a model of unknown family, e.g. a reference, with the same input as `like`."""
    converted = _Answer(copy_module(model), has_several=isinstance(like.outputs, Several)).eval()
    return replace(like, model=converted.to(like.images.device, like.images.dtype), facts={})
