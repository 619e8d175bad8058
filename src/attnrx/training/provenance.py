"""The software and hardware environment of a run."""

import platform
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from accelerate import Accelerator


def training_provenance(accelerator: "Accelerator") -> dict[str, Any]:
    """Returns the versions, the device and the number of processes and threads of a run."""
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
