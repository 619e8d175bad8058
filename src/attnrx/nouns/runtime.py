"""The runtimes in which a model may run, and the choices that a plan for each runtime may make.

The planner reads the table RUNTIMES. Each row describes one runtime, based on measurements (docs/results/speed.md,
docs/results/gpu.md). For a runtime that this project could not measure, the row follows the vendor's guide. A row
excludes only choices that are slower for models of every size. If the target is latency, the planner times the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from attnrx.nouns.effort import AXES
from attnrx.vit.maps import DEPTH, HEADS, HIDDEN

# The axes of portable plans. Code that does not depend on attnrx can run models with these axes reduced.
STOCK = (HIDDEN, HEADS, DEPTH)
# A step in ranks or widths is at most this fraction (1 / PART) of the full number, so small models have several sizes.
PART = 8


@dataclass(frozen=True)
class Runtime:
    """A runtime on one device, and the choices that plans for it may make.

    Attributes:
        title: The name of the runtime in messages and reports.
        named_by: How you select the runtime in a call, e.g. `to='onnx'`.
        axes: The parts of a model (axes, e.g. "mlp" or "tokens") whose reduction saves time in this runtime. If they
            are STOCK, make the plan with `portable=True`.
        equal_heads: Whether heads of unequal ranks are slower than dense heads. If so, all heads of a layer get the
            same rank.
        rank_multiple: Plans use ranks that are multiples of this number (see `rank_step`).
        width_multiple: Plans use hidden widths that are multiples of this number (see `width_step`).
        most_stages: The largest number of token-merging stages that still saves time, or None if there is no limit.
            Every stage adds operations, which take time even in a small model.
        source: Where the row comes from: "measured" by this project, "assumed" from a row with the same kernels, or
            "vendor" for the vendor's guide.
        page: The page with the measurements or the guide, as a link relative to docs/.
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
        """Returns the step between the ranks that a plan may choose for heads with `head_dim` directions."""
        return min(self.rank_multiple, max(head_dim // PART, 1))

    def width_step(self, hidden: int) -> int:
        """Returns the step between the widths that a plan may choose for MLPs with `hidden` units."""
        return min(self.width_multiple, max(hidden // PART, 1))


HEADS_AT_ALL_RANKS = "results/speed.md#how-should-heads-of-different-ranks-run"
SPEEDS = "results/speed.md#how-fast-are-exported-files-beside-the-vendors-own-conversions"
# A format in `attnrx.exporting` names its row (`Format.place`).
RUNTIMES: Mapping[str, Runtime] = {
    "eager": Runtime("PyTorch on a CPU", "by default", page=HEADS_AT_ALL_RANKS),
    "compiled": Runtime("AOTInductor on a CPU", "to='aotinductor'", source="assumed", page=HEADS_AT_ALL_RANKS),
    # If ranks differ between heads, the model runs at 0.49 times timm's speed, or at 1.17 times if the ranks are
    # multiples of 8. Twelve stages are slower than timm at every size. One or two early stages save time for a large
    # batch. Widths were measured in multiples of 64.
    "cuda": Runtime(
        "a CUDA device", "a model on it", equal_heads=True, rank_multiple=8, width_multiple=64, most_stages=2,
        page="results/gpu.md#what-to-do-on-a-gpu",
    ),
    # For one image, a model with three merging stages runs at 1.56 times timm's speed, and with twelve at 1.36 times.
    "onnx": Runtime("ONNX Runtime on a CPU", "to='onnx'", most_stages=3, page=SPEEDS),
    "int8": Runtime("ONNX Runtime on a CPU, int8", "to='int8'", most_stages=3, source="assumed", page=SPEEDS),
    # In bfloat16, a model with three merging stages runs at 1.31 times timm's speed, and with twelve at 1.03 times.
    # Products are computed in tiles, and unequal heads leave parts of the tiles empty.
    "openvino-f32": Runtime("OpenVINO on a CPU", "to='openvino'", most_stages=3, source="assumed", page=SPEEDS),
    "openvino-bf16": Runtime(
        "OpenVINO on a CPU, bfloat16", "to='openvino(precision=bf16)'", equal_heads=True, most_stages=3, page=SPEEDS
    ),
    "openvino-int8": Runtime(
        "OpenVINO on a CPU, int8", "to='openvino(precision=int8)'", equal_heads=True, most_stages=3, source="assumed",
        page=SPEEDS,
    ),
    # TensorRT's kernels run on the same device as `cuda`, where the widths were measured.
    "tensorrt": Runtime(
        "TensorRT", "portable=True, multiple=64", STOCK, True, 8, 64, None, "assumed", "how-to/portable.md#tensorrt"
    ),
    # Core ML aligns the last axis to 64 bytes, 32 numbers in half precision. Its converter has no stable sort.
    "coreml": Runtime(
        "Core ML", "portable=True, multiple=32", STOCK, True, 32, 32, None, "vendor", "how-to/portable.md#core-ml"
    ),
    # An NPU needs static shapes. Multiples of 64 fill its tiles of 16, 32 and 64.
    "npu": Runtime(
        "an NPU", "portable=True, multiple=64", STOCK, True, 64, 64, None, "vendor", "how-to/portable.md#an-npu"
    ),
}  # fmt: skip
# The multiple of a portable model's widths if you do not say where the model will run.
PORTABLE_MULTIPLE = RUNTIMES["eager"].width_multiple
