"""`save` and `push_to_hub`, which write and upload a model's folder with its prescription, evidence and card."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

from torch import nn

from attnrx.nouns.elastic import is_elastic
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription
from attnrx.show.reports import is_unedited, model_card
from attnrx.support.arguments import Kind, checked, optional
from attnrx.support.atomic_writes import ReplacedFiles, real_path
from attnrx.support.errors import CardWarning, CheckpointError, FactoryWarning, InvalidInput
from attnrx.support.hub import card_with, upload
from attnrx.support.storage import CARD_KIND, file_kind, write_text
from attnrx.vit.models import family_of, model_fingerprint, save_model
from attnrx.vit.models.boundary.loading import load_folder
from attnrx.vit.models.boundary.stock import loading_code, save_stock, stock_form
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.models.boundary.whole import needed_to_load
from attnrx.vit.models.checkpoint import STOCK
from attnrx.vit.outputs import output_kind_of

OWNER_NAME = Kind("OWNER/NAME, e.g. 'me/slim'", lambda text: bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)))


@checked()
@verb
def save(
    model: nn.Module,
    folder: Path | str,
    *,
    prescription: Prescription | None = None,
    evidence: Evidence | None = None,
    portable: bool = False,
) -> Path:
    """Writes a folder that `load` reads: weights, config.json, the prescription, the evidence and a model card.

    If the folder has a model already, `save` replaces it atomically, with its prescription, evidence and card. Files
    that attnrx did not write are never overwritten. If you edited the card, it is kept, and a `CardWarning` says so.

    Args:
        model: The model to save.
        folder: The folder, which is created if missing.
        prescription: The prescription (the pruning decisions) that the model was made with.
        evidence: The evidence that was measured on this model.
        portable: Writes a checkpoint that the model's own library can load without attnrx: timm
            (`timm.create_model("local-dir:FOLDER", pretrained=True)`), transformers (`from_pretrained`), torchvision or
            open_clip (weights and a line of code). If the class has no arguments for the sizes, e.g. because layers
            have different widths, the folder also has modeling.py, which creates the model. The model card shows the
            code that loads the checkpoint. You can also pass the folder to `load`.

    Returns:
        The folder.

    Raises:
        InvalidInput: A file that attnrx did not write would be overwritten, or the folder belongs to an elastic model.
        FingerprintMismatch: The evidence is for another model.
        NotSupported: The model cannot be portable, because the library's class does not support its reduced ranks or
            its token pruning.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> model = rx.load(vit)
        >>> prescription = rx.prescribe(rx.diagnose(model, torch.randn(64, 3, 32, 32)), "total_rank:0.5")
        >>> folder = rx.save(rx.realize(model, prescription), "small", prescription=prescription)
        >>> small = rx.load("small")
    """
    return save_with(model, folder, prescription, evidence, portable=portable)


def save_with(
    model: nn.Module,
    folder: Path | str,
    prescription: Prescription | None,
    evidence: Evidence | None,
    write_beside: Callable[[Path], object] = lambda new: None,
    parts: ReplacedFiles | None = None,
    portable: bool = False,
) -> Path:
    """Saves a model like `save`, together with files that `write_beside` writes to the new folder.

    `parts` names the files of the old folder that are replaced. By default, these are the files of a model.
    """
    model = stock_form(model) if portable else model
    require_no_sizes(Path(folder))
    needed = needed_to_load(model)
    if "factory" in needed:
        warnings.warn(f"to load {folder} again: {needed}.", FactoryWarning, stacklevel=5)
    if evidence is not None:
        # Evidence about another model would be a false claim about these weights.
        evidence.require(model_fingerprint(model), "the model to save")

    def write_documents(new: Path) -> None:
        for document, name in ((prescription, "prescription.json"), (evidence, "evidence.json")):
            if document is not None:
                document.save(new / name)
                require_readable(type(document), new / name)
        card = _kept_card(Path(folder)) or _card(Path(folder), model, evidence, prescription, portable)
        write_text(new / "README.md", card)
        write_beside(new)

    # All files go to a new folder, which replaces the old one as a whole. So model and documents always match.
    if portable:
        return save_stock(folder, model, write_documents, parts)
    return save_model(folder, model, write_beside=write_documents, parts=parts)


def require_readable(document: type[Prescription] | type[Evidence], path: Path) -> None:
    """Raises InvalidInput if a newly written file cannot be read again, before it replaces the old file."""
    try:
        document.load(path)
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise InvalidInput(f"{path.name} could not be read again and was not saved: {reason}") from error


def require_no_sizes(folder: Path) -> None:
    """Raises InvalidInput for an elastic model's folder, because `load` would not find another model there."""
    if is_elastic(folder):
        raise InvalidInput(f"{folder} is the folder of an elastic model; choose another folder.")


