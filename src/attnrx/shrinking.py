"""The whole workflow in one call: plans, realizes and verifies a smaller model for a target."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.api import adapt_preprocessing, diagnose, distill, export, load, realize, repair, save, verify
from attnrx.checks import Accuracy, Check, Costs, Fidelity, Latency, Promises
from attnrx.costs import Conditions
from attnrx.data import Columns, ImageData, ImageSet, Splits, load_data, own_images, require_labels
from attnrx.diagnosis import Diagnosis
from attnrx.errors import AttnrxError, CheckpointError, DataError, InvalidInput, NotSupported, TargetMet
from attnrx.evidence import Evidence
from attnrx.exporting import (
    Format,
    dtype_name,
    fitting_names,
    parse_format,
    precision_for,
)
from attnrx.model_data import splits_for
from attnrx.model_outputs import Logits, output_kind_of
from attnrx.models import evaluating, family_of, model_fingerprint, reduction_of
from attnrx.planning import Plan, PlanSettings, Search, Target, TimingSettings, plan_each
from attnrx.planning.effort import effort_of
from attnrx.planning.plan_timing import final_protocol, final_speeds, rounds_of
from attnrx.planning.target import DROP, target_of
from attnrx.prescription import Prescription, TokenPrescription
from attnrx.progress import Log, no_log
from attnrx.realization import calibrated, realize_fitted
from attnrx.realization.descent import HELD_OUT
from attnrx.realization.distillation import Distill
from attnrx.realization.elastic import ORIGINAL, Elastic, Size
from attnrx.realization.repair import Repair
from attnrx.reports import PlanFront, ReportContent, sample_tokens, summary_of, write_report
from attnrx.result_folder import (
    exported_paths,
    remove_outdated,
    require_elastic_folder,
    require_own_export,
    require_result_folder,
)
from attnrx.runtime.subprocess_runner import shared_subprocess
from attnrx.shapes import ImageBatch

# The images that the diagnosis is made on, and those that the predictions of the plan are measured on.
DIAGNOSED, PREDICTED = 128, 96
SHOWN = 8  # test images in the report
# What is kept in a folder to go on after an interruption.
STATE = ".state"
SIZE = re.compile(r"(faster|macs|params)-[\w.+-]+")  # the names of the folders of sizes


@dataclass(frozen=True, eq=False)
class Shrunk:
    """A smaller model with its prescription, its plan, and the evidence of what it cost.

    It unpacks as `model, prescription, evidence`. Without `prescription` and `plan` it is the unchanged model, which
    meets the target by its kernels alone. For the report there are the `diagnosis` of the original, and in `samples` a
    few normalized test images with their classes; for the exported file the `class_names` of the data.
    """

    model: nn.Module
    prescription: Prescription | None
    evidence: Evidence
    plan: Plan | None
    target: Target
    diagnosis: Diagnosis | None = None
    samples: tuple[ImageBatch, tuple[str, ...]] | None = None
    class_names: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.prescription, self.evidence))

    def summary(self) -> str:
        """Returns the result in one sentence."""
        return summary_of(self.evidence)

    def __repr__(self) -> str:
        return f"Shrunk({self.summary()})"

    def save(self, folder: Path | str, onnx: bool = True) -> Path:
        """Writes a folder: the model with prescription, evidence and card, the report, and a file for ONNX Runtime.

        Files of an earlier result are replaced, and its exports removed; files that attnrx did not write are kept.

        Raises:
            InvalidInput: A file would be overwritten that attnrx did not write; nothing was changed.
        """
        folder = Path(folder)
        require_result_folder(folder, self.model, onnx)
        # First: an interrupted call leaves a model without exports, and not with those of another model.
        remove_outdated(folder, model_fingerprint(self.model))
        folder = save(self.model, folder, prescription=self.prescription, evidence=self.evidence)
        write_report(folder / "report.html", self.report(f"attnrx: {folder.name}"))
        if onnx:
            form, names = parse_format("onnx"), fitting_names(self.model, self.class_names)
            precision = precision_for(self.model, form)
            export(self.model, folder / "model.onnx", to=form, precision=precision, class_names=names)
        return folder

    def save_exported(
        self,
        folder: Path | str,
        to: str,
        original: nn.Module,
        data: ImageData | Splits,
        *,
        batch: int = 32,
        threads: int | None = None,
    ) -> Evidence:
        """Writes a file of another format to the folder, and evidence of what that file costs against the original.

        `to` is a format of `export`, e.g. "int8" or "openvino(precision=bf16)"; the files are named after it:
        model-int8.onnx and evidence-int8.json. It is calibrated on the images that the plan was made on, and verified
        on those that neither has seen. Its speed is that of `batch` images in the runtime of the format, relative to
        the original in its own library at the precision of the file, which is the model's own or else float32.

        Raises:
            InvalidInput: A file would be overwritten that attnrx did not write; nothing was changed.
        """
        form = parse_format(to)
        # Beside model.onnx, which is a plain ONNX file: a folder may have several formats.
        path, evidence_path = exported_paths(Path(folder), form)
        require_own_export(path, evidence_path, form, self.model)
        # Divided as by `shrink`, so that calibration and verification keep to the same images as the plan.
        planned, _, tested = three_parts(splits_for(original, data))
        calibration = planned.take(min(form.wanted, len(planned)))
        names = fitting_names(self.model, self.class_names)
        precision = precision_for(self.model, form)
        file = export(self.model, path, to=form, precision=precision, calibration=calibration, class_names=names)
        conditions = Conditions(file.images.device, file.images.precision, threads)
        protocol = final_protocol(conditions, batch)
        speed = 1 / self.target.most if self.target.of == "latency" else None
        checks = _with_accuracy(tested, Fidelity(), Latency(batch, protocol, speed, library=True))
        about = {"target": str(self.target), "file": path.name, "format": to}
        evidence = verify(file, original, tested, checks, about, batch_size=32)
        evidence.save(evidence_path)
        return evidence

    def report(self, title: str) -> ReportContent:
        """Returns the content of the report, with the tokens of the sample images if tokens are pruned or merged."""
        tokens = None
        if self.samples is not None and reduction_of(self.model) is not None:
            with suppress(InvalidInput):  # patches that are no grid cannot be drawn
                tokens = sample_tokens(self.model, *self.samples)
        return ReportContent(
            title,
            self.evidence.about,
            self.prescription,
            self.diagnosis,
            self.evidence,
            tokens=tokens,
            front=None if self.plan is None else PlanFront.of_record(self.plan.to_record()),
        )


def shrink(  # noqa: PLR0913  (a keyword for every target)
    model: nn.Module | str | Path,
    data: ImageData | Splits | str | Path,
    *,
    faster: float | None = None,
    macs: float | None = None,
    params: float | None = None,
    max_drop: float | None = None,
    batch: int = 32,
    threads: int | None = None,
    effort: str = "quick",
    by_image: bool = False,
    to: str | None = None,
    weights: str | Path | None = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    seed: int = 0,
    log: Log = no_log,
) -> Shrunk:
    """Makes a model smaller for one target, without labels, and verifies it on images that the plan has not seen.

    The target is one of: `faster`, e.g. 1.6 times, by the latency of `batch` images on `threads` threads relative to
    the model in its own library; `macs` or `params`, the share that stays; `max_drop`, the points of top-1 accuracy
    that may be lost at the fewest MACs. `model` and `data` are objects, or what `load` and `load_data` read. Of data
    with splits the plan sees training and validation images, and the evidence is about test images; other data are
    divided into three parts. `effort` is "quick" (minutes), "normal" or "thorough", which measures most and distills
    the model from the original at the end (`distill`). With `by_image` every image has its own number of tokens, and
    those of the plan are means over images; such a model is not exported. With a format `to`, e.g.
    "openvino(precision=bf16)", `faster` is the speed of the file that `Shrunk.save_exported` writes: the plan is made
    with the costs of the model in attnrx, which are corrected by the measured speed of the files of its plans.

    If the unchanged model is as fast as requested, by its kernels or by the format, it is the result.

    With a `folder` the intermediate results are kept in it, so that an interrupted call goes on; `Shrunk.save` writes
    the results to it.

    Raises:
        InvalidInput: Not exactly one target, labels that do not fit, or a `folder` in which the results would overwrite
            files that attnrx did not write.
        NotSupported: No plan reaches the target.
    """
    target = target_of(faster, macs, params, max_drop)
    if to is not None and by_image:
        raise InvalidInput(f"to {to} with tokens by_image: an exported file has fixed shapes; omit one of them.")
    # One process for all latency measurements, which starts while the images are read.
    with shared_subprocess() if target.spend == "latency" else nullcontext():
        work = _Work.of(
            model,
            data,
            requires_labels=target.of == DROP,
            batch=batch,
            threads=threads,
            effort=effort,
            by_image=by_image,
            to=to,
            weights=weights,
            columns=columns,
            folder=folder,
            seed=seed,
            log=log,
        )
        try:
            (result,) = work.shrunk((target,))
        except TargetMet as met:
            # The kernels of attnrx, or the format, reach the speed alone: nothing has to be removed.
            log(str(met))
            result = work.unchanged(target)
    return result


def elastic(  # noqa: PLR0913  (a keyword for every target)
    model: nn.Module | str | Path,
    data: ImageData | Splits | str | Path,
    folder: Path | str,
    *,
    faster: Sequence[float] = (),
    macs: Sequence[float] = (),
    params: Sequence[float] = (),
    batch: int = 32,
    threads: int | None = None,
    effort: str = "quick",
    weights: str | Path | None = None,
    columns: Columns | None = None,
    seed: int = 0,
    log: Log = no_log,
) -> Elastic:
    """Makes several sizes of a model in one folder, from which `load` returns a model for any budget in between:
    `load(folder, macs=0.55)`, `load(folder, faster=1.4)` or, on the command line, `FOLDER@macs=0.55`.

    The budgets are those of `shrink`, several of one kind. Every size is planned, realized, repaired and verified by
    itself, and a saved model with evidence in a folder of its own; the original is the largest. Budgets in between are
    met by the next larger size with fewer tokens. All sizes are timed together, relative to the model in its own
    library. An interrupted call goes on with the first size that is missing, and a later call with other budgets adds
    sizes to the folder. A speed that the original has by its kernels needs no size.

    Raises:
        InvalidInput: Not exactly one kind of budget, or a folder with sizes of another original, of other data or
            settings.
        TargetMet: The original meets every budget.
        NotSupported: No plan reaches a budget.
    """
    kinds = {"faster": faster, "macs": macs, "params": params}
    for name, values in kinds.items():
        if isinstance(values, str | Real):
            raise InvalidInput(f"{name}={values!r}: give budgets, e.g. {name}=({values},).")
    given = {name: tuple(values) for name, values in kinds.items() if values}
    if len(given) != 1:
        raise InvalidInput(
            f"{' and '.join(given) or 'no budgets'} given: give one of faster=(1.3, 1.6), macs=(0.8, 0.6) or params=..."
        )
    ((kind, values),) = given.items()
    by_value = {value: target_of(**{kind: value}) for value in values}
    if len(by_value) != len(values):
        raise InvalidInput(f"{kind}={values}: give every budget once.")
    # From the largest model to the smallest, by shares falling and speeds rising.
    targets = {f"{kind}-{value:g}": by_value[value] for value in sorted(by_value, reverse=kind != "faster")}
    folder = Path(folder)
    with shared_subprocess() if kind == "faster" else nullcontext():
        work = _Work.of(
            model,
            data,
            batch=batch,
            threads=threads,
            effort=effort,
            weights=weights,
            columns=columns,
            folder=folder,
            several_sizes=True,
            seed=seed,
            log=log,
        )
        made = _made_sizes(folder, work.size_conditions(), targets)
        missing = {name: target for name, target in targets.items() if name not in made}
        for name in missing:
            require_result_folder(folder / name, work.original, onnx=False)
        unneeded = _make_sizes(work, folder, missing, log)
        if len(unneeded) == len(targets):
            *_, met = unneeded.values()
            raise met
    # All sizes are timed in one run, as ratios of separate runs depend on the state of the machine.
    save(work.original, folder / ORIGINAL)
    sizes = work.sizes(folder, (ORIGINAL, *dict.fromkeys((*made, *(name for name in targets if name not in unneeded)))))
    about = {"fingerprint": model_fingerprint(work.original), "effort": effort, "seed": seed}
    elastic_model = Elastic(folder, sizes, {**about, "timing": work.timing_record()})
    elastic_model.write()
    return elastic_model


def _make_sizes(work: "_Work", folder: Path, targets: Mapping[str, Target], log: Log) -> dict[str, TargetMet]:
    """Plans, verifies and saves one size after the other; returns the targets that the original meets.

    An interrupted call continues with the next size.
    """
    missing, unneeded = dict(targets), dict[str, TargetMet]()
    # A generator that has raised is finished: after a target that is met, the loop makes another for the rest.
    while missing:
        try:
            for result in work.shrunk(tuple(missing.values())):
                name = next(iter(missing))
                result.save(folder / name, onnx=False)
                log(f"{name}: {result.summary()}")
                del missing[name]
        except TargetMet as met:  # by the original, which is a size itself
            name = next(iter(missing))
            log(f"{name}: {met}")
            unneeded[name] = met
            del missing[name]
    return unneeded


def _made_sizes(folder: Path, conditions: Mapping[str, Any], targets: Mapping[str, Target]) -> list[str]:
    """Returns the names of the sizes that a folder has, of these and of other budgets.

    Raises:
        InvalidInput: A size was made under other conditions: for another original, on other data ...
    """
    # A folder is saved atomically with its evidence: it is complete or absent.
    names = [path.parent.name for path in sorted(folder.glob("*/evidence.json")) if SIZE.fullmatch(path.parent.name)]
    for name in names:
        expected = dict(conditions)
        if name in targets:
            expected["target"] = str(targets[name])
        if not name.startswith("faster"):  # only a speed depends on the batch
            del expected["batch"]
        _require_conditions(folder / name, expected)
    return names


def _require_conditions(folder: Path, expected: Mapping[str, Any]) -> None:
    stored = Evidence.load(folder / "evidence.json").about
    for name, value in expected.items():
        if stored.get(name) != value:
            raise InvalidInput(f"{folder} was made with {name} {stored.get(name)}, not {value}; choose another folder.")


@dataclass(frozen=True, eq=False)
class _Work:
    """What every target of one call shares: the original, its diagnosis, and the images by their use."""

    original: nn.Module
    diagnosis: Diagnosis
    planned: ImageSet
    others: ImageSet
    tested: ImageSet
    fitted: ImageSet
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
    ) -> "_Work":
        """Loads and diagnoses the model, and divides the images; `several_sizes` are those of an elastic model."""
        preset = effort_of(effort)
        log(f"loading {model if isinstance(model, str | Path) else type(model).__name__}")
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
        splits = _splits_of(original, data, columns)
        # What is chosen, what is predicted and what is reported are measured on disjoint images: a plan is the best of
        # many on its own images, so its divergence there is too low.
        planned, others, tested = three_parts(splits)
        if requires_labels:
            require_labels(planned)
        # Repair fits many more numbers than a plan chooses, and takes more images; those of the plan may be among them.
        fitted = planned.take(min(preset.repair_images, len(planned)))
        planned, others = planned.take(min(preset.images, len(planned))), others.take(min(PREDICTED, len(others)))
        return cls(
            original,
            _diagnosis(original, planned, state, log),
            planned,
            others,
            tested,
            fitted,
            splits.class_names,
            settings,
            {"effort": effort, "batch": batch, "planned_on": planned.fingerprint},
            by_image,
            seed,
        )

    def shrunk(self, targets: Sequence[Target]) -> Iterator[Shrunk]:
        """Yields the smaller model of every target."""
        arguments = self.original, self.diagnosis, targets, self.planned, self.others
        for target, plan_of_target in zip(targets, plan_each(*arguments, settings=self.settings), strict=True):
            yield self._realized(target, plan_of_target)

    def _realized(self, target: Target, found: Plan) -> Shrunk:
        """Realizes a plan, repairs it and verifies the model."""
        log, batch, preset = self.settings.log, self.settings.timing.batch, self.settings.effort
        log("realizing and verifying")
        chosen = _by_image(found.promising) if self.by_image else found.promising
        # Ranks, repair, then tokens: the thresholds by image are known only afterwards, and are recorded.
        slim, how = _repaired(self.original, chosen, self.fitted, Repair(preset.repair_steps, seed=self.seed), log)
        # Last, because only this fit takes a model that prunes or merges tokens.
        if preset.distill_epochs and len(self.fitted) >= 2 * HELD_OUT:
            fit = distill(slim, self.original, self.fitted, Distill(preset.distill_epochs, seed=self.seed))
            reached = f"{fit.before:.4f} to {fit.after:.4f} on images it was not fitted to"
            log(f"distilled at the rate {fit.learning_rate}: {reached}")
            slim, how = fit.model, {**how, "distill": preset.distill_epochs}
        prescription = calibrated(
            replace(chosen, about={**chosen.about, "realized": {**how, **self.fitted_classes}}), slim
        )
        return self._verified(slim, target, found, prescription, Promises(rounds=rounds_of(batch)))

    def unchanged(self, target: Target) -> Shrunk:
        """Returns the original, with the evidence of its speed relative to its own library."""
        self.settings.log("verifying the unchanged model")
        timing = self.settings.timing
        speed = Latency(timing.batch, final_protocol(timing.conditions, timing.batch), library=True)
        return self._verified(self.original, target, None, None, speed)

    def _verified(
        self, model: nn.Module, target: Target, found: Plan | None, prescription: Prescription | None, last: Check
    ) -> Shrunk:
        """Verifies a model against the original; `last` is the check of what was promised."""
        checks = _with_accuracy(self.tested, Fidelity(), Costs(), last)
        about = {"target": str(target), **self.about}
        context = {"prescription": prescription, "seed": self.seed, "batch_size": 32}
        evidence = verify(model, self.original, self.tested, checks, about, **context)
        samples = _samples(self.tested, self.class_names)
        return Shrunk(model, prescription, evidence, found, target, self.diagnosis, samples, self.class_names)

    @cached_property
    def fitted_classes(self) -> dict[str, list[int]]:
        """The classes of the images of the repair, as the prescriptions record them; none for embeddings."""
        # By prediction and not by label, as the check does: data without labels have classes, too.
        if not isinstance(output_kind_of(self.original), Logits):
            return {}
        return {"classes": _classes(self.original, own_images(self.fitted))}

    def size_conditions(self) -> dict[str, Any]:
        """Returns what the evidence of a size of this call states, besides its target."""
        about = {"reference": model_fingerprint(self.original), "data": self.tested.fingerprint, "seed": self.seed}
        return {**about, **self.about}

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
            findings = Evidence.load(path).findings if path.exists() else ()
            measured.append(
                Size(
                    name,
                    costs.macs / original.macs,
                    costs.params / original.params,
                    1 / speeds[name],
                    next((one.value for one in findings if one.details.get("quantity") == "divergence"), None),
                    reduction_of(model) is not None,
                )
            )
        # From the largest to the smallest, whatever the budgets they were made for.
        return tuple(sorted(measured, key=lambda size: size.macs, reverse=True))


def _timed_precision(model: nn.Module, form: Format | None) -> str:
    """Returns the precision of the timings: that of the file of a format, else the model's own if it is timed."""
    # Of models in float64 neither is timed at its own.
    return precision_for(model, form or parse_format("program")) or dtype_name(next(model.parameters()).dtype)


