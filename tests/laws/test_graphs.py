"""The graph of an exported model has no operation that its mathematics does not need, and gives the model's outputs."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnrx as rx
from attnrx.vit.attention import Attention, Eager, Portable
from attnrx.vit.models import attach_tokens_, family_of
from attnrx.vit.tokens import parse_policy
from attnrx_lab.vision_transformer import full_spec
from support.pretrained import BEIT, VIT, of_timm

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.usefixtures("single_precision")

# One product for every linear map, one attention, and nothing around it; bias and residual are additions. Query, key
# and value have products of their own: one product and its division into three take longer (docs/results/speed.md).
BLOCK = {"LayerNormalization": 2, "MatMul": 6, "Add": 8, "Attention": 1, "Gelu": 1}
# Before operator set 23: two products and a softmax, and heads as an axis, with the keys transposed once.
OLDER_BLOCK = {
    "LayerNormalization": 2, "MatMul": 8, "Add": 8, "Softmax": 1, "Gelu": 1, "Reshape": 4, "Transpose": 5
}  # fmt: skip
STAGE = 87
"""The operations of one stage of Ward in a graph for batches of any size."""


def adopted(depth: int, name: str = VIT) -> nn.Module:
    return rx.load(of_timm(name, depth=depth).float()).eval()


def operations(model: nn.Module, path: Path, to: str = "onnx") -> Counter[str]:
    """Exports the model, which compares the outputs, and counts the operations of the file by type."""
    rx.export(model, path, to)
    return Counter(node.op_type for node in onnx.load(path).graph.node if node.op_type != "Constant")


@pytest.mark.parametrize(("to", "block"), [("onnx", BLOCK), ("onnx(opset=22)", OLDER_BLOCK)])
def test_a_block_is_few_operations(to: str, block: dict[str, int], tmp_path: Path) -> None:
    counts = [operations(adopted(depth), tmp_path / f"{depth}.onnx", to) for depth in (2, 3)]
    assert counts[1] - counts[0] == block
    assert not counts[0] - counts[1]


class Attending(nn.Module):
    """Attention of torch with other arguments than those of attnrx."""

    def __init__(self, **options: Any):
        super().__init__()
        self.options = options

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        heads = images[:, :, None].expand(-1, -1, 2, -1, -1).flatten(0, 1)  # [batch, heads, tokens, features]
        is_seen = (heads[..., :4] > 0) | (torch.arange(4) == 0)
        mask = {"attn_mask": is_seen} if self.options.get("is_masked") else {}
        options = {name: value for name, value in self.options.items() if name != "is_masked"}
        return F.scaled_dot_product_attention(heads, heads[..., :4, :], heads[..., :4, :], **mask, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_masked": True}, {"is_causal": True}], ids=str)
def test_attention_of_any_kind_is_right_in_older_operator_sets(options: dict[str, Any], tmp_path: Path) -> None:
    module, images = Attending(**options).eval(), torch.randn(2, 3, 4, 8)
    program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    form = rx.exporting.parse_format("onnx(opset=20)")
    form.write(program, tmp_path / "model.onnx", [images])
    (found,) = form.open(tmp_path / "model.onnx", "cpu", 1)(images)
    torch.testing.assert_close(found, module(images))


def test_norms_are_folded_into_linear_maps_in_openvino(tmp_path: Path) -> None:
    openvino, model = pytest.importorskip("openvino"), adopted(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # scales and offsets that are not 1 and 0
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    rx.export(model, tmp_path / "model.xml", "openvino")
    nodes = openvino.Core().read_model(tmp_path / "model.xml").get_ordered_ops()
    norms = [node for node in nodes if node.get_type_name() == "MVN"]
    users = [use.get_node().get_type_name() for norm in norms for use in norm.output(0).get_target_inputs()]
    # Of every block's first norm query, key and value, of its second one the MLP; not that before the head.
    assert Counter(users) == {"MatMul": 4 * 3, "Multiply": 1}


@pytest.mark.parametrize("policy", [None, "ward:0.6@2,3"])
def test_openvino_transposes_no_keys_and_expands_nothing(policy: str | None, tmp_path: Path) -> None:
    """Both copy memory: a fused attention transposes its keys, and `@` expands both of its sides."""
    openvino, model = pytest.importorskip("openvino"), adopted(3)
    if policy is not None:
        attach_tokens_(model, family_of(model), parse_policy(policy))
    rx.export(model, tmp_path / "model.xml", "openvino")
    read = openvino.Core().read_model(tmp_path / "model.xml")
    counts = Counter(node.get_type_name() for node in read.get_ordered_ops())
    assert not counts["ScaledDotProductAttention"] and counts["Softmax"] == 3
    # The class token, constants of the stages, and where merged patches are added to those that are left.
    assert counts["Broadcast"] <= (1 if policy is None else 10)
    keys = [node for node in read.get_ordered_ops() if node.get_type_name() == "Softmax"]
    products = [node.input_value(0).get_node() for node in keys]
    products = [each.input_value(0).get_node() if each.get_type_name() == "Add" else each for each in products]
    assert all(each.get_attributes() == {"transpose_a": False, "transpose_b": True} for each in products)


def test_a_stage_of_merging_has_no_product_but_the_similarities(tmp_path: Path) -> None:
    plain, merging = adopted(3), adopted(3)
    attach_tokens_(merging, family_of(merging), parse_policy("ward:0.6@2"))
    difference = operations(merging, tmp_path / "merging.onnx")
    difference.subtract(operations(plain, tmp_path / "plain.onnx"))
    assert difference.total() <= STAGE
    assert difference["MatMul"] == 1  # a quantizer takes every product for a layer, and rounds what it multiplies
    assert difference["ScatterElements"] == 4  # which patches are left, the sizes, the patches, their norms
    assert difference["TopK"] == 1
    assert difference["Attention"] == 0


@pytest.mark.parametrize(("ranks", "operations_per_layer"), [((16, 16, 16), 1), ((16, 15, 16), 1), ((16, 8, 8), 2)])
def test_equal_heads_are_one_attention(ranks: tuple[int, ...], operations_per_layer: int) -> None:
    """And unequal ones are padded only where that adds little arithmetic."""
    spec = replace(full_spec("dense", 48, 3), ranks=ranks)
    layer = Attention(spec, Portable()).eval()
    tokens = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        program = torch.export.export(layer, (tokens,))
        outputs = program.module()(tokens)
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.aten.scaled_dot_product_attention.default) == operations_per_layer
    layer.backend = Eager()
    with torch.no_grad():
        torch.testing.assert_close(outputs, layer(tokens))


@pytest.mark.parametrize("to", ["onnx", "onnx(opset=20)", "openvino", "program"])
@pytest.mark.parametrize("name", [VIT, BEIT])
@pytest.mark.slow
def test_every_format_gives_the_outputs_for_any_batch(name: str, to: str, tmp_path: Path) -> None:
    form = rx.exporting.parse_format(to)
    for library in form.libraries:
        pytest.importorskip(library)
    model = adopted(2, name)
    file = rx.export(model, tmp_path / f"model{form.suffix}", to)
    for count in (1, 5):
        images = torch.randn(
            count, *family_of(model).input_shape(model), generator=torch.Generator().manual_seed(count)
        )
        with torch.no_grad():
            torch.testing.assert_close(file(images), model(images), rtol=1e-3, atol=1e-4)


def test_a_program_has_no_weights_that_it_does_not_read(tmp_path: Path) -> None:
    """The weights of the query are constants that are multiplied by the scale; the original ones are not stored."""
    rx.export(adopted(2), tmp_path / "model.pt2", "program")
    program = torch.export.load(tmp_path / "model.pt2")
    assert not [name for name in program.state_dict if ".query." in name]
    weights = sum(each.numel() for each in (*program.state_dict.values(), *program.constants.values()))  # type: ignore[union-attr]
    assert weights == sum(parameter.numel() for parameter in adopted(2).parameters())
