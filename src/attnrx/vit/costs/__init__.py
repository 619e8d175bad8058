"""The costs of a model: parameters and MACs, computed by formulas or counted, and measured latency and memory."""

from attnrx.support.hardware import device_name
from attnrx.vit.costs.measured import (
    Conditions,
    LatencyComparison,
    LatencyProtocol,
    MemoryComparison,
    PeakMemory,
    Timing,
    compare_latencies,
    compare_latency,
    compare_memory,
    factors_text,
    interleave,
    ratio_of,
    speed_text,
)
from attnrx.vit.costs.model_costs import (
    LayerCosts,
    ModelCosts,
    PartCosts,
    TokenCosts,
    count_params,
    count_product_macs,
    layer_costs,
    linear_costs,
    token_costs,
)

__all__ = [
    "Conditions", "LatencyComparison", "LatencyProtocol", "LayerCosts", "MemoryComparison", "ModelCosts", "PartCosts",
    "PeakMemory", "Timing", "TokenCosts", "compare_latencies", "compare_latency", "compare_memory",
    "count_params", "count_product_macs", "device_name", "factors_text", "interleave", "layer_costs", "linear_costs",
    "ratio_of", "speed_text", "token_costs",
]  # fmt: skip