def _repaired(
    model: nn.Module, prescription: Prescription, images: ImageSet, settings: Repair, log: Log
) -> tuple[nn.Module, dict[str, Any]]:
    """Realizes a plan and repairs attention and MLPs where possible; returns how, as `attnrx realize` records it."""
    # `attnrx realize` and the matched controls read these options, and repeat them.
    how = {"by": "compress", "norms": "renormalized", "refine": 0, "calibration_images": len(images)}
    # Without its tokens the rules are those of ranks and units. Without any there are only tokens, and no map to fit.
    if replace(prescription, tokens=None).rules:
        try:
            fits = [lambda realized: repair(realized, model, images, settings).model]
            return realize_fitted(model, prescription, fits, calibration=images), {**how, "repair": settings.steps}
        except (NotSupported, InvalidInput) as error:  # e.g. other MLPs, or fewer images than repair needs
            log(f"not repaired: {error}")
    return realize(model, prescription, calibration=images), how


def _with_accuracy(images: ImageSet, *checks: Check) -> tuple[Check, ...]:
    """Returns the checks, preceded by that of the accuracy if the images have labels."""
    return (Accuracy(None), *checks) if images.has_labels else checks  # reported, without a limit


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
    labels: list[int] = batch.labels.tolist()
    if min(labels) < 0:  # -1: without a label
        return batch.images, ()
    names = dict(enumerate(class_names))
    return batch.images, tuple(names.get(label, f"class {label}") for label in labels)


