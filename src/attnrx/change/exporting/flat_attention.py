"""Attention of ONNX graphs on the features of all heads side by side, without reshapes and transpositions."""

from typing import Any

from attnrx.change.exporting.format import library

HEADS_FIRST = (0, 2, 1, 3)  # [batch, tokens, heads, features] to [batch, heads, tokens, features] and back


def use_flat_attention(model: Any) -> None:
    """Makes every Attention operation take and return [batch, tokens, heads * features], where its graph allows.

    torch writes it with the heads as an axis of their own, between a reshape and a transposition of every operand. The
    operation divides the features into heads itself (operator set 23), without copies. Masks get an entry for every
    query, which ONNX Runtime requires.
    """
    ir = library("onnx_ir")
    expanded: dict[Any, Any] = {}
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
        heads = query.shape[1]
        if mask is not None and mask.shape[2] != query.shape[2]:
            # The last layer may have the queries of the tokens before the patches alone.
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
    """Inserts an operation before a node that repeats the mask for every query, and returns its output."""
    if isinstance(query.shape[2], int):
        new = [_constant(ir, [1, 1, query.shape[2], 1])]
    else:  # the size of the axis, which is known in the runtime only
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
    """Returns the [batch, tokens, features] that were divided into heads to give this operand, or None."""
    transpose = value.producer()
    if not _is_heads_first(transpose):
        return None
    reshape = transpose.inputs[0].producer()
    if reshape is None or reshape.op_type != "Reshape" or len(reshape.inputs[0].shape) != 3:
        return None
    return reshape.inputs[0]


def _flat_output(value: Any) -> Any:
    """Returns the [batch, tokens, features] into which the heads of this output are joined, or None."""
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
