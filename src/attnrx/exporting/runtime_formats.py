"""Formats for ONNX Runtime and OpenVINO, in float and with 8-bit linear maps."""

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from attnrx.exporting.formats import INPUT, ROUNDING, AOTInductor, Format, Program, Run, library, run_script, to_numpy
from attnrx.exporting.quantizing import inexact_maps, quantized, silent
from attnrx.support.arguments import COUNT, number, one_of, require_fields, whole
from attnrx.support.foreign_files import open_graph, open_openvino, open_session
from attnrx.support.optional import unreported
from attnrx.support.registry import Registry
from attnrx.support.shapes import Tensor
from attnrx.support.text_parsing import TextReader

BATCH = "batch"
# The opening statements of the script beside an ONNX file. The file's metadata contain the facts.
ONNX_OPENING = """session = onnxruntime.InferenceSession(str(here.with_name("{file}")))
about = {{name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}}
batch = session.get_inputs()[0].shape[0]
batch = batch if isinstance(batch, int) else 1"""
OLDEST_OPSET = 18  # the oldest version that torch's exporter writes
ATTENTION_OPSET = 23  # the first version with attention as one operation
# Protocol buffers are limited to two gigabytes, so larger weights are stored in an external file.
MOST_BYTES = 1_500_000_000
HEADS_FIRST = (0, 2, 1, 3)  # [batch, tokens, heads, features] to [batch, heads, tokens, features] and back