def _splits_of(model: nn.Module, data: Any, columns: Columns | None) -> Splits:
    if isinstance(data, str | Path):
        size = family_of(model).input_shape(model)[1]
        data = adapt_preprocessing(load_data(str(data), image_size=size, columns=columns), model)
    return splits_for(model, data)


def three_parts(splits: Splits) -> tuple[ImageSet, ImageSet, ImageSet]:
    """Returns disjoint images: to plan on, to measure predictions on, and to verify on."""
    sets = []
    for name in ("train", "validation", "test"):
        with suppress(DataError):
            len(getattr(splits, name))  # raises for a split that the data does not have
            sets.append(getattr(splits, name))
    # Without a test split the validation images are both (`splits_for`).
    distinct = [images for index, images in enumerate(sets) if images is not sets[index - 1] or not index]
    if len(distinct) == 3:
        return distinct[0], distinct[1], distinct[2]
    *first, last = distinct
    if first:  # two sets: the first is divided
        # Parts are consecutive rows, and a dataset may be sorted by class: `take` mixes the classes first.
        every = first[0].take(len(first[0]))  # going round the classes
        return every.part(0, 2, 1), every.part(1, 2, 1), last
    if len(last) < 6:
        raise DataError(f"{len(last)} images: give at least 6, which are divided into three parts.")
    every = last.take(len(last))
    return every.part(0, 3, 1), every.part(1, 3, 1), every.part(2, 3, 1)


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
    log("diagnosing")
    diagnosis = diagnose(model, diagnosed, moments=True, batch_size=32)
    if path is not None:
        diagnosis.save(path)
    return diagnosis
