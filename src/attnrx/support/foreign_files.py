"""Opens other authors' files: Hugging Face and timm models, tables, pickles, torch programs, ONNX files and others.

A library that loads a file or a repository may run code by its author. Only this module calls library functions that
may run such code (`tests/test_structure.py`), so it decides which code may run. An author's code only runs if `trust`
is true. Code in pickles never runs. The user is never asked on the terminal.
"""

import argparse
import glob
import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnrx.support.arguments import described_error
from attnrx.support.errors import CheckpointError, DataError, InvalidInput
from attnrx.support.optional import environment, required_module

# The settings files of a model, which may name code in its repository, in the order in which they are loaded.
SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # an environment variable that torch.load uses
PICKLES = ("pytorch_model.bin", "adapter_model.bin", "*.bin", "*.pt", "*.pth")


def untrusted(what: str, more: str = "") -> InvalidInput:
    """Returns the error for a file or a repository (`what`) that can run its author's code and is not trusted."""
    return InvalidInput(
        f"{what} can run any code of its author, with your rights, once it is opened. If you trust its origin, pass "
        f"trust=True (--trust on the command line){more}."
    )


def open_pretrained(kind: Any, source: Path | str, trust: bool, **options: Any) -> Any:
    """Loads an object of a transformers class with its `from_pretrained`.

    Args:
        kind: The class, e.g. AutoConfig.
        source: A folder, or an id on the hub.
        trust: Whether code in the repository may run.
        **options: Other arguments of `from_pretrained`.

    Raises:
        InvalidInput: The model needs code in the repository, and `trust` is False.
        CheckpointError: The weights are a pickle that holds more than tensors.
    """
    try:
        # `trust_remote_code` is passed in every call, because otherwise transformers asks on the terminal.
        opened = kind.from_pretrained(source, trust_remote_code=trust, **options)
    except pickle.UnpicklingError as error:
        raise _not_tensors(_first(source, PICKLES), error) from error
    except ValueError as error:
        if trust or "trust_remote_code" not in str(error):
            raise
        named = [name for name in SETTINGS if _names_code(Path(source) / name)]
        where = f"{Path(source) / named[0]} names code in auto_map, which" if named else f"the code of {source}"
        raise untrusted(where) from error
    # A configuration may also name kernels on the hub, which are native code that its models download.
    parts = [opened, *(getattr(opened, name, None) for name in getattr(opened, "sub_configs", ()))]
    kernels = [name for part in parts if "/" in (name := str(getattr(part, "_attn_implementation", "")))]
    if kernels and not trust:
        raise untrusted(f"the attention {kernels[0]} in config.json of {source}")
    return opened


def model_from(kind: Any, config: Any, trust: bool = False) -> Any:
    """Returns a transformers model with random weights, created from a model class or an Auto class."""
    return kind.from_config(config, trust_remote_code=trust) if hasattr(kind, "from_config") else kind(config)


def open_timm(name: str, pretrained: bool, **arguments: Any) -> Any:
    """Creates a timm model. Only tensors are loaded from a file of weights, even if the file is a pickle.

    Raises:
        CheckpointError: The weights are a pickle that holds more than tensors.
    """
    from timm import create_model

    try:
        with environment(TENSORS_ONLY, "1"):  # earlier versions of timm unpickle files in folders without limits
            return create_model(name, pretrained=pretrained, **arguments)
    except pickle.UnpicklingError as error:
        raise _not_tensors(name, error) from error


def open_hub_data(name: str, folder: str | None, revision: str | None) -> Any:
    """Returns the splits of a dataset on the hub. Scripts in the repository are never run."""
    import datasets

    return datasets.load_dataset(name, data_dir=folder, revision=revision, trust_remote_code=False)


def table_features(path: Path) -> Any:
    """Returns the columns of a parquet file with their types, as `datasets.Features`."""
    import datasets
    import pyarrow.parquet

    return datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))


