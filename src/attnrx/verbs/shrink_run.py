"""The steps of `shrink` and `elastic` for one or several targets: plan, realize, repair, distill and verify."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.change.exporting import Format, dtype_name, parse_format, precision_for
from attnrx.change.realization import calibrated, realize_fitted
from attnrx.change.realization.descent import HELD_OUT
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.elastic import Size, fit_tokens_
from attnrx.change.realization.fit_settings import recorded_settings
from attnrx.change.realization.fitting import mean_divergences
from attnrx.change.realization.repair import Repair
from attnrx.data import Columns, ImageSet, Parts, Splits, load_data, own_images, require_labels, three_parts
from attnrx.data.model_data import input_options, splits_for
from attnrx.decide.planning import Plan, PlanSettings, Search, Target, TimingSettings, plan_each
from attnrx.decide.planning.effort import effort_of
from attnrx.decide.planning.plan_timing import final_protocol, final_speeds, rounds_of
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.prescription import Prescription, TokenPrescription
from attnrx.show.checks import Check, Costs, Fidelity, Latency, Promises
from attnrx.support.errors import AttnrxError, CheckpointError, InvalidInput, NotSupported
from attnrx.support.progress import Log, begin
from attnrx.support.shapes import ImageBatch
from attnrx.verbs.api import adapt_preprocessing, diagnose, distill, load, realize, repair, verify
from attnrx.verbs.result_folder import require_elastic_folder, require_result_folder
from attnrx.verbs.shrunk import Shrunk, with_accuracy
from attnrx.vit.costs import Conditions
from attnrx.vit.maps import REALIZED_NORMS
from attnrx.vit.models import evaluating, family_of, model_fingerprint, reduction_of
from attnrx.vit.outputs import Logits, output_kind_of

# The images that the diagnosis is made on, and those that the predictions of the plan are measured on.
DIAGNOSED, PREDICTED = 128, 96
# The most images that a result is verified on, of which an accuracy has a standard error of 0.5 points at most.
VERIFIED = 10_000
CUTS = 128  # images on which the sizes of an elastic model are compared, with fewer tokens too
SHOWN = 8  # test images in the report
# What is kept in a folder to go on after an interruption.
STATE = ".state"


# The phases of `shrink` and their usual shares of the time of a quick call for MACs (`progress.Phases`). Those before
# the repair are seconds of CPU time of a ViT-Tiny at 224 pixels on one thread of a loaded machine (2026-11).
SHARES = {
    "loading the model": 3.0,
    "reading the images": 24.0,
    "diagnosing": 17.0,
    "measuring costs": 1.0,
    "measuring sensitivities": 18.0,
    "searching plans": 32.0,
    "predicting on other images": 9.0,
    "realizing and repairing": 150.0,
    "distilling": 0.0,
    "verifying": 20.0,
}


def shares_of_phases(spend: str, effort: str) -> dict[str, float]:
    """Returns the phases of a call for a target of this cost, with their usual shares of the time."""
    shares = dict(SHARES)
    if spend == "latency":  # blocks are timed, and so are whole plans
        shares |= {"measuring costs": 60.0, "searching plans": 80.0, "verifying": 30.0}
    if effort_of(effort).distill_epochs:
        return {**shares, "distilling": 150.0}
    return {name: share for name, share in shares.items() if name != "distilling"}


@dataclass(frozen=True, eq=False)
class ShrinkRun:
    """What every target of one call shares: the original, its diagnosis, and the images by their use."""

    original: nn.Module
    diagnosis: Diagnosis
    planned: ImageSet
    parts: Parts
    class_names: tuple[str, ...]
    settings: PlanSettings
    about: Mapping[str, Any]
    by_image: bool
    seed: int

    @classmethod
    def of(  # noqa: PLR0913  (the arguments of `shrink`)
        cls,
        model: nn.Module | str | Path,
        data: Any,
        *,
        requires_labels: bool = False,
        batch: int,
        threads: int | None,
        effort: str,
        by_image: bool = False,
        to: str | None = None,
        weights: str | Path | None,
        columns: Columns | None,
        folder: Path | str | None,
        several_sizes: bool = False,
        seed: int,
        log: Log,
    ) -> "ShrinkRun":
        """Loads and diagnoses the model, and divides the images; `several_sizes` are those of an elastic model."""
        preset = effort_of(effort)
        begin("loading the model")
        original = load(model, weights=weights).eval()
        form = None if to is None else parse_format(to)
        state, storage = None, None
        if folder is not None:  # before the work
            if several_sizes:
                require_elastic_folder(Path(folder))
            else:
                require_result_folder(Path(folder), original, not by_image, form)
            state = Path(folder) / STATE
            try:
                state.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"cannot create the folder {state}: {error.strerror or error}.") from error
            storage = str(state / "trials.db")  # of the search, which resumes from it
        device = str(next(original.parameters()).device)
        timing = TimingSettings(batch, Conditions(device, _timed_precision(original, form), threads))
        search = Search(preset.trials, seed, storage, preset.variations)
        settings = PlanSettings.of(effort, timing, search=search, log=log, to=to)
        begin("reading the images")
        # Repair fits many more numbers than a plan chooses, and takes more images; those of the plan are among them.
        fitted = max(preset.repair_images, preset.images)
        splits = _splits_of(original, data, columns, fitted + PREDICTED + VERIFIED, seed)
        # What is chosen, what is predicted and what is reported are measured on disjoint images: a plan is the best of
        # many on its own images, so its divergence there is too low.
        parts = three_parts(splits, fitted, PREDICTED, VERIFIED)
        for line in (parts.summary, *parts.notes):
            log(line)
        if requires_labels:
            require_labels(parts.planned)
        planned = parts.planned.take(min(preset.images, len(parts.planned)))
        return cls(
            original,
            _diagnosis(original, planned, state, log),
            planned,
            parts,
            splits.class_names,
            settings,
            {"effort": effort, "batch": batch, "planned_on": planned.fingerprint},
            by_image,
            seed,
        )

    def shrunk(self, targets: Sequence[Target]) -> Iterator[Shrunk]:
        """Yields the smaller model of every target."""
        arguments = self.original, self.diagnosis, targets, self.planned, self.parts.predicted
        for target, plan_of_target in zip(targets, plan_each(*arguments, settings=self.settings), strict=True):
            yield self._realized(target, plan_of_target)

    def _realized(self, target: Target, found: Plan) -> Shrunk:
        """Realizes a plan, repairs it and verifies the model."""
        log, batch, preset = self.settings.log, self.settings.timing.batch, self.settings.effort
        begin("realizing and repairing")
        chosen = _by_image(found.with_predictions) if self.by_image else found.with_predictions
        # Ranks, repair, then tokens: the thresholds by image are known only afterwards, and are recorded.
        fitted, settings = self.parts.planned, Repair(preset.repair_steps, seed=self.seed)
        slim, how, fits = _repaired(self.original, chosen, fitted, settings, log)
        # Last, because only this fit takes a model that prunes or merges tokens.
        if preset.distill_epochs and len(fitted) >= 2 * HELD_OUT:
            begin("distilling")
            fits.append(Distill(preset.distill_epochs, seed=self.seed))
            fit = distill(slim, self.original, fitted, fits[-1])
            reached = f"{fit.before:.4f} to {fit.after:.4f} on images it was not fitted to"
            log(f"distilled at the rate {fit.learning_rate}: {reached}")
            slim = fit.model
        how |= {**recorded_settings(*fits), **self.fitted_classes}
        prescription = calibrated(replace(chosen, about={**chosen.about, "realized": how}), slim)
        return self._verified(slim, target, found, prescription, Promises(rounds=rounds_of(batch)))

    def unchanged(self, target: Target) -> Shrunk:
        """Returns the original, with the evidence of its speed relative to its own library."""
        timing = self.settings.timing
        speed = Latency(timing.batch, final_protocol(timing.conditions, timing.batch), library=True)
        return self._verified(self.original, target, None, None, speed)

    def _verified(
        self, model: nn.Module, target: Target, found: Plan | None, prescription: Prescription | None, last: Check
    ) -> Shrunk:
        """Verifies a model against the original; `last` is the check of what was promised."""
        begin("verifying")
        checks = with_accuracy(self.parts.verified, self.original, Fidelity(), Costs(), last)
        about = {"target": str(target), **self.about}
        context = {"prescription": prescription, "seed": self.seed, "batch_size": 32}
        evidence = verify(model, self.original, self.parts.verified, checks, about, **context)
        samples = _samples(self.parts.verified, self.class_names)
        return Shrunk(
            model, prescription, evidence, found, target, self.diagnosis, samples, self.class_names, self.parts
        )

    @cached_property
    def fitted_classes(self) -> dict[str, list[int]]:
        """The classes of the images of the repair, as the prescriptions record them; none for embeddings."""
        # By prediction and not by label, as the check does: data without labels have classes, too.
        if not isinstance(output_kind_of(self.original), Logits):
            return {}
        return {"classes": _classes(self.original, own_images(self.parts.planned))}

    def size_conditions(self) -> dict[str, Any]:
        """Returns what the evidence of a size of this call states, besides its target."""
        reference, data = model_fingerprint(self.original), self.parts.verified.fingerprint
        return {"reference": reference, "data": data, "seed": self.seed, **self.about}

    def timing_record(self) -> dict[str, Any]:
        """Returns the conditions of the latency of the sizes, as JSON-ready values."""
        timing = self.settings.timing
        return {"batch": timing.batch, "threads": timing.conditions.threads, "hardware": timing.conditions.hardware}

    def sizes(self, folder: Path, names: Sequence[str]) -> tuple[Size, ...]:
        """Returns the costs of the stored sizes, all timed in turns."""
        models = {name: load(folder / name) for name in names}
        family = family_of(self.original)
        original, reference = family.costs(self.original), family.library_model(self.original)
        speeds = final_speeds(models, self.original, reference, self.settings.timing)
        measured = []
        for name, model in models.items():
            costs, path = family_of(model).costs(model), folder / name / "evidence.json"
            findings = ()
            if path.exists():
                evidence = Evidence.load(path)
                evidence.require(model_fingerprint(model), str(folder / name))
                findings = evidence.findings
            measured.append(
                Size(
                    name,
                    costs.macs / original.macs,
                    costs.params / original.params,
                    1 / speeds[name],
                    next((one.value for one in findings if one.details.get("quantity") == "divergence"), None),
                    reduction_of(model) is not None,
                    fingerprint=model_fingerprint(model),
                )
            )
        # From the largest to the smallest, whatever the budgets they were made for.
        measured.sort(key=lambda size: size.macs, reverse=True)
        return tuple(
            replace(size, cuts=self._cuts(size, models[size.name], least)) if size.reduces_tokens else size
            for size, least in zip(measured, [*(size.macs for size in measured[1:]), 0.0], strict=True)
        )

    def _cuts(self, size: Size, model: nn.Module, least: float) -> tuple[tuple[float, float], ...]:
        """Returns the MACs and the divergence of a size with fewer tokens, down to the share `least` of the MACs."""
        whole, cut = family_of(self.original).costs(self.original).macs, [model]
        for most in ((size.macs + least) / 2, least):
            fewer = copy.deepcopy(model)
            if fit_tokens_(fewer, most * whole):
                cut.append(fewer)
        shares = [family_of(each).costs(each).macs / whole for each in cut]
        # All on the same images, so that their differences are not those of images.
        images = self.parts.verified.take(min(CUTS, len(self.parts.verified)))
        return tuple(zip(shares, mean_divergences(cut, self.original, images), strict=True))


def _timed_precision(model: nn.Module, form: Format | None) -> str:
    """Returns the precision of the timings: that of the file of a format, else the model's own if it is timed."""
    # Of models in float64 neither is timed at its own.
    return precision_for(model, form or parse_format("program")) or dtype_name(next(model.parameters()).dtype)