@dataclass(frozen=True)
class Onnx(Format):
    """An ONNX file with the input "images" and the output "logits", "embedding" or "features" (of all patches).

    If the weights exceed MOST_BYTES, they are stored in an external file.

    `opset` is the operator set version, 17 to 23. Version 20 adds a GELU operation, and version 23 adds an attention
    operation. Choose a smaller version if your runtime or tool does not support these operations, e.g. 22 for
    `quantize_dynamic`.
    """

    name: ClassVar[str] = "onnx"
    runtime: ClassVar[str] = "ONNX Runtime"
    suffix: ClassVar[str] = ".onnx"
    opset: int = 23

    def __post_init__(self):
        require_fields(self, opset=whole(17, 23))

    @property
    def libraries(self) -> tuple[str, ...]:
        return "onnx", "onnxscript", "onnxruntime"

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program, folds constants, and removes repeated and unused nodes."""
        library("onnx")  # the exporter also imports both libraries, but its message does not name attnrx's extra
        op = library("onnxscript").opset18

        def sort_stable(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
            # Token reducers need a stable sort, which torch's exporter cannot translate. TopK over all elements is a
            # stable sort, because for two equal values it returns the lower index first.
            count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]))
            return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)

        def attend(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
            scale: float | None = None, enable_gqa: bool = False,
        ) -> Any:  # fmt: skip
            # The operations below are faster than torch's, which copy the keys twice and scale both operands.
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            if factor != 1:
                query = op.Mul(query, op.CastLike(op.Constant(value_float=factor), query))
            scores = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
            scores = scores if attn_mask is None else op.Add(scores, attn_mask)
            return op.MatMul(op.Softmax(scores, axis=-1), value)

        def conv3d(
            input: Any, weight: Any, bias: Any = None, stride: Sequence[int] = (1, 1, 1),
            padding: Sequence[int] = (0, 0, 0), dilation: Sequence[int] = (1, 1, 1), groups: int = 1,
        ) -> Any:  # fmt: skip
            # If there is no bias, torch's translation adds one with two axes, which runtimes refuse.
            inputs = (input, weight) if bias is None else (input, weight, bias)
            pads = [*padding, *padding]
            return op.Conv(*inputs, strides=[*stride], pads=pads, dilations=[*dilation], group=groups)

        translations: dict[Any, Any] = {
            torch.ops.aten.sort.stable: sort_stable, torch.ops.aten.conv3d.default: conv3d
        }  # fmt: skip
        if self.opset < ATTENTION_OPSET and all(map(_is_plain, program.graph.nodes)):
            translations[torch.ops.aten.scaled_dot_product_attention.default] = attend
        num_outputs = len(program.graph_signature.user_outputs)
        translated: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=max(self.opset, OLDEST_OPSET),
            input_names=[INPUT],
            dynamic_shapes=({0: BATCH},),  # the batch size's name in the graph, unless the size is fixed
            output_names=[f"outputs{index}" for index in range(num_outputs)],  # `describe` renames them
            custom_translation_table=translations,
            verbose=False,
            optimize=False,  # rewriting the graph would take two thirds of the export, and runtimes rewrite it anyway
        )
        # Weights of any size are folded. Otherwise they would be transposed or joined in every call, and they could not
        # be quantized.
        library("onnxscript.optimizer").fold_constants(
            translated.model, input_size_limit=MOST_BYTES, output_size_limit=MOST_BYTES
        )
        passes = library("onnx_ir.passes.common")
        # The order of the passes matters. First equal weights become one weight, then nodes with equal inputs become
        # one node, and then the copies are unused.
        for name in ("DeduplicateInitializers", "CommonSubexpressionElimination", "RemoveUnusedNodes"):
            getattr(passes, f"{name}Pass")()(translated.model)
        use_flat_attention(translated.model)
        passes.RemoveUnusedNodesPass()(translated.model)
        remove_notes(translated.model)
        weights = [*program.state_dict.values(), *program.constants.values()]
        size = sum(each.nbytes for each in weights if isinstance(each, Tensor))
        if self.opset < OLDEST_OPSET:
            to_older_opset(translated.model, self.opset)
        forget_shapes_of_weights(translated.model)
        translated.save(str(path), external_data=size > MOST_BYTES)

    def describe(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Writes image shape, preprocessing and class names into the metadata, as JSON, and names the outputs."""
        ir = library("onnx_ir")
        model = ir.load(path)  # this neither loads nor writes weights in an external file
        shown = {"image_shape": facts["images"]["shape"], **facts["normalization"], "class_names": facts["class_names"]}
        shown["preprocessing"] = facts["preprocessing"]
        model.metadata_props.clear()  # removes the quantizer's metadata, which are not JSON
        model.metadata_props.update({name: json.dumps(value) for name, value in shown.items()})
        names = list(facts.get("outputs", ())) or [facts["output"]]
        for output, name in zip(model.graph.outputs, names, strict=True):
            output.name = name
        # An inner value may have the same name as an output, e.g. "embedding" in CLIP, so duplicates are renamed.
        library("onnx_ir.passes.common").NameFixPass()(model)
        forget_shapes_of_weights(model)
        ir.save(model, path)

    def example(self, path: Path) -> str | None:
        return run_script(
            path, "onnxruntime", ONNX_OPENING.format(file=path.name), f'session.run(None, {{"{INPUT}": images}})[0]'
        )

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Starts an ONNX Runtime session on the CPU. Its idle threads sleep instead of spinning."""
        runtime = library("onnxruntime")
        options = runtime.SessionOptions()
        # The graph runs node by node, so threads that run nodes in parallel would have no work.
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = open_session(path, options)
        # None requests all outputs.
        return lambda images: tuple(map(torch.from_numpy, session.run(None, {INPUT: to_numpy(images)})))


def _is_plain(node: Any) -> bool:
    """Returns whether a node is not attention, or is attention that `attend` can replace.

    `attend` cannot replace attention that is causal or grouped, has a boolean mask, or does not have four axes.
    """
    if node.target is not torch.ops.aten.scaled_dot_product_attention.default:
        return True
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    named |= node.kwargs
    mask = named.get("attn_mask")
    is_added = mask is None or mask.meta["val"].is_floating_point()
    is_usual = not (named.get("is_causal") or named.get("enable_gqa")) and named["query"].meta["val"].ndim == 4
    return is_added and is_usual


def remove_notes(model: Any) -> None:
    """Removes the exporter's notes (names, classes, lines of code) about every node and value.

    The notes make up most of a small file, and they name folders on this machine.
    """
    ir, graphs = library("onnx_ir"), [model.graph, *model.functions.values()]
    nodes = [node for graph in graphs for node in ir.traversal.RecursiveGraphIterator(graph)]
    graphs += [node.graph for node in nodes if node.graph is not None]
    values = [value for graph in graphs for value in (*graph.inputs, *getattr(graph, "initializers", {}).values())]
    values += [value for node in nodes for value in node.outputs]
    for noted in (*graphs, *nodes, *values):
        noted.metadata_props.clear()
        noted.doc_string = None


def to_older_opset(model: Any, opset: int) -> None:
    """Converts the model to an operator set version before OLDEST_OPSET."""
    for node in model.graph:
        if node.op_type.startswith("Reduce"):  # the converter keeps the attribute, which the older operation lacks
            node.attributes.pop("noop_with_empty_axes", None)
    with silent():
        library("onnxscript.version_converter").convert_version(model, opset, fallback=True)


def forget_shapes_of_weights(model: Any) -> None:
    """Removes the types and shapes that the graph declares for its weights, because the weights contain them, too.

    ONNX Runtime's dynamic quantization transposes the weight of a classifier, but not the declared shape. The declared
    shape would then contradict the weight.
    """
    for value in model.graph.initializers.values():
        value.type = value.shape = None


def use_flat_attention(model: Any) -> None:
    """Changes Attention operations so that they take and return [batch, tokens, heads * features], where possible.

    torch writes the operation with a separate axis for the heads, so every operand is reshaped and transposed. In
    operator set 23, the operation itself can divide the features into heads without copies. ONNX Runtime requires one
    mask row per query, so a mask with only one row is repeated.
    """
    ir = library("onnx_ir")
    expanded: dict[Any, Any] = {}
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
        heads = query.shape[1]
        if mask is not None and mask.shape[2] != query.shape[2]:
            # The last layer may have queries only for the tokens before the patches, so masks may need several sizes.
            key = mask, query.shape[2]
            if key not in expanded:
                expanded[key] = _with_all_queries(ir, node, mask, query)
            node.replace_input_with(3, expanded[key])
        flat = [_flat_input(value) for value in node.inputs[:3]]
        joined = _flat_output(node.outputs[0])
        if None in flat or joined is None:
            continue
        for index, value in enumerate(flat):
            node.replace_input_with(index, value)
        for name in ("q_num_heads", "kv_num_heads"):
            node.attributes.add(ir.AttrInt64(name, heads))
        node.outputs[0].shape = joined.shape
        ir.convenience.replace_all_uses_with(joined, node.outputs[0])


def _with_all_queries(ir: Any, node: Any, mask: Any, query: Any) -> Any:
    """Inserts, before a node, an operation that repeats the mask for every query. Returns the repeated mask."""
    if isinstance(query.shape[2], int):
        new = [_constant(ir, [1, 1, query.shape[2], 1])]
    else:  # only the runtime knows the size of the axis
        parts = _constant(ir, [1, 1]), ir.node("Shape", [query], {"start": 2, "end": 3}), _constant(ir, [1])
        new = [*parts, ir.node("Concat", [part.outputs[0] for part in parts], {"axis": 0})]
    new.append(ir.node("Expand", [mask, new[-1].outputs[0]]))
    new[-1].outputs[0].dtype = mask.dtype
    node.graph.insert_before(node, new)
    return new[-1].outputs[0]


def _constant(ir: Any, numbers: list[int]) -> Any:
    constant = ir.node("Constant", [], {"value_ints": numbers})
    constant.outputs[0].dtype, constant.outputs[0].shape = ir.DataType.INT64, ir.Shape([len(numbers)])
    return constant


def _flat_input(value: Any) -> Any:
    """Returns the value [batch, tokens, features] that was divided into heads to give `value`, or None."""
    transpose = value.producer()
    if not _is_heads_first(transpose):
        return None
    reshape = transpose.inputs[0].producer()
    if reshape is None or reshape.op_type != "Reshape" or len(reshape.inputs[0].shape) != 3:
        return None
    return reshape.inputs[0]


def _flat_output(value: Any) -> Any:
    """Returns the value [batch, tokens, features] in which the heads of `value` are joined, or None."""
    for op_type in ("Transpose", "Reshape"):
        consumers = [use.node for use in value.uses()]
        if len(consumers) != 1 or consumers[0].op_type != op_type:
            return None
        if op_type == "Transpose" and not _is_heads_first(consumers[0]):
            return None
        value = consumers[0].outputs[0]
    return value if len(value.shape) == 3 else None


def _is_heads_first(node: Any) -> bool:
    return node is not None and node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == HEADS_FIRST


@dataclass(frozen=True)
class Int8(Onnx):
    """ONNX with 8-bit matrix products, quantized by NNCF on `images` calibration images (see `quantizing`).

    Weights have one scale per output feature, and activations have one scale per tensor. Norms, softmax and activation
    functions stay in float, and so do the products by which token reducers compare tokens. `most_difference` limits how
    far a logit may differ from eager PyTorch, as a share of the largest logit. To measure the loss of accuracy, use
    `verify`.
    """

    name: ClassVar[str] = "int8"
    images: int = 300
    most_difference: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        require_fields(self, images=COUNT, most_difference=number(0.0))

    def runtime_at(self, precision: str) -> str:
        """Returns the runtime's name with the precision int8, whatever precision the file's input has."""
        del precision
        return super().runtime_at("int8")

    @property
    def libraries(self) -> tuple[str, ...]:
        return *super().libraries, "nncf"

    @property
    def extra(self) -> str:
        return "int8"

    @property
    def calibrated(self) -> bool:
        return True

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Writes the ONNX file in float, and then replaces it by a file with the quantized graph."""
        super().write(program, path, images)
        onnx = library("onnx")
        model = open_graph(path)
        graph, constants = model.graph, {tensor.name for tensor in model.graph.initializer}
        # Attention is one operation, so all remaining products of two activations compare tokens.
        floats = [node.name for node in graph.node if node.op_type == "MatMul" and constants.isdisjoint(node.input)]
        floats += products_of(graph, inexact_maps(program, images))
        made = quantized(model, ({graph.input[0].name: to_numpy(batch)} for batch in images), floats)
        use_unsigned_activations(made)
        keep_biases_apart(made)
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
        onnx.save(made, path, save_as_external_data=made.ByteSize() > MOST_BYTES, location=f"{path.name}.data")

    @property
    def wanted(self) -> int:
        """The number of calibration images."""
        return self.images

    def limit(self, dtype: torch.dtype) -> float:
        """Returns `most_difference`, because quantization errors exceed rounding."""
        return self.most_difference


