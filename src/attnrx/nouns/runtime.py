"""Where a model runs, and what a plan for that place may choose. The planner reads one table.

A row states what was measured there (docs/results/speed.md, docs/results/gpu.md). If no machine of this project has the
runtime, the row follows the vendor's guide. The table only excludes choices that are slower at every size. For
everything else, plans for latency measure the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attnrx.nouns.effort import AXES
from attnrx.vit.maps import DEPTH, HEADS, HIDDEN

# The axes of portable plans. Code that does not depend on attnrx can run the result.
STOCK = (HIDDEN, HEADS, DEPTH)
# A step in ranks or widths is at most this fraction (1 / PART) of the full number, so small models have several sizes.
PART = 8


@dataclass(frozen=True)
class Runtime:
    """A place where models run.

    Attributes:
        title: The name of the place.
        named_by: How a call names the place.
        axes: The axes that save time there. For the axes of STOCK, make the plan with `portable=True`.
        equal_heads: Whether heads of unequal ranks are slower there than dense heads. All heads of a layer then get
            one rank.
        rank_multiple: The number that divides all ranks.
        width_multiple: The number that divides all hidden widths.
        most_stages: The most stages of token merging that save time, or None for any number. Every stage adds
            operations that take time, whatever the sizes of the products are.
        source: "measured" by this project, "assumed" from another row with the same kernels, or "vendor", from the
            vendor's guide.
        page: The page that states this, as a link from docs/.
    """

    title: str
    named_by: str
    axes: tuple[str, ...] = AXES
    equal_heads: bool = False
    rank_multiple: int = 16
    width_multiple: int = 8
    most_stages: int | None = None
    source: Literal["measured", "assumed", "vendor"] = "measured"
    page: str = "results/speed.md"

    def rank_step(self, head_dim: int) -> int:
        """Returns the number that divides all ranks, for heads with `head_dim` directions."""
        return min(self.rank_multiple, max(head_dim // PART, 1))

    def width_step(self, hidden: int) -> int:
        """Returns the number that divides all widths, for MLPs with `hidden` units."""
        return min(self.width_multiple, max(hidden // PART, 1))


HEADS_AT_ALL_RANKS = "results/speed.md#how-should-heads-of-different-ranks-run"
SPEEDS = "results/speed.md#how-fast-are-exported-files-beside-the-vendors-own-conversions"
# A format in `attnrx.exporting` names its row (`Format.place`).
RUNTIMES: Mapping[str, Runtime] = {
    "eager": Runtime("PyTorch on a CPU", "by default", page=HEADS_AT_ALL_RANKS),
    "compiled": Runtime("AOTInductor on a CPU", "to='aotinductor'", source="assumed", page=HEADS_AT_ALL_RANKS),
    # If ranks differ between heads, the model runs at 0.49 times timm's speed, or at 1.17 times if they are multiples
    # of 8. Twelve stages are slower than timm at every size. One or two early stages save time for a large batch.
    # Widths were measured in multiples of 64.
    "cuda": Runtime(
        "a CUDA device", "a model on it", equal_heads=True, rank_multiple=8, width_multiple=64, most_stages=2,
        page="results/gpu.md#what-to-do-on-a-gpu",
    ),
    # For one image, three stages run at 1.56 times timm's speed, and twelve at 1.36 times.
    "onnx": Runtime("ONNX Runtime on a CPU", "to='onnx'", most_stages=3, page=SPEEDS),
    "int8": Runtime("ONNX Runtime on a CPU, int8", "to='int8'", most_stages=3, source="assumed", page=SPEEDS),
    # In bfloat16, three stages run at 1.31 times timm's speed, and twelve at 1.03 times. Products are computed in
    # tiles, and unequal heads leave parts of them empty.
    "openvino-f32": Runtime("OpenVINO on a CPU", "to='openvino'", most_stages=3, source="assumed", page=SPEEDS),
    "openvino-bf16": Runtime(
        "OpenVINO on a CPU, bfloat16", "to='openvino(precision=bf16)'", equal_heads=True, most_stages=3, page=SPEEDS
    ),
    "openvino-int8": Runtime(
        "OpenVINO on a CPU, int8", "to='openvino(precision=int8)'", equal_heads=True, most_stages=3, source="assumed",
        page=SPEEDS,
    ),
    # Its kernels run on the same device as `cuda`, and the widths were measured there.
    "tensorrt": Runtime(
        "TensorRT", "portable=True, multiple=64", STOCK, True, 8, 64, None, "assumed", "how-to/portable.md#tensorrt"
    ),
    # The last axis of a buffer is aligned to 64 bytes, 32 numbers in half precision. The converter has no stable sort.
    "coreml": Runtime(
        "Core ML", "portable=True, multiple=32", STOCK, True, 32, 32, None, "vendor", "how-to/portable.md#core-ml"
    ),
    # Shapes are static, and multiples of 64 fill tiles of 16, 32 and 64.
    "npu": Runtime(
        "an NPU", "portable=True, multiple=64", STOCK, True, 64, 64, None, "vendor", "how-to/portable.md#an-npu"
    ),
}  # fmt: skip
# The number that divides a portable model's width if you do not say where the model will run.
PORTABLE_MULTIPLE = RUNTIMES["eager"].width_multiple
