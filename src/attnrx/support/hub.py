"""Upload and download of saved models on the Hugging Face hub."""

import importlib
import re
import socket
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.optional import required_module

PREFIX = "hub:"
# The files of a saved model; its folder may also hold checkpoints of the training.
FILES = ("config.json", "model.safetensors", "prescription*", "evidence.json", "preprocessor_config.json", "README.md")
CONNECT_SECONDS = 3.0  # a connection takes well below a second, also over a slow line
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@contextmanager
def local_copies_if_unreachable(source: Path | str = "") -> Iterator[str]:
    """Switches the Hugging Face libraries to offline mode if the hub cannot be reached, and yields the reason.

    Otherwise they retry every file for half a minute. The reason is empty if nothing is switched: `source` is a local
    folder, HF_HUB_OFFLINE or a proxy is set, or a connection to the hub could be opened.
    """
    # The environment variable is read once, when a library is imported; afterwards its module's constant decides.
    problem = "" if source and Path(source).exists() else connection_problem()
    named = (sys.modules.get(name) for name in ("huggingface_hub.constants", "datasets.config"))
    switched: list[Any] = [module for module in named if problem and module is not None]
    try:
        for module in switched:
            module.HF_HUB_OFFLINE = True
        yield problem
    finally:
        for module in switched:
            # It was False: where it is set already, there is no problem and nothing is switched.
            module.HF_HUB_OFFLINE = False


def connection_problem() -> str:
    """Returns the reason why no connection to the hub can be opened, or an empty text."""
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ModuleNotFoundError:
        return ""
    address = urllib.parse.urlsplit(constants.ENDPOINT)
    # Behind a proxy a direct connection may fail although the libraries can reach the hub.
    if constants.HF_HUB_OFFLINE or {address.scheme, "all"} & urllib.request.getproxies().keys():
        return ""
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        return f"{constants.ENDPOINT} cannot be reached ({error}), and there is no local copy"
    return ""


def upload(folder: Path, repository: str, private: bool = False) -> str:
    """Uploads the files of a saved model to a repository, created if missing, and returns its address.

    Uses the login of huggingface_hub: `hf auth login`, or the token in the environment.

    Raises:
        InvalidInput: The repository is not OWNER/NAME.
        CheckpointError: The hub cannot be reached, or rejects the upload.
        NotSupported: The package huggingface_hub is not installed.
    """
    api = _hub_for(repository).HfApi()
    try:
        with local_copies_if_unreachable():
            address = api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
            files = {"folder_path": str(folder), "allow_patterns": list(FILES)}
            api.upload_folder(repo_id=repository, **files, commit_message="A model saved by attnrx")
    except Exception as error:  # huggingface_hub raises its own errors, OSError and those of its HTTP client
        raise CheckpointError(
            f"the hub did not take {folder} as {repository} ({_first_line(error)}). Log in with `hf auth login`, with "
            "a token that may write there."
        ) from error
    return str(address)


def card_with(card: str, **metadata: str | None) -> str:
    """Returns a model card with these fields in its YAML header; None keeps that of the card.

    Raises:
        NotSupported: The package huggingface_hub is not installed.
    """
    found = required_module("huggingface_hub", "", "the hub", "huggingface_hub").ModelCard(card)
    for name, value in metadata.items():
        if value is not None:
            setattr(found.data, name, value)
    return str(found)


def download(name: str) -> Path:
    """Returns the local copy of a repository, OWNER/NAME or OWNER/NAME@REVISION, downloading missing files.

    Raises:
        InvalidInput: The name has another form.
        CheckpointError: The hub cannot be reached, or has no such repository.
        NotSupported: The package huggingface_hub is not installed.
    """
    repository, _, revision = name.partition("@")
    fetch = _hub_for(repository).snapshot_download
    with local_copies_if_unreachable() as unreachable:
        try:
            # Only the files that attnrx reads: a repository may hold anything, pickles and other weights included.
            return Path(fetch(repository, revision=revision or None, allow_patterns=list(FILES)))
        except Exception as error:  # as above
            raise CheckpointError(
                f"{PREFIX}{name} cannot be fetched ({unreachable or _first_line(error)}). Check the name, and "
                "`hf auth login` for what is private."
            ) from error


def _hub_for(repository: str) -> Any:
    """Returns the library of the hub, once the name of the repository is checked."""
    if not NAME.fullmatch(repository):
        raise InvalidInput(f"{repository!r} is no repository of the hub: give OWNER/NAME, e.g. someone/slim-vit.")
    return required_module("huggingface_hub", "", "the hub", "huggingface_hub")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
