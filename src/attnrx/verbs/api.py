"""The public functions of the workflow: load -> diagnose -> prescribe -> realize -> verify -> save."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from attnrx.change.exporting import DYNAMIC, Exported, export, is_exported, load_exported
from attnrx.change.realization import realize
from attnrx.change.realization.conversion import to_svda
from attnrx.change.realization.distillation import distill
from attnrx.change.realization.elastic import Elastic, is_elastic
from attnrx.change.realization.refinement import refine
from attnrx.change.realization.repair import repair
from attnrx.data import ImageData, ImageSet, require_labels
from attnrx.data.model_data import adapt_preprocessing, images_for
from attnrx.decide.diagnosing import diagnose, diagnosis_or_spectra, measure_divergence
from attnrx.decide.planning import plan
from attnrx.decide.planning.budget import Budget, prescribe_within
from attnrx.decide.planning.target import DROP, Target, target_of
from attnrx.decide.rules import Rule, RulesLike, control_prescriptions, parse_rules, require_remainder
from attnrx.decide.rules import prescribe_maps as prescribe_with
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence, Finding, judged
from attnrx.nouns.prescription import Prescription
from attnrx.show.checks import Check, Comparison, possible_checks, require_possible, standard_checks
from attnrx.show.checks.comparison import chance_notes
from attnrx.show.checks.statistics import Estimate
from attnrx.show.reports import completed_card, is_unedited, model_card
from attnrx.support.arguments import (
    ANY,
    BATCH,
    DEVICE,
    FASTER,
    FLAG,
    FUNCTION,
    MODEL,
    PATH,
    SEED,
    TEXT,
    Kind,
    checked,
    described,
    either,
    instance,
    number,
    one_of,
    optional,
)
from attnrx.support.atomic_writes import Parts
from attnrx.support.errors import CardWarning, InvalidInput, NonFiniteOutputs, NotSupported
from attnrx.support.hub import upload
from attnrx.support.optional import installed_versions
from attnrx.support.storage import CARD_KIND, file_kind, write_text
from attnrx.verbs.result_folder import require_no_sizes
from attnrx.vit.models import (
    FAMILIES,
    Reader,
    described_tokens,
    family_of,
    load_model,
    model_fingerprint,
    require_ordinary_weights,
    save_model,
)
from attnrx.vit.models.checkpoint import load_weights
from attnrx.vit.models.verbs import verb
from attnrx.vit.outputs import STATEMENTS, Logits, output_kind_of, state_outputs_

__all__ = [
    "Budget",
    "adapt_preprocessing",
    "control_prescriptions",
    "diagnose",
    "distill",
    "export",
    "load",
    "measure_divergence",
    "plan",
    "prescribe",
    "prescribe_within",
    "push_to_hub",
    "realize",
    "refine",
    "repair",
    "save",
    "to_svda",
    "verify",
]


RULES = instance(
    "rules: a text such as 'qk=total_rank:0.5', a Rule, or a mapping from maps to them", str, Rule, Mapping
)
# A model or its name; exactly one of the budgets, whose ranges depend on each other, is validated by `target_of`.
BUDGET = optional(number(0.0, expected="a positive number"))
PRESCRIPTION = optional(instance("a Prescription, e.g. Prescription.load(FILE)", Prescription))
EVIDENCE = optional(instance("an Evidence, e.g. Evidence.load(FILE)", Evidence))
DIAGNOSIS = instance("a Diagnosis, e.g. Diagnosis.load(FILE)", Diagnosis)
SOURCE = replace(
    either("a folder, a name such as svda:cifar10, or a model", PATH, MODEL), explain=lambda value: _no_model(value)
)
OWNER_NAME = Kind("OWNER/NAME, e.g. 'me/slim'", lambda text: bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text)))


@checked(
    source=SOURCE,
    seed=SEED,
    weights=optional(PATH),
    pretrained=optional(FLAG),
    trust=FLAG,
    macs=BUDGET,
    params=BUDGET,
    faster=optional(FASTER),
    reader=optional(instance("an attnrx.Reader with the paths of the model's parts", Reader)),
    factory=optional(FUNCTION),
    outputs=optional(one_of(*STATEMENTS)),
)
@verb
def load(  # noqa: PLR0913  (a keyword for every kind of budget)
    source: str | Path | nn.Module,
    seed: int = 0,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    trust: bool = False,
    *,
    macs: float | None = None,
    params: float | None = None,
    faster: float | None = None,
    reader: Reader | None = None,
    factory: Callable[..., nn.Module] | None = None,
    outputs: str | None = None,
) -> nn.Module:
    """Loads or builds a model.

    `outputs` states what its outputs are where the model does not: "classes" (logits of classes, or of two classes by
    one logit), "multilabel" (one logit per label, each with a sigmoid), "regression" (numbers) or "embedding". All
    comparisons depend on it; copies of the model and saved folders keep it. The configuration of a transformers model
    states it by `problem_type`; without any statement, outputs of a classifier are classes.

    `source` is one of:

    - a folder saved by attnrx, or `hub:OWNER/NAME` for such a folder on the Hugging Face hub; `weights` are those of
      the model after further training, as a safetensors file or a folder that the Trainer of transformers wrote;
    - `timm:NAME`, with the weights of the file `weights` or those that timm downloads;
    - `hf:ID` or a transformers folder;
    - `torchvision:NAME`, with weights as `timm:NAME`, or `open_clip:NAME` (an image tower, fresh weights);
    - a configuration name such as `svda:cifar10` (fresh weights);
    - `lvvit:SIZE` (fresh weights, or those of the published file `weights`);
    - a module; a model of another library is converted, and so is a module of your own whose parts a `reader` names.
      `factory(**reader.arguments)` creates that module again, by default its class; a saved folder of such a model
      needs the `factory` only where the class has not been imported;
    - the folder of an elastic model, with one of `macs=0.6`, `params=0.7` (shares of the original's) or `faster=1.4`;
      in one text, `FOLDER@macs=0.6`;
    - a file written by `export`: the returned module runs it with its runtime. A .pt2 file (formats program and
      aotinductor) can run code of its author and needs `trust=True`.
    """
    # A budget selects a size of an elastic model; for any other source it is an error, not a request to compress.
    has_budget = any(budget is not None for budget in (macs, params, faster))
    # Files of a runtime first: they are no folders, and have no configuration.
    if isinstance(source, str | Path) and is_exported(source):
        model = load_exported(source, trust)
    elif (found := _elastic_of(source, target_of(faster, macs, params) if has_budget else None)) is not None:
        elastic, target = found
        model = elastic.load(target.of, target.most, factory=factory)
    else:
        model = load_model(source, seed, weights, pretrained, reader=reader, factory=factory)
    if outputs is not None:
        state_outputs_(model, outputs)
    return model


def _no_model(value: object) -> str:
    """Returns the end of a message about a value that is no model, though it belongs to one."""
    if isinstance(value, Mapping):
        return (
            ". A state dict has weights, but no architecture: load them into their model, model.load_state_dict(...), "
            "and give that; or give the name and the file, e.g. attnrx.load('timm:vit_tiny_patch16_224', "
            "weights='FILE')."
        )
    return ". This is a class: give an instance of it." if isinstance(value, type) else ""


def _elastic_of(source: str | Path | nn.Module, target: Target | None) -> tuple[Elastic, Target] | None:
    """Returns the elastic model that a source names, and the budget; None for a source of another kind."""
    if isinstance(source, str | Path):
        # Only if the part before the last @ is an elastic model: a folder may have an @ in its name.
        folder, _, text = str(source).rpartition("@")
        if folder and target is None and is_elastic(folder):
            source, target = folder, Target.parse(text)
        if is_elastic(source):
            elastic = Elastic.read(source)
            if target is None or target.of == DROP:
                raise InvalidInput(f"{elastic}\nGive macs=0.6, params=0.7 or faster=1.4, or the folder of one size.")
            return elastic, target
    if target is not None:
        raise InvalidInput(f"load({described(source)}) with the budget {target}: it is not an elastic model.")
    return None


@checked(
    diagnosis=instance("a Diagnosis, e.g. attnrx.diagnose(model, images), or a model", Diagnosis, nn.Module),
    rules=RULES,
)
@verb
def prescribe(diagnosis: Diagnosis | nn.Module, rules: RulesLike) -> Prescription:
    """Applies pruning rules to a diagnosis and returns the prescription.

    `rules` names the rule of every map, as one text or a mapping: "qk=total_rank:0.5 vo=total_rank:0.75
    fc1=uniform_rank:0.5 tokens=ward:0.7@4,7,10". A rule without a map name applies to qk. Every rule may state its
    metric, e.g. `uniform_rank:0.5,metric=weights` for the plain SVD (see `rules.METRICS` for qk,
    `rules.OUTPUT_METRICS` for vo, fc1 and fc2). The rule for tokens is a token policy, or an earlier token prescription
    with trained predictors (`prescribed_tokens`). A prescription of tokens alone accepts the model instead of a
    diagnosis.

    Raises:
        NoOpPrescription: The rules keep everything.
        InvalidRule: A rule is outside its range, does not apply to its map, or removes a map in all layers.
    """
    read, tokens = parse_rules(rules)
    prescription = prescribe_with(diagnosis_or_spectra(diagnosis, *read.values()), {**read, "tokens": tokens})
    return require_remainder(prescription)


@checked(
    candidate=MODEL,
    reference=MODEL,
    data=ANY,
    checks=optional(instance("checks, e.g. [attnrx.checks.Accuracy(most_drop=0.5)]", Iterable, Check, type)),
    about=optional(instance("a dictionary", Mapping)),
    masked=optional(MODEL),
    prescription=PRESCRIPTION,
    diagnosis=optional(DIAGNOSIS),
    seed=SEED,
    batch_size=BATCH,
    device=DEVICE,
    together=FLAG,
)
@verb
def verify(
    candidate: nn.Module,
    reference: nn.Module,
    data: ImageData,
    checks: Sequence[Check] | None = None,
    about: Mapping[str, Any] | None = None,
    **context: Any,
) -> Evidence:
    """Compares the candidate with the reference by the standard checks, or by `checks`, and returns the evidence.

    `data` are images with labels, in any form that `data.image_set` reads. Without labels the standard checks that need
    them are skipped and listed in the notes of the evidence.

    `context` holds fields of `Comparison` that some checks need: `masked` (the reference with the pruned directions set
    to zero), `prescription`, `diagnosis`, `seed`, `batch_size`. `about` is added to the record.
    """
    # Before any measurement, which may take long.
    for model in (candidate, reference):
        require_ordinary_weights(model)
    context.setdefault("device", next(reference.parameters()).device)
    # In place of the TypeError of the constructor, which names neither `verify` nor the fields.
    unknown = sorted(context.keys() - {field.name for field in fields(Comparison) if not field.name.startswith("_")})
    if unknown:
        raise InvalidInput(
            f"verify has no argument {', '.join(unknown)}; the context arguments are the fields of Comparison: "
            f"{Comparison.__doc__}"
        )
    images = images_for(reference, data, seed=context["seed"] if isinstance(context.get("seed"), int) else 0)
    comparison = Comparison(candidate, reference, images, **context)
    candidate_fingerprint, reference_fingerprint = model_fingerprint(candidate), model_fingerprint(reference)
    # Its rules are recorded in the evidence.
    if comparison.prescription is not None:
        comparison.prescription.require(reference_fingerprint)
    chosen = tuple(standard_checks()) if checks is None else _required_checks(checks)
    notes = list(images.notes)
    if checks is None:
        # The standard checks are those that apply; a check that was requested raises where it cannot run.
        chosen, skipped = possible_checks(chosen, comparison)
        notes += skipped
    require_possible(chosen, comparison)
    if any(check.needs_labels for check in chosen):
        require_labels(images)
    with ExitStack() as files:
        if isinstance(candidate, Exported) and any(check.measures_speed for check in chosen):
            comparison = replace(comparison, **_in_runtime(candidate, reference, images, files, notes))
        # One comparison for all checks: the outputs of the models are computed once.
        findings = _findings(chosen, comparison, notes)
    facts = {
        "candidate": candidate_fingerprint,
        "reference": reference_fingerprint,
        "nothing_removed": reference_fingerprint in (candidate_fingerprint, _exported_fingerprint(candidate)),
        "data": images.fingerprint,
        "images": len(images),
        "outputs": comparison.kind.name,
        "seed": comparison.seed,
        "batch_size": comparison.batch_size,
        "checks": [check.describe() for check in chosen],
        "rules": None if comparison.prescription is None else dict(comparison.prescription.rules),
        "tokens": described_tokens(candidate),
        "versions": installed_versions("attnrx", "torch"),
        "threads": torch.get_num_threads(),
        "notes": [*notes, *([comparison.kind.note] if comparison.kind.note else [])],
        "warnings": _chance_notes(findings, comparison),
        **dict(about or {}),  # last: it may replace any of these
    }
    return Evidence(findings, facts)


def _findings(checks: Sequence[Check], comparison: Comparison, notes: list[str]) -> tuple[Finding, ...]:
    """Runs the checks; where the candidate returns NaN or infinity, that is a finding, and a note lists the checks that
    cannot run.
    """
    findings: list[Finding] = []
    failed, problem = [], None
    for check in checks:
        try:
            findings += check(comparison)
        except NonFiniteOutputs as error:
            failed.append(check.name)
            problem = error
    if problem is None:
        return tuple(findings)
    notes.append(f"not checked: {', '.join(failed)}: {problem}")
    claim = "the candidate returns NaN or infinity for no image"
    fields = judged(float(problem.count), 0.0, n=problem.images, at_least=False)
    details = {"quantity": "non-finite outputs"}
    return (Finding("outputs", claim, float(problem.count), "images", **fields, details=details), *findings)


def _exported_fingerprint(candidate: nn.Module) -> str | None:
    """Returns the fingerprint of the model that a file was written from; None for another candidate."""
    return candidate.facts.get("model", {}).get("fingerprint") if isinstance(candidate, Exported) else None


def _in_runtime(
    candidate: Exported, reference: nn.Module, images: ImageSet, files: ExitStack, notes: list[str]
) -> dict[str, Any]:
    """Returns `unchanged` and `runtime` of a comparison with a file; adds a note where the reference has no such file.

    The file of the reference exists until `files` is closed.
    """
    form, runtime = candidate.form, candidate.form.runtime_at(candidate.images.precision)
    folder, batch = Path(files.enter_context(TemporaryDirectory())), candidate.images.batch
    calibration = images.take(min(form.wanted, len(images)))
    try:
        unchanged = export(
            reference,
            folder / f"unchanged{form.suffix}",
            to=form,
            batch=DYNAMIC if batch is None else batch,
            precision=candidate.images.precision,
            calibration=calibration,
        )
    except NotSupported as error:
        notes.append(f"the unchanged model has no file as {form.name}, so the speed is not divided: {error}")
        return {"runtime": runtime}
    return {"runtime": runtime, "unchanged": unchanged}


def _required_checks(checks: Any) -> tuple[Check, ...]:
    if isinstance(checks, str) or not isinstance(checks, Iterable):
        checks = (checks,)
    checks = tuple(checks)
    wrong = [check for check in checks if not isinstance(check, Check)]
    if wrong:
        raise InvalidInput(
            f"verify was given the check {wrong[0]!r:.80}: give instances with their knobs, e.g. "
            "checks=[attnrx.checks.Accuracy(most_drop=0.5)]."
        )
    if not checks:
        raise InvalidInput("verify was given no check; omit `checks` to run the standard ones.")
    return checks


def _chance_notes(findings: Sequence[Finding], comparison: Comparison) -> list[str]:
    # Labels of another order of classes give no error, only an accuracy near chance. Those of nearest neighbours are
    # labels of the data.
    if not isinstance(comparison.kind, Logits):
        return []
    expected = {"quantity": "accuracy", "model": "reference"}
    accuracies = [
        finding for finding in findings if finding.check == "accuracy" and expected.items() <= finding.details.items()
    ]
    if not accuracies or accuracies[0].low is None or accuracies[0].high is None:
        return []
    return chance_notes(
        Estimate(accuracies[0].value, accuracies[0].low, accuracies[0].high), comparison.predictions.labels
    )


@checked(model=MODEL, folder=PATH, prescription=PRESCRIPTION, evidence=EVIDENCE)
@verb
def save(
    model: nn.Module,
    folder: Path | str,
    *,
    prescription: Prescription | None = None,
    evidence: Evidence | None = None,
) -> Path:
    """Writes a folder that `load` reads: weights, config.json, the prescription, the evidence and a model card.

    An existing model in the folder is replaced atomically, with its prescription, evidence and card. Files that attnrx
    did not write are kept and never overwritten; so is a card that was edited, with a `CardWarning`.
    """
    return save_with(model, folder, prescription, evidence)


def save_with(
    model: nn.Module,
    folder: Path | str,
    prescription: Prescription | None,
    evidence: Evidence | None,
    write_beside: Callable[[Path], object] = lambda new: None,
    parts: Parts | None = None,
) -> Path:
    """Saves a model as `save` does, with the files that `write_beside` writes to the new folder.

    `parts` are the files of the folder that are replaced, by default those of a model.
    """
    require_no_sizes(Path(folder))
    if evidence is not None:
        # Evidence of another model beside the weights would be a false claim.
        evidence.require(model_fingerprint(model), "the model to save")

    def write_documents(new: Path) -> None:
        if prescription is not None:
            prescription.save(new / "prescription.json")
        if evidence is not None:
            evidence.save(new / "evidence.json")
        write_text(new / "README.md", _kept_card(Path(folder)) or _card(model, evidence, prescription))
        write_beside(new)

    # Into the new folder, which replaces the old one as a whole: model and documents always belong together.
    return save_model(folder, model, write_beside=write_documents, parts=parts)


def _card(model: nn.Module, evidence: Evidence | None, prescription: Prescription | None) -> str:
    costs = family_of(model).costs(model)
    facts = {
        "family": family_of(model).name,
        "outputs": output_kind_of(model).name,
        "parameters": costs.params,
        "macs": costs.macs,
    }
    return model_card(facts, evidence, prescription)


def _kept_card(folder: Path) -> str:
    """Returns the card of a folder if it was edited after attnrx wrote it, else an empty text."""
    card = folder / "README.md"
    # A file that is no card is refused by the write itself, as any other that attnrx did not write.
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


@checked(folder=PATH, repository=OWNER_NAME, license=optional(TEXT), base_model=optional(OWNER_NAME), private=FLAG)
def push_to_hub(
    folder: Path | str,
    repository: str,
    *,
    license: str | None = None,
    base_model: str | None = None,
    private: bool = False,
) -> str:
    """Uploads a folder written by `save` to the Hugging Face hub as OWNER/NAME, and returns its address.

    The folder is loaded first, so that no broken model and no evidence of another model is published. A card that was
    not edited is written again from the files of the folder, e.g. with evidence.json that was added later. `license`
    (of the weights, the hub's identifier) and `base_model` (OWNER/NAME of the original) are written to the header of
    the card.
    `load("hub:OWNER/NAME")` loads the model again.
    """
    folder = Path(folder)
    # Loaded as others will load it; the fingerprint of its weights must be that of the evidence.
    model, card = load_weights(folder, FAMILIES), folder / "README.md"
    if not card.is_file():
        raise InvalidInput(f"{folder} has no model card (README.md): save the model with attnrx.save.")
    text = written = card.read_text(encoding="utf-8")
    if (folder / "evidence.json").exists():
        evidence = Evidence.load(folder / "evidence.json")
        evidence.require(model_fingerprint(model), str(folder))
        prescription_path = folder / "prescription.json"
        prescription = Prescription.load(prescription_path) if prescription_path.exists() else None
        if is_unedited(text):
            text = _card(model, evidence, prescription)
    if license is not None or base_model is not None:
        text = completed_card(text, license, base_model)
    # The folder is changed only where the card is, so a second upload has the same files.
    if text != written:
        write_text(card, text)
    return upload(folder, repository, private)
