"""Files: JSON and safetensors, atomic writes, validation on reading, text forms, and the hub.

The functions of `storage` are attributes of the package, imported lazily: the command line needs its text forms before
torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["json_text", "read_json", "read_tensors", "write_atomically", "write_json", "write_tensors", "write_text"]

if TYPE_CHECKING:
    from attnrx.support.serialization.storage import (
        json_text,
        read_json,
        read_tensors,
        write_atomically,
        write_json,
        write_tensors,
        write_text,
    )


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
    return getattr(importlib.import_module("attnrx.support.serialization.storage"), name)