def table_rows(path: Path) -> int:
    """Returns the number of rows in a parquet file."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path).num_rows


def open_tables(paths: Sequence[Path], copy: Path) -> Any:
    """Returns parquet files as one `datasets.Dataset`, which is memory-mapped from a copy in the folder `copy`."""
    import datasets

    # `from_parquet` treats file names as patterns, so they are escaped.
    return datasets.Dataset.from_parquet([glob.escape(str(path)) for path in paths], cache_dir=str(copy))


def open_graph(path: Path) -> Any:
    """Returns the graph of an ONNX file, including weights in an external file."""
    import onnx

    return onnx.load(path)


def open_session(path: Path, options: Any) -> Any:
    """Starts an ONNX Runtime session on the CPU. The file may only use the runtime's own operators."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def open_openvino(path: Path) -> tuple[Any, Any]:
    """Returns OpenVINO's core and the model in a file. The file may only use the runtime's own operators."""
    core = required_module("openvino", "openvino", "this file").Core()
    return core, core.read_model(str(path))


def open_pickle(path: Path) -> Any:
    """Loads a torch checkpoint to the CPU, if it contains only tensors, containers and numbers.

    Raises:
        CheckpointError: The file is damaged, or contains other objects.
    """
    try:
        # timm's checkpoints also contain the training options, as a Namespace.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _not_tensors(path, error) from error
    except Exception as error:  # the class of the error depends on the file's content
        raise CheckpointError(f"{path} cannot be read as weights ({described_error(error)}).") from error


class _ArraysOnly(pickle.Unpickler):
    """Unpickles the files of CIFAR. Anything but containers, numbers, texts and NumPy arrays raises an error."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _empty_array
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):
            return _latin1_bytes
        raise pickle.UnpicklingError(f"it names {module}.{name}, which reading it would call; nothing of it was run")


def _empty_array(kind: Any, *_: Any) -> np.ndarray:
    """Returns an empty array. It replaces NumPy's function that creates an array before its content is unpickled."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("it holds an array of a class of its own")
    return np.ndarray(0, np.uint8)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Returns a text's bytes. It replaces `_codecs.encode`, which pickles in an old format call to restore bytes."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("it holds bytes of another kind")
    return text.encode("latin1")


def open_arrays(path: Path) -> Any:
    """Loads a pickle of containers and NumPy arrays. Python 2's strings become bytes. Code in the pickle never runs.

    Raises:
        CheckpointError: The file is damaged, or contains other objects.
    """
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="bytes").load()
    except Exception as error:  # the class of the error depends on the file's content
        raise CheckpointError(f"{path} cannot be read as arrays ({described_error(error)}).") from error


def open_structures(path: Path) -> Any:
    """Loads the variables in a Matlab file by name. A structure becomes an array with fields.

    Raises:
        DataError: The file is damaged.
        NotSupported: scipy is not installed.
    """
    reader = required_module("scipy.io", "data", "Matlab files")
    try:
        return reader.loadmat(path, squeeze_me=True)
    except Exception as error:  # scipy and its parts raise errors of many classes
        raise DataError(f"{path} cannot be read as a Matlab file ({described_error(error)}).") from error


def open_program(path: Path) -> Any:
    """Opens a torch.export program that this process wrote or that the user trusts."""
    return torch.export.load(path)


def open_package(path: Path) -> Any:
    """Opens an AOTInductor package that this process wrote or that the user trusts."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


def _not_tensors(path: Path | str, error: BaseException) -> CheckpointError:
    """Returns the error for a pickle that torch refuses to load as tensors."""
    # torch's message mixes the reason with advice. The reason is the name of a function or class, or an opcode.
    name = re.search(r"GLOBAL ([\w.]+)", str(error))
    reason = re.search(r"Unsupported .*", str(error))
    if name:
        what = f"is a pickle that names {name[1]}, which reading it would call: it can run any code of its author"
    else:
        words = reason[0] if reason else described_error(error)
        what = f"is damaged, or a pickle that holds more than tensors ({words}) and can run any code of its author"
    return CheckpointError(
        f"{path} {what}. Nothing of it was run, and --trust does not open it. If it is yours, save model.state_dict() "
        "in place of the model; else ask for a safetensors file."
    )


def _first(folder: Path | str, patterns: tuple[str, ...]) -> Path:
    """Returns the first file in a folder that matches a pattern, or the folder itself if none matches."""
    return next((path for pattern in patterns for path in sorted(Path(folder).glob(pattern))), Path(folder))


def _names_code(path: Path) -> bool:
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # the file is missing, on the hub, or unreadable
        return False
