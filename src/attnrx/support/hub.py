"""Uploads saved models to the Hugging Face hub, and downloads them."""

import re
from pathlib import Path
from typing import Any

from attnrx.support.arguments import described_error
from attnrx.support.errors import CheckpointError, InvalidInput
from attnrx.support.optional import required_module

PREFIX = "hub:"
# The files that are uploaded and downloaded. A model's folder may contain other files, e.g. training checkpoints.
FILES = (
    *("config.json", "model.safetensors", "prescription*", "evidence.json", "preprocessor_config.json", "README.md"),
    *("attnrx.json", "open_clip_config.json", "modeling.py"),  # of portable models
)
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def upload(folder: Path, repository: str, private: bool = False) -> str:
    """Uploads a saved model to a repository, which is created if missing, and returns the repository's address.

    The upload uses your login (`hf auth login`), or the token in the environment.

    Raises:
        InvalidInput: The name of the repository does not have the form OWNER/NAME.
        CheckpointError: The hub cannot be reached, or rejects the upload.
        NotSupported: The package huggingface_hub is not installed.
    """
    api = _hub_for(repository).HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True, repo_type="model")
        files = {"folder_path": str(folder), "allow_patterns": list(FILES)}
        api.upload_folder(repo_id=repository, **files, commit_message="A model saved by attnrx")
    except Exception as error:  # huggingface_hub raises its own errors, OSError, and errors of its HTTP client
        raise CheckpointError(
            f"the hub did not take {folder} as {repository} ({type(error).__name__}: "
            f"{described_error(error)}). Log in with `hf auth login`, with a token that may write there."
        ) from error
    return str(address)


def card_with(card: str, **metadata: str | None) -> str:
    """Returns a model card with the fields `metadata` set in its YAML header. Fields that are None are not changed.

    Raises:
        NotSupported: The package huggingface_hub is not installed.
    """
    found = required_module("huggingface_hub", "", "the hub", "huggingface_hub").ModelCard(card)
    for name, value in metadata.items():
        if value is not None:
            setattr(found.data, name, value)
    return str(found)


def download(name: str) -> Path:
    """Returns the local copy of a repository (OWNER/NAME or OWNER/NAME@REVISION), and downloads missing files.

    Raises:
        InvalidInput: The name has neither the form OWNER/NAME nor OWNER/NAME@REVISION.
        CheckpointError: The hub cannot be reached, or has no such repository.
        NotSupported: The package huggingface_hub is not installed.
    """
    repository, _, revision = name.partition("@")
    fetch = _hub_for(repository).snapshot_download
    try:
        # Only files that attnrx needs are downloaded, because a repository may contain pickles and other weights.
        return Path(fetch(repository, revision=revision or None, allow_patterns=list(FILES)))
    except Exception as error:  # errors of many classes, as in `upload`
        raise CheckpointError(
            f"{PREFIX}{name} cannot be fetched ({type(error).__name__}: {described_error(error)}). "
            "Check the name, and `hf auth login` for what is private."
        ) from error


def _hub_for(repository: str) -> Any:
    """Checks the name of the repository, and returns the hub's library."""
    if not NAME.fullmatch(repository):
        raise InvalidInput(f"{repository!r} is no repository of the hub: give OWNER/NAME, e.g. someone/slim-vit.")
    return required_module("huggingface_hub", "", "the hub", "huggingface_hub")