def _repaired(
    model: nn.Module, prescription: Prescription, images: ImageSet, settings: Repair, log: Log
) -> tuple[nn.Module, dict[str, Any], list[Any]]:
    """Realizes a plan and repairs attention and MLPs where possible.

    Returns also how, as `attnrx realize` records it, and the settings of the fits.
    """
    # `attnrx realize` and the matched controls read these options, and repeat them.
    how = {"by": "compress", "norms": REALIZED_NORMS[0], "refine": 0, "calibration_images": len(images)}
    # Without its tokens the rules are those of ranks and units. Without any there are only tokens, and no map to fit.
    if replace(prescription, tokens=None).rules:
        try:
            fits = [lambda realized: repair(realized, model, images, settings).model]
            return realize_fitted(model, prescription, fits, calibration=images), how, [settings]
        except (NotSupported, InvalidInput) as error:  # e.g. other MLPs, or fewer images than repair needs
            log(f"not repaired: {error}")
    return realize(model, prescription, calibration=images), how, []


def _classes(model: nn.Module, images: ImageSet) -> list[int]:
    """Returns the classes that the model puts the images into, for the check `shift`."""
    weight, kind, classes = next(model.parameters()), output_kind_of(model), set()
    with evaluating((model,)):
        for batch in images.batches(32, device=weight.device):
            classes |= set(kind.decisions(kind.prepared(model(batch.images.to(weight.dtype)))).tolist())
    return sorted(classes)


