"""Files: JSON and safetensors, atomic writes, validation on reading, text forms, and the hub."""

from attnrx.serialization.atomic_writes import write_atomically
from attnrx.serialization.storage import json_text, read_json, read_tensors, write_json, write_tensors, write_text

__all__ = ["json_text", "read_json", "read_tensors", "write_atomically", "write_json", "write_tensors", "write_text"]