def _card(
    folder: Path, model: nn.Module, evidence: Evidence | None, prescription: Prescription | None, portable: bool
) -> str:
    costs = family_of(model).costs(model)
    facts = {
        "name": real_path(folder).name,
        "family": family_of(model).name,
        "outputs": output_kind_of(model).name,
        "parameters": costs.params,
        "macs": costs.macs,
    }
    needed = needed_to_load(model)
    if needed:
        facts["to_load_it"] = needed
    return model_card(facts, evidence, prescription, loading_code(model, "path/to/this/folder") if portable else "")


def _kept_card(folder: Path) -> str:
    """Returns a folder's model card if a user edited it after attnrx wrote it, otherwise an empty string."""
    card = folder / "README.md"
    # If the file is not a card of attnrx, the write itself will refuse to replace it.
    if file_kind(card) != CARD_KIND:
        return ""
    text = card.read_text(encoding="utf-8")
    if is_unedited(text):
        return ""
    warnings.warn(
        f"{card} was edited and is kept; what it states of the earlier model may not be true of the new one. Delete it "
        "to have one written.",
        CardWarning,
        stacklevel=6,
    )
    return text


LICENSE = Kind(
    "an identifier of the hub, e.g. 'apache-2.0'", lambda text: bool(re.fullmatch(r"[a-z0-9][a-z0-9.-]*", text))
)


@checked(repository=OWNER_NAME, base_model=optional(OWNER_NAME), license=optional(LICENSE))
def push_to_hub(
    folder: Path | str,
    repository: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
) -> str:
    """Uploads a folder that `save` wrote to the Hugging Face hub, and returns the repository's address.

    The folder is loaded first, so a broken model, or evidence about another model, is never published. If the folder
    has evidence and you did not edit the card, the card is written again, because evidence may have been added later.
    `load("hub:OWNER/NAME")` loads the uploaded model.

    Args:
        folder: The folder of the model, with its card.
        repository: OWNER/NAME on the hub, created if missing.
        license: The license of the weights, as the hub names it, e.g. apache-2.0. It is written to the card's header.
        base_model: The original's name on the hub. It is written to the card's header.
        private: Whether a new repository is private.

    Raises:
        InvalidInput: The folder has no card.
        CheckpointError: The folder has no model, or a damaged one.
        FingerprintMismatch: The evidence in the folder is for another model.
    """
    folder = Path(folder)
    # The model is loaded as others will load it, and the evidence must have the fingerprint of its weights.
    model, card = load_folder(folder), folder / "README.md"
    if not card.is_file():
        raise InvalidInput(f"{folder} has no model card (README.md): save the model with attnrx.save.")
    text = written = card.read_text(encoding="utf-8")
    if (folder / "evidence.json").exists():
        evidence = Evidence.load(folder / "evidence.json")
        evidence.require(model_fingerprint(model), str(folder))
        prescription_path = folder / "prescription.json"
        prescription = Prescription.load(prescription_path) if prescription_path.exists() else None
        if is_unedited(text):
            text = _card(folder, model, evidence, prescription, (folder / STOCK).exists())
    if license is not None or base_model is not None:
        text = card_with(text, license=license, base_model=base_model)
    # Only the card may change here, so a second upload leaves all other files unchanged.
    if text != written:
        write_text(card, text)
    return upload(folder, repository, private)
