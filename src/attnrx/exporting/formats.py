"""The export formats: torch.export programs and AOTInductor packages, OpenVINO, ONNX, and int8 in ONNX."""

import json
import logging
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from attnrx.errors import AttnrxError, InvalidInput, NotSupported, UnknownName
from attnrx.optional import required_module
from attnrx.serialization.text_parsing import KnobReader, Language, knobs_of
from attnrx.shapes import Float, Tensor

Run = Callable[[Tensor], Tensor]
"""Images in, logits out, on the device of the file."""

# The largest difference of a logit attributed to rounding, as a share of the largest logit.
ROUNDING: dict[torch.dtype, float] = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PRECISIONS: dict[str, torch.dtype] = {dtype_name(dtype): dtype for dtype in ROUNDING}


class Format(ABC):
    """One kind of file that runs without attnrx. Every format is a frozen dataclass whose fields are its knobs."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    writes_out: ClassVar[bool] = True
    """Whether attention is exported unfused at exact ranks, instead of as one fused call at padded ranks."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    on_cuda: ClassVar[bool] = False
    """Whether a model on a CUDA device is exported for CUDA; other formats run on the CPU."""
    is_native_code: ClassVar[bool] = False
    """Whether opening a file of this format runs machine code of the file."""

    @abstractmethod
    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the program to `path`, whose suffix is the format's, and further files to the same folder.

        `images` are normalized batches, for calibration.
        """

    @abstractmethod
    def open(self, path: Path, device: str, threads: int) -> Run:
        """Opens the file and returns a function that runs it on a device with this many CPU threads."""

    def describe(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Writes the facts into the file, where the format has a place for them."""
        del path, facts

    def example(self, path: Path) -> str | None:
        """Returns a script that classifies an image with the file alone; None where the format has none."""
        return None

    def limit(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference of a logit from eager PyTorch, as a share of the largest logit."""
        return ROUNDING[dtype]

    def files(self, path: Path) -> tuple[Path, ...]:
        """Returns the paths of the files of every export to `path`; weights of more than MOST_BYTES may add others."""
        return (path,)

    @property
    def calibrated(self) -> bool:
        """Whether the format needs calibration images."""
        return False

    @property
    def wanted(self) -> int:
        """The number of images for parity and calibration, if there are enough."""
        return 32

    def require(self, path: Path, dtype: torch.dtype) -> None:
        """Raises InvalidInput for a path without the format's suffix, NotSupported for a dtype it does not run at."""
        if path.suffix != self.suffix:
            renamed = path.with_suffix(self.suffix).name
            raise InvalidInput(f"{path}: a file of this format ends in {self.suffix}; give {renamed}.")
        if dtype not in self.dtypes:
            supported = [dtype_name(each) for each in self.dtypes]
            raise NotSupported(
                f"{self.name} at {dtype_name(dtype)}: it is written at {' or '.join(supported)}. Give "
                f"precision={supported[0]!r}."
            )


@dataclass(frozen=True)
class Program(Format):
    """A program captured by torch.export, with its weights; loading it needs PyTorch only."""

    name: ClassVar[str] = "program"
    suffix: ClassVar[str] = ".pt2"
    writes_out: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = tuple(ROUNDING)
    on_cuda: ClassVar[bool] = True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        torch.export.save(program, path)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the program; it uses torch's threads."""
        return torch.export.load(path).module()


@dataclass(frozen=True)
class AOTInductor(Program):
    """An AOTInductor package: compiled for this kind of machine, loads in seconds, and also runs from C++.

    Export needs a C++ compiler; the runtime needs the same version of PyTorch.
    """

    name: ClassVar[str] = "aotinductor"
    is_native_code: ClassVar[bool] = True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        from torch._inductor import aoti_compile_and_package, config

        # The candidates of torch's compiler; None among them represents a compiler that conda would download.
        compilers = [name for name in config.cpp.cxx if name]
        if not any(shutil.which(name) for name in compilers):
            raise NotSupported(f"aotinductor compiles C++, and there is no compiler ({', '.join(compilers)}): get g++.")
        aoti_compile_and_package(program, package_path=str(path))

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Loads the package; it uses torch's threads."""
        from torch._inductor import aoti_load_package

        return aoti_load_package(str(path))


INPUT, BATCH, OPSETS = "images", "batch", range(18, 24)
OUTPUTS = {2: "logits", 3: "features"}  # the name of the output, by its number of axes
# Runs beside the file that it is named after, with onnxruntime, NumPy and Pillow only.
EXAMPLE = '''"""Classifies an image: python {script} IMAGE"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession(str(Path(__file__).with_name("{file}")))
about = {{name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}}
channels, height, width = about["image_shape"]
image = Image.open(sys.argv[1]).convert("RGB" if channels == 3 else "L")
image = image.resize((width, height), Image.Resampling.BICUBIC)
pixels = np.asarray(image, np.float32).reshape(height, width, channels) / 255
images = ((pixels - np.array(about["mean"])) / np.array(about["std"])).transpose(2, 0, 1)[None].astype("{precision}")
logits = session.run(None, {{"images": images}})[0][0]
if len(logits) == 1:  # that of class 1 against class 0
    logits = np.array([0.0, logits[0]])
best = int(logits.argmax())
probability = np.exp(logits[best] - np.logaddexp.reduce(logits))
print(about["class_names"][best] if about["class_names"] else best, f"{{probability:.3f}}")
'''
# Protocol buffers are limited to two gigabytes; larger weights are stored in an external file.
MOST_BYTES = 1_500_000_000


@dataclass(frozen=True)
class Onnx(Format):
    """An ONNX file with input "images" and output "logits", "embedding" or "features" of all patches.

    Weights above MOST_BYTES are in an external file.

    Attention is exported unfused at exact ranks: ONNX Runtime's matrix products accept any width, so padding would only
    add operations. `opset` is the operator set version, 18 to 23; it includes GELU from 20 on.
    """

    name: ClassVar[str] = "onnx"
    suffix: ClassVar[str] = ".onnx"
    opset: int = 20

    def __post_init__(self):
        if self.opset not in OPSETS:
            raise InvalidInput(f"{self.name}(opset={self.opset}): give {OPSETS.start} to {OPSETS.stop - 1}.")

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program, folds constants and removes repeated and unused nodes."""
        _library("onnx")  # the exporter imports both, and its own message names no extra of attnrx
        op = _library("onnxscript").opset18

        def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
            # Token reducers sort stably, which torch's exporter cannot translate. TopK of all elements is a stable
            # sort: of two equal values it returns the one with the lower index first.
            count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
            return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)

        translated: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=self.opset,
            input_names=[INPUT],
            output_names=[OUTPUTS[_output_axes(program)]],
            custom_translation_table={torch.ops.aten.sort.stable: sort_stable},
            verbose=False,
            optimize=False,  # the exporter's rewriting rules take two thirds of an export; runtimes have their own
        )
        # Weights of any size, which are else transposed or joined in every call, and never quantised.
        _library("onnxscript.optimizer").fold_constants(
            translated.model, input_size_limit=MOST_BYTES, output_size_limit=MOST_BYTES
        )
        # In this order: equal weights become one, then nodes with equal inputs, and then nothing uses their copies.
        passes = _library("onnx_ir.passes.common")
        for name in ("DeduplicateInitializers", "CommonSubexpressionElimination", "RemoveUnusedNodes"):
            getattr(passes, f"{name}Pass")()(translated.model)
        _name_batch(translated.model)
        size = sum(tensor.nbytes for tensor in program.state_dict.values())
        translated.save(str(path), external_data=size > MOST_BYTES)

    def describe(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Writes image shape, normalization and class names into the metadata, as JSON, and names the output."""
        onnx = _library("onnx")
        # Only the metadata change: weights in an external file are neither read nor written.
        model = onnx.load(path, load_external_data=False)
        shown = {"image_shape": facts["images"]["shape"], **facts["normalization"], "class_names": facts["class_names"]}
        onnx.helper.set_model_props(model, {name: json.dumps(value) for name, value in shown.items()})
        _name_output(model, facts["output"])
        onnx.save(model, path)

    def example(self, path: Path) -> str | None:
        return EXAMPLE.format(script=script_path(path).name, file=path.name, precision="float32")

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Starts an ONNX Runtime session on the CPU, whose idle threads sleep instead of spinning."""
        runtime = _library("onnxruntime")
        options = runtime.SessionOptions()
        # The graph is run node by node, so threads between nodes would have no work.
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # None: all outputs, of which there is one.
        return lambda images: torch.from_numpy(session.run(None, {INPUT: _to_numpy(images)})[0])


def script_path(path: Path) -> Path:
    """Returns the path of the script beside a file."""
    return path.with_name(f"run_{path.stem}.py")


def _output_axes(program: torch.export.ExportedProgram) -> int:
    # The first argument of the output node is the tuple of all outputs, of which there is one.
    (output,) = next(node for node in program.graph.nodes if node.op == "output").args[0]
    return output.meta["val"].ndim


def _name_batch(model: Any) -> None:
    """Gives the dynamic batch dimension of an ONNX graph the name BATCH, in place of the exporter's symbol."""
    graph = model.graph
    symbol = str(graph.inputs[0].shape[0])
    if symbol.isdecimal():
        return
    # All shapes, because other sizes can be expressions of it, such as 197*s0 where batch and tokens are one axis.
    outputs = (output for node in graph.all_nodes() for output in node.outputs)
    for value in {*graph.inputs, *graph.outputs, *outputs}:
        for index, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and symbol in str(size):
                value.shape[index] = re.sub(rf"\b{re.escape(symbol)}\b", BATCH, str(size))


def _name_output(model: Any, name: str) -> None:
    """Renames the output of an ONNX graph, which has one."""
    (output,) = model.graph.output
    if output.name == name:
        return
    # torch names values by their operators, and "embedding" is one of CLIP's.
    _rename_value(model.graph, name, f"{name}_of_operator")
    _rename_value(model.graph, output.name, name)
    output.name = name


def _rename_value(graph: Any, name: str, new: str) -> None:
    for value in (*graph.initializer, *graph.value_info):
        value.name = new if value.name == name else value.name
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [new if each == name else each for each in names]


TRIED_ON = 32  # images on which maps are quantised by turns
METHODS: dict[str, str] = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}