def products_of(graph: Any, maps: Collection[str]) -> list[str]:
    """Returns the names of the matrix products in an ONNX graph that compute these linear maps of a program."""
    producers = {name: node for node in graph.node for name in node.output}
    products = {name: node for name, node in producers.items() if node.op_type in ("MatMul", "Gemm")}
    found = list[str]()
    for name in maps:
        # The graph has the output of a map under the map's name. It is the product, or the product and a bias.
        outputs = (name, *producers[name].input) if name in producers else ()
        found += [products[output].name for output in outputs if output in products][:1]
    return found


def use_unsigned_activations(model: Any) -> None:
    """Makes signed 8-bit activations unsigned. Zero points grow by 128, so the represented numbers stay the same.

    ONNX Runtime would make the same change itself. But if it has moved a quantizing operation before a reshape, ONNX
    Runtime 1.31 rejects the file, because the declared type is still signed.
    """
    onnx, arrays = library("onnx"), library("onnx.numpy_helper")
    points = {each.name: each for each in model.graph.initializer}
    unsigned = set[str]()
    for node in model.graph.node:
        point = points.get(node.input[2]) if node.op_type == "QuantizeLinear" else None
        if point is not None and point.data_type == onnx.TensorProto.INT8:
            shifted = arrays.to_array(point).astype(np.int16) + 128
            point.CopyFrom(arrays.from_array(shifted.astype(np.uint8), point.name))
            unsigned |= {point.name, node.output[0]}
    for value in model.graph.value_info:
        if value.name in unsigned:
            value.type.tensor_type.elem_type = onnx.TensorProto.UINT8


