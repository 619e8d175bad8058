"""Opens what others made: models of Hugging Face and timm, tables, pickles, programs of torch, files of runtimes.

The functions of these libraries that read a file or a repository can run code by its author. They are only called here
(`tests/test_structure.py`), so that one place decides. Such code only runs with `trust`, code in pickles never runs,
and nothing is asked on a terminal.
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

# The files of a model that can name code of its repository, in the order in which they are read.
SETTINGS = ("config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
TENSORS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # read by torch.load
PICKLES = ("pytorch_model.bin", "adapter_model.bin", "*.bin", "*.pt", "*.pth")


def untrusted(what: str, more: str = "") -> InvalidInput:
    """Returns the error for something that can run code by its author, and that is only opened with trust."""
    return InvalidInput(
        f"{what} can run any code of its author, with your rights, once it is opened. If you trust its origin, pass "
        f"trust=True (--trust on the command line){more}."
    )


def open_pretrained(kind: Any, source: Path | str, trust: bool, **options: Any) -> Any:
    """Calls `from_pretrained` of a transformers class.

    Args:
        kind: The class, e.g. AutoConfig.
        source: A folder, or an id on the hub.
        trust: Whether code of the repository may run.
        **options: Further arguments of the class.

    Raises:
        InvalidInput: It needs code of the repository, and `trust` is False.
        CheckpointError: The weights are a pickle that holds more than tensors.
    """
    try:
        # Stated in every call, because without it transformers asks on the terminal.
        opened = kind.from_pretrained(source, trust_remote_code=trust, **options)
    except pickle.UnpicklingError as error:
        raise _not_tensors(_first(source, PICKLES), error) from error
    except ValueError as error:
        if trust or "trust_remote_code" not in str(error):
            raise
        named = [name for name in SETTINGS if _names_code(Path(source) / name)]
        where = f"{Path(source) / named[0]} names code in auto_map, which" if named else f"the code of {source}"
        raise untrusted(where) from error
    # A configuration may also name kernels of the hub, native code that its models download.
    parts = [opened, *(getattr(opened, name, None) for name in getattr(opened, "sub_configs", ()))]
    kernels = [name for part in parts if "/" in (name := str(getattr(part, "_attn_implementation", "")))]
    if kernels and not trust:
        raise untrusted(f"the attention {kernels[0]} in config.json of {source}")
    return opened


def model_from(kind: Any, config: Any, trust: bool = False) -> Any:
    """Returns a transformers model with fresh weights: of a class, or of an automatic class by its configuration."""
    return kind.from_config(config, trust_remote_code=trust) if hasattr(kind, "from_config") else kind(config)


def open_timm(name: str, pretrained: bool, **arguments: Any) -> Any:
    """Creates a timm model. It only reads tensors as weights, even from a file that is a pickle.

    Raises:
        CheckpointError: The weights are a pickle that holds more than tensors.
    """
    from timm import create_model

    try:
        with environment(TENSORS_ONLY, "1"):  # earlier versions of timm read pickles of folders whole
            return create_model(name, pretrained=pretrained, **arguments)
    except pickle.UnpicklingError as error:
        raise _not_tensors(name, error) from error


def open_hub_data(name: str, folder: str | None, revision: str | None) -> Any:
    """Returns the splits of a dataset on the hub; scripts of a repository are never run."""
    import datasets

    return datasets.load_dataset(name, data_dir=folder, revision=revision, trust_remote_code=False)


def table_features(path: Path) -> Any:
    """Returns the columns of a parquet file with their types, `datasets.Features`."""
    import datasets
    import pyarrow.parquet

    return datasets.Features.from_arrow_schema(pyarrow.parquet.read_schema(path))


def table_rows(path: Path) -> int:
    """Returns how many rows a parquet file has."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path).num_rows


def open_tables(paths: Sequence[Path], copy: Path) -> Any:
    """Returns parquet files as one `datasets.Dataset`, which is mapped from a copy in this folder."""
    import datasets

    # Names of files are patterns there.
    return datasets.Dataset.from_parquet([glob.escape(str(path)) for path in paths], cache_dir=str(copy))


def open_graph(path: Path) -> Any:
    """Returns the graph of an ONNX file, with weights in a file beside it."""
    import onnx

    return onnx.load(path)


def open_session(path: Path, options: Any) -> Any:
    """Starts ONNX Runtime on a file, on the CPU, only with the runtime's own operators."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def open_openvino(path: Path) -> tuple[Any, Any]:
    """Returns the core of OpenVINO and the model in a file, only with the runtime's own operators."""
    import openvino

    core = openvino.Core()
    return core, core.read_model(str(path))


def open_pickle(path: Path) -> Any:
    """Reads a torch checkpoint on the CPU: only tensors, containers and numbers.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
    try:
        # timm's checkpoints hold the options of the training, too.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _not_tensors(path, error) from error
    except Exception as error:  # the error depends on what the file holds
        raise CheckpointError(f"{path} cannot be read as weights ({described_error(error)}).") from error


class _ArraysOnly(pickle.Unpickler):
    """Reads containers, numbers, texts and NumPy arrays, and calls nothing else: CIFAR's files are pickles."""

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
    """Replaces NumPy's function with which pickles begin every array; the array's content follows."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("it holds an array of a class of its own")
    return np.ndarray(0, np.uint8)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """Replaces the function by which Python 3 writes bytes into pickles for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError("it holds bytes of another kind")
    return text.encode("latin1")


def open_arrays(path: Path) -> Any:
    """Reads a pickle of containers and NumPy arrays, with Python 2's texts as bytes; none of its code runs.

    Raises:
        CheckpointError: The file is damaged, or holds something else.
    """
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="bytes").load()
    except Exception as error:  # the error depends on what the file holds
        raise CheckpointError(f"{path} cannot be read as arrays ({described_error(error)}).") from error


def open_structures(path: Path) -> Any:
    """Reads the variables of a Matlab file by name; a structure is an array with fields.

    Raises:
        DataError: The file is damaged.
        NotSupported: scipy is not installed.
    """
    reader = required_module("scipy.io", "data", "Matlab files")
    try:
        return reader.loadmat(path, squeeze_me=True)
    except Exception as error:  # scipy's, or of its parts
        raise DataError(f"{path} cannot be read as a Matlab file ({described_error(error)}).") from error


def open_program(path: Path) -> Any:
    """Opens a program of torch.export that this process wrote, or that the user trusts."""
    return torch.export.load(path)


def open_package(path: Path) -> Any:
    """Opens a package of AOTInductor that this process wrote, or that the user trusts."""
    from torch._inductor import aoti_load_package

    return aoti_load_package(str(path))


def _not_tensors(path: Path | str, error: BaseException) -> CheckpointError:
    """Returns the error for a pickle that torch's reader of tensors refuses."""
    # torch puts advice around the reason: the name of a function or class, or a code that no tensor needs.
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
    """Returns the first file in a folder that matches a pattern, or the folder."""
    return next((path for pattern in patterns for path in sorted(Path(folder).glob(pattern))), Path(folder))


def _names_code(path: Path) -> bool:
    try:
        return "auto_map" in json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):  # not there, on the hub, or not readable: it is not the file to name
        return False