@dataclass(frozen=True)
class Int8(Onnx):
    """ONNX with 8-bit linear maps, by ONNX Runtime's static quantisation (QDQ).

    Weights are quantised per output feature, activations per tensor with ranges estimated by `method` on `images`
    calibration images. Weights have 7 bits, so that sums of two products do not saturate on processors without VNNI,
    and are signed, as OpenVINO's kernels need them. Linear maps that change the outputs on calibration images by more
    than `tolerance` (norm of the difference over norm of the outputs) stay in float: one hidden unit that is a hundred
    times larger than all others, as pre-trained ViTs have, makes the 8 bits of its map useless. The two products inside
    attention are quantised only with `attention`; patch embedding, norms, softmax and activation functions never are.
    `most_difference` is the largest allowed difference of a logit from eager PyTorch, as a share of the largest logit;
    use `verify` to measure the loss of accuracy.
    """

    name: ClassVar[str] = "int8"
    images: int = 64
    method: str = "minmax"
    attention: bool = False
    tolerance: float = 0.1
    most_difference: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.images < 1 or self.method not in METHODS or not self.most_difference > 0 or not self.tolerance > 0:
            raise InvalidInput(
                f"int8(images={self.images}, method={self.method}, tolerance={self.tolerance}, most_difference="
                f"{self.most_difference}): give an image or more, one of {', '.join(METHODS)}, and numbers above 0."
            )

    @property
    def calibrated(self) -> bool:
        return True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the float ONNX file, finds the maps that 8 bits suffice for, and quantises them."""
        plain, trial = (path.with_name(f"{kind}_{path.name}") for kind in ("float", "trial"))
        try:
            super().write(program, plain, images)
            trial_images = images[: max(TRIED_ON // len(images[0]), 1)]
            expected = self._outputs(plain, trial_images)

            # Relative to the outputs of the float file and not of torch: the translation has its own rounding.
            def difference(maps: Sequence[str]) -> float:
                self._quantize(plain, trial, maps, trial_images)
                return float((self._outputs(trial, trial_images) - expected).norm() / expected.norm())

            maps = self._maps(_library("onnx").load(plain, load_external_data=False))
            sensitive = set(_sensitive(maps, difference, self.tolerance))
            quantized_maps = [name for name in maps if name not in sensitive]
            if not quantized_maps:
                raise NotSupported(f"every linear map changes the outputs by more than tolerance={self.tolerance}.")
            self._quantize(plain, path, quantized_maps, images)
        finally:
            for file in (*path.parent.glob(f"{plain.name}*"), *path.parent.glob(f"{trial.name}*")):
                file.unlink()  # with external weights

    def _outputs(self, path: Path, images: Sequence[Tensor]) -> Tensor:
        run = Onnx.open(self, path, "cpu", torch.get_num_threads())
        return torch.cat([run(batch) for batch in images])

    def _quantize(self, plain: Path, path: Path, maps: Sequence[str], images: Sequence[Tensor]) -> None:
        """Writes the file with these matrix products quantised."""
        quantization = _library("onnxruntime.quantization")
        with _quiet():
            quantization.quantize_static(
                plain,
                path,
                _CalibrationReader(images),
                quant_format=quantization.QuantFormat.QDQ,
                op_types_to_quantize=["Gemm", "MatMul"],
                nodes_to_quantize=list(maps),
                per_channel=True,
                # Weights of 7 bits, signed, and activations unsigned: see the class.
                reduce_range=True,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                calibrate_method=getattr(quantization.CalibrationMethod, METHODS[self.method]),
            )

    def _maps(self, model: Any) -> list[str]:
        """Returns the names of the matrix products that may be quantised, in order."""
        weights = {tensor.name for tensor in model.graph.initializer}
        products = [node for node in model.graph.node if node.op_type in ("Gemm", "MatMul")]
        # A product of two activations is one of attention's.
        return [node.name for node in products if self.attention or weights & set(node.input)]

    @property
    def wanted(self) -> int:
        """The number of calibration images."""
        return self.images

    def limit(self, dtype: torch.dtype) -> float:
        """Returns `most_difference`, because quantisation errors exceed rounding."""
        return self.most_difference


def _sensitive(maps: Sequence[str], difference: Callable[[Sequence[str]], float], most: float) -> list[str]:
    """Returns the maps of which each alone makes a larger difference, by halving the groups that do."""
    # A harmless group takes one measurement, so a few sensitive maps among many are found in a few measurements each.
    # Two groups may be harmless only one by one: `most_difference` limits the result of all.
    if difference(maps) <= most:
        return []
    if len(maps) == 1:
        return list(maps)
    half = len(maps) // 2
    return [name for part in (maps[:half], maps[half:]) for name in _sensitive(part, difference, most)]


@dataclass(frozen=True)
class OpenVINO(Format):
    """An .xml file with the graph and a .bin file with the weights, translated from the program.

    It runs in float32, also on CPUs that support narrower types; or, with the `precision` bf16, in bfloat16 on CPUs
    that compute in it and in float32 on others (the weights are stored in float32). With int8 the linear maps are those
    of the format `int8` with `images` and `tolerance`.
    """

    name: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"
    precision: str = "f32"
    images: int = 64
    tolerance: float = 0.1

    def __post_init__(self):
        if self.precision not in ("f32", "bf16", "int8"):
            raise InvalidInput(f"openvino(precision={self.precision}): choose from f32, bf16, int8.")
        self._int8()  # raises for invalid knobs

    def files(self, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")

    def _int8(self) -> Int8:
        return Int8(images=self.images, tolerance=self.tolerance)

    @property
    def calibrated(self) -> bool:
        return self.precision == "int8"

    @property
    def wanted(self) -> int:
        """The number of images for parity and, for int8, calibration."""
        return self.images if self.calibrated else super().wanted

    def limit(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference at this precision."""
        limits = {"f32": super().limit(dtype), "bf16": ROUNDING[torch.bfloat16], "int8": self._int8().limit(dtype)}
        return limits[self.precision]

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program; for int8 the quantised ONNX file of it."""
        openvino = _library("openvino", "openvino")
        if self.calibrated:
            onnx = path.with_suffix(".onnx")
            try:
                self._int8().write(program, onnx, images)
                model = openvino.convert_model(onnx)
            finally:
                onnx.unlink(missing_ok=True)
        else:
            model = openvino.convert_model(program.run_decompositions({torch.ops.aten.index_add.default: _index_add}))
        # By default the weights would be stored in float16.
        openvino.save_model(model, str(path), compress_to_fp16=False)

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Compiles the file for every number of images that occurs: up to a third faster than for any number."""
        hints = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "bf16" if self.precision == "bf16" else "f32",
            "PERFORMANCE_HINT": "LATENCY",
        }
        # f32 has to be requested: on CPUs with bfloat16 OpenVINO computes in it by default.
        core, compiled = _library("openvino", "openvino").Core(), {}
        model = core.read_model(str(path))

        def run(images: Tensor) -> Tensor:
            if len(images) not in compiled:
                model.reshape(list(images.shape))
                compiled[len(images)] = core.compile_model(model, "CPU", hints)
            # A copy, which the next call cannot overwrite.
            return torch.from_numpy(compiled[len(images)](_to_numpy(images))[0].copy())

        return run