def keep_biases_apart(model: Any) -> None:
    """Reshapes the biases of linear maps from [features] to [1, 1, features], so they have as many axes as the tokens.

    ONNX Runtime computes the product in 8 bits and adds the bias later. But if all sizes are fixed and the bias has one
    axis, ONNX Runtime fuses the product and the bias into one operation, which only exists in float. It then converts
    every weight to float in every call, and a call takes 2.3 times as long (ONNX Runtime 1.31).
    """
    arrays = library("onnx.numpy_helper")
    tensors = {each.name: each for each in model.graph.initializer}
    axes = {each.name: len(each.type.tensor_type.shape.dim) for each in model.graph.value_info}
    products = {node.output[0] for node in model.graph.node if node.op_type == "MatMul"}
    uses = Counter(name for node in model.graph.node for name in node.input)
    for node in model.graph.node:
        added = [name for name in node.input if name in products and axes.get(name, 0) > 2]
        for name in node.input if node.op_type == "Add" and added else ():
            bias = tensors.get(name)
            if bias is not None and len(bias.dims) == 1 and uses[name] == 1:
                shape = [1] * (axes[added[0]] - 1) + [-1]
                bias.CopyFrom(arrays.from_array(arrays.to_array(bias).reshape(shape), name))


# OpenVINO -------------------------------------------------------------------------------------------------------------

