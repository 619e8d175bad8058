"""Where and with what a run was made."""

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def provenance(accelerator: "Accelerator") -> dict[str, Any]:
    """Returns the versions, the device and the processes of a run."""
    device = accelerator.device
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("attnrx", "torch", "accelerate")},
        },
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
    }