def _index_add(table: Tensor, dim: int, index: Tensor, rows: Tensor) -> Tensor:
    """Adds rows to a matrix by an operation that OpenVINO can translate."""
    return table.scatter_add(dim, index[:, None].expand_as(rows), rows)


class _CalibrationReader:
    """ONNX Runtime's CalibrationDataReader interface: returns one batch per call, then None."""

    def __init__(self, images: Sequence[Tensor]):
        self.batches = iter(images)

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self.batches, None)
        return None if batch is None else {INPUT: _to_numpy(batch)}


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables the warnings of the quantiser."""
    # It logs by the root logger, so it has no logger of its own that could be silenced.
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)


@contextmanager
def raising(problem: str, advice: str = "", kind: type[AttnrxError] = NotSupported) -> Iterator[None]:
    """Turns the exceptions of runtimes and translators, which are of many types, into one kind with this message."""
    try:
        yield
    except AttnrxError:
        raise
    except Exception as error:
        # The exporter appends whole reports to its messages.
        reason = str(error).strip().partition("\n")[0]
        raise kind(f"{problem} ({type(error).__name__}: {reason}). {advice}".rstrip()) from error


def _library(module: str, extra: str = "onnx") -> Any:
    return required_module(module, extra, "this format")


def _to_numpy(images: Float[Tensor, "batch channels height width"]) -> Any:
    """Returns images as a contiguous NumPy array, the input of CPU runtimes other than torch."""
    return images.detach().cpu().contiguous().numpy()


FORMATS: Mapping[str, type[Format]] = {form.name: form for form in (Onnx, Program, AOTInductor, OpenVINO, Int8)}


class _FormatReader(KnobReader):
    language = Language("format", "Formats", "onnx, onnx(opset=18) or int8(images=128)", "(),=", InvalidInput)


def parse_format(text: str) -> Format:
    """Parses a format with its knobs, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128,method=percentile)`."""
    reader = _FormatReader(text)
    name = reader.expect("name", "the name of a format")
    if name.text not in FORMATS:
        raise UnknownName("format", name.text, FORMATS)
    knobs = reader.read_knobs(name, knobs_of(FORMATS[name.text]))
    reader.expect("end", "the end")
    return FORMATS[name.text](**knobs)
