"""The attention kernels that ran, as torch's profiler names them."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

FUSED = "aten::_scaled_dot_product_"
NATIVE = {f"attnrx::native_{kind}" for kind in ("attention", "joint_attention", "mixed_attention", "block")}


def attention_kernel(run: Callable[[], object]) -> str:
    """Gives the kernels that scaled_dot_product_attention chose, "native" for the C++ kernel, or "unfused"."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    operations = {event.key for event in recorded.key_averages()}
    names = sorted(name.removeprefix(FUSED) for name in operations if name.startswith(FUSED))
    names += ["native"] * (not NATIVE.isdisjoint(operations))
    return " + ".join(names) or ("unfused" if any("softmax" in name for name in operations) else "unknown")
