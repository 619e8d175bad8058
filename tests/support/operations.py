"""What counts as an operation of a pass: what computes, and is neither a view nor new memory."""

from typing import Any


def is_computing(function: Any) -> bool:
    """Whether an operation of PyTorch computes numbers."""
    schema = getattr(function, "_schema", None)
    if schema is None:  # of Python, e.g. an item of a tuple
        return False
    aliases = [each.alias_info for each in schema.returns]
    is_view = any(each is not None and not each.is_write for each in aliases)
    return not is_view and not any(name in schema.name for name in ("empty", "unsafe_view", "detach"))