# The opening statements of the script beside an OpenVINO file. The export's JSON file contains the facts.
OPENVINO_OPENING = """about = json.loads(here.with_name("{file}.json").read_text(encoding="utf-8"))
batch = about["images"]["batch"] or 1
hints = {{"INFERENCE_PRECISION_HINT": "{precision}"}}
compiled = openvino.Core().compile_model(str(here.with_name("{file}")), "CPU", hints)"""


class _SignalStack(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def _signal_stack_kept() -> Iterator[None]:
    """Restores this thread's signal stack (the memory in which signals are handled) at the end of the block.

    A compiled OpenVINO model sets its own stack. When the model is deleted, it restores the stack that it found. If
    there are two models, the second deletion restores the stack of the first model, which no longer exists. The next
    signal then ends the process, e.g. the signal that a data loader's worker has ended.
    """
    exchange = getattr(ctypes.CDLL(None), "sigaltstack", None) if sys.platform == "linux" else None
    stack = _SignalStack()
    if exchange is not None:
        exchange(None, ctypes.byref(stack))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(stack), None)


def converted_by_openvino(source: Any, **options: Any) -> Any:
    """Returns a module or a program as an OpenVINO graph."""
    openvino = library("openvino", "openvino")
    with unreported():
        return openvino.convert_model(source, **options)


def fold_norms_(model: Any) -> None:
    """Folds the scale g and the offset b of every layer norm into the linear maps W that follow it.

    W (g x + b) = (W g) x + W b, where W g scales the columns of W. A norm is folded only if its output goes to linear
    maps and nowhere else. Without folding, OpenVINO computes g x + b for all tokens in a separate operation.
    """
    op = library("openvino.opset13", "openvino")
    for norm in [node for node in model.get_ordered_ops() if node.get_type_name() == "MVN"]:
        scaled = _only_user(norm, "Multiply")
        shifted = None if scaled is None else _only_user(scaled, "Add")
        if scaled is None or shifted is None:
            continue
        gains, offsets, maps = _constant_of(scaled), _constant_of(shifted), _users(shifted)
        if gains is None or offsets is None or not gains.size == offsets.size == gains.shape[-1]:
            continue
        # The weights are [outputs, inputs] or their transposes.
        found = [_constant_of(each) if each.get_type_name() == "MatMul" else None for each in maps]
        weights = [weight for weight in found if weight is not None and weight.ndim == 2]
        if len(weights) < len(maps):
            continue
        for each, weight in zip(maps, weights, strict=True):
            columns = weight if each.get_attributes()["transpose_b"] else weight.T
            product = op.matmul(norm, op.constant(columns * gains.reshape(-1)), False, True)
            product.set_friendly_name(each.get_friendly_name())
            constant, added = columns @ offsets.reshape(-1), _only_user(each, "Add")
            bias = None if added is None else _constant_of(added)
            if bias is not None and bias.size == bias.shape[-1]:
                constant = constant + bias.reshape(-1)
            else:
                added = None
            result = op.add(product, op.constant(constant))
            for use in (added or each).output(0).get_target_inputs():
                use.replace_source_output(result.output(0))
    model.validate_nodes_and_infer_types()