def _by_image(prescription: Prescription) -> Prescription:
    """Returns the prescription with the numbers of tokens as means over images."""
    if prescription.tokens is None:
        raise NotSupported("by_image: the plan prunes and merges no tokens; omit by_image, or lower the target.")
    return replace(prescription, tokens=TokenPrescription.of(replace(prescription.tokens.policy, by_image=True)))


def _samples(images: ImageSet, class_names: Sequence[str]) -> tuple[ImageBatch, tuple[str, ...]]:
    """Returns the first images with the names of their classes, which are empty without labels."""
    batch = next(iter(images.take(min(SHOWN, len(images))).batches(SHOWN)))
    # -1: without a label
    if batch.labels.ndim > 1 or int(batch.labels.min()) < 0:
        return batch.images, ()
    labels: list[int] = batch.labels.tolist()
    names = dict(enumerate(class_names))
    return batch.images, tuple(names.get(label, f"class {label}") for label in labels)


def _splits_of(model: nn.Module, data: Any, columns: Columns | None, limit: int, seed: int) -> Splits:
    if isinstance(data, str | Path):
        data = adapt_preprocessing(load_data(str(data), columns=columns, **input_options(model)), model)
    return splits_for(model, data, limit=limit, seed=seed)


def _diagnosis(model: nn.Module, images: ImageSet, state: Path | None, log: Log) -> Diagnosis:
    path, diagnosed = None if state is None else state / "diagnosis.json", images.take(min(DIAGNOSED, len(images)))
    if path is not None and path.exists():
        # A damaged file, or one of another version, is made again.
        with suppress(AttnrxError, KeyError, TypeError):
            stored = Diagnosis.load(path)
            # Of the same images too: an earlier call into this folder may have been for other data.
            sources = stored.fingerprint, stored.about["data"]["fingerprint"]
            if sources == (model_fingerprint(model), diagnosed.fingerprint):
                log(f"diagnosis of an earlier call: {path}")
                return stored
    begin("diagnosing")
    diagnosis = diagnose(model, diagnosed, moments=True, batch_size=32)
    if path is not None:
        diagnosis.save(path)
    return diagnosis