def divide_attention_(model: Any) -> None:
    """Replaces scaled dot-product attention by its two products and its softmax.

    OpenVINO runs both the single operation and the separate operations in the same kernel. But for the single
    operation, OpenVINO also transposes the keys in memory (docs/results/speed.md).
    """
    op = library("openvino.opset13", "openvino")
    for node in [each for each in model.get_ordered_ops() if each.get_type_name() == "ScaledDotProductAttention"]:
        query, key, value, *others = node.input_values()
        # Programs from torch always have a mask, which may be a single number, and a scale.
        if len(others) != 2 or node.get_attributes()["causal"]:
            continue
        mask, scale = others
        factor = _number_of(scale.get_node())
        scaled = query if factor == 1.0 else op.multiply(query, scale)
        products = op.matmul(scaled, key, False, True)
        if _number_of(mask.get_node()) != 0.0:
            products = op.add(products, mask)
        attended = op.matmul(op.softmax(products, -1), value, False, False)
        for use in node.output(0).get_target_inputs():
            use.replace_source_output(attended.output(0))
    model.validate_nodes_and_infer_types()


def _number_of(node: Any) -> float | None:
    """Returns the value of a constant that is a single number, or None for any other node."""
    is_number = node.get_type_name() == "Constant" and node.get_data().size == 1
    return float(node.get_data().item()) if is_number else None


def _users(node: Any) -> list[Any]:
    return [use.get_node() for use in node.output(0).get_target_inputs()]


def _only_user(node: Any, type_name: str) -> Any:
    """Returns the operation of this type that is the only user of a node's output, or None."""
    users = _users(node)
    return users[0] if len(users) == 1 and users[0].get_type_name() == type_name else None


def _constant_of(node: Any) -> "np.ndarray | None":
    """Returns the second operand of an operation, or None if it is not a float32 constant."""
    source = node.input_value(1).get_node()
    if source.get_type_name() != "Constant" or source.get_element_type().to_string() != "f32":
        return None
    return np.array(source.get_data())


def comparisons(model: Any) -> list[str]:
    """Returns the names of matrix products of two activations.

    If attention is one operation, every such product is one that a token reducer uses to compare tokens.
    """
    constants, found = set[str](), list[str]()
    for node in model.get_ordered_ops():
        are_constant = [value.get_node().get_name() in constants for value in node.input_values()]
        if node.get_type_name() == "Constant" or (are_constant and all(are_constant)):
            constants.add(node.get_name())
        elif node.get_type_name() == "MatMul" and not any(are_constant):
            found.append(node.get_friendly_name())
    return found


@dataclass(frozen=True)
class OpenVINO(Format):
    """An .xml file with the graph and a .bin file with the weights, translated from the program.

    `precision` is f32, bf16 or int8. With f32, the file runs in float32, even on CPUs that support narrower types. With
    bf16, it runs in bfloat16 on CPUs that support this type, and in float32 on others. The weights are stored in
    float32. With int8, NNCF quantizes the matrix products to 8 bits on `images` calibration images (see `quantizing`).
    All other operations then run as with bf16.
    """

    name: ClassVar[str] = "openvino"
    suffix: ClassVar[str] = ".xml"
    runtime: ClassVar[str] = "OpenVINO"
    precision: str = "f32"
    images: int = Int8.images

    def __post_init__(self):
        require_fields(self, precision=one_of("f32", "bf16", "int8"), images=COUNT)

    def files(self, path: Path) -> tuple[Path, ...]:
        return path, path.with_suffix(".bin")

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("openvino", "nncf") if self.calibrated else ("openvino",)

    @property
    def extra(self) -> str:
        return "int8" if self.calibrated else "openvino"

    @property
    def place(self) -> str:
        return f"{self.name}-{self.precision}"

    @property
    def calibrated(self) -> bool:
        return self.precision == "int8"

    @property
    def wanted(self) -> int:
        """The number of images for comparing the file with the model and, for int8, for calibration."""
        return self.images if self.calibrated else super().wanted

    def runtime_at(self, precision: str) -> str:
        """Returns the runtime's name with the precision of this format.

        The input of the file may have another precision.
        """
        return super().runtime_at({"bf16": "bfloat16", "int8": "int8"}.get(self.precision, precision))

    def limit(self, dtype: torch.dtype) -> float:
        """Returns the largest allowed difference at this precision."""
        limits = {"f32": super().limit(dtype), "bf16": ROUNDING[torch.bfloat16], "int8": Int8().limit(dtype)}
        return limits[self.precision]

    def write(self, program: torch.export.ExportedProgram, path: Path, images: Sequence[Tensor]) -> None:
        """Translates the program and, for int8, quantizes its graph."""
        openvino = library("openvino", "openvino")
        model = converted_by_openvino(program)
        fold_norms_(model)
        if self.calibrated:
            inexact = {f"{name}/aten.linear.default/MatMul" for name in inexact_maps(program, images)}
            names = {node.get_friendly_name() for node in model.get_ordered_ops()}
            model = quantized(model, map(to_numpy, images), [*comparisons(model), *sorted(inexact & names)])
        divide_attention_(model)
        # By default, OpenVINO would store the weights in float16.
        openvino.save_model(model, str(path), compress_to_fp16=False)

    def example(self, path: Path) -> str | None:
        return run_script(
            path, "openvino", OPENVINO_OPENING.format(file=path.name, precision=self._hint), "compiled(images)[0]"
        )

    @property
    def _hint(self) -> str:
        # f32 must be requested, because by default OpenVINO computes in bfloat16 on CPUs that support it.
        return "f32" if self.precision == "f32" else "bf16"

    def open(self, path: Path, device: str, threads: int) -> Run:
        """Compiles the file once per input shape, which is up to a third faster than a dynamic batch size."""
        hints = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self._hint,
            "PERFORMANCE_HINT": "LATENCY",
        }
        library("openvino", "openvino")  # if OpenVINO is not installed, this raises an error that names the extra
        (core, model), compiled = open_openvino(path), {}

        def run(images: Tensor) -> tuple[Tensor, ...]:
            if images.shape not in compiled:
                model.reshape(list(images.shape))
                with _signal_stack_kept():
                    compiled[images.shape] = core.compile_model(model, "CPU", hints)
            found = compiled[images.shape](to_numpy(images))
            # The outputs are copied, because the next call would overwrite them.
            return tuple(torch.from_numpy(found[index].copy()) for index in range(len(model.outputs)))

        return run


# All formats ----------------------------------------------------------------------------------------------------------

FORMATS = Registry[type[Format]]("format", Onnx, Program, AOTInductor, OpenVINO, Int8)


class _FormatReader(TextReader):
    noun, plural, signs = "format", "Formats", "(),="
    examples = "onnx, onnx(opset=18) or int8(images=128)"


def parse_format(text: str) -> Format:
    """Parses a format with its options, e.g. `onnx`, `onnx(opset=18)` or `int8(images=128)`.

    Raises:
        UnknownName: There is no such format or option.
        InvalidInput: The text is not a name, optionally followed by options in brackets.
    """
    reader = _FormatReader(text)
    name, kind = reader.read_name(FORMATS)
    form = reader.build(name, kind, reader.read_knobs(name, kind))
    reader.expect("end", "the end")
    return form
