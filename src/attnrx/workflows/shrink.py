"""`shrink`, the whole workflow in one call. It divides the images, then plans, realizes, fits and verifies a model.

`shrink` returns a `Shrunk`. `elastic` runs the same steps for several targets.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from attnrx.change.predictions import Predictions, predict
from attnrx.change.realization.decoding import fit_decoder, smaller_decoder
from attnrx.change.realization.realizing import fits_record, realize_with_effort
from attnrx.data import (
    Columns,
    FixedImages,
    ImageData,
    ImageParts,
    ImageSet,
    Splits,
    load_data,
    require_labels,
    three_parts,
)
from attnrx.data.model_data import ModelBatches, adapt_preprocessing, splits_for
from attnrx.decide.diagnosing import diagnose
from attnrx.decide.planning import plan_sharing
from attnrx.decide.planning.measured_costs import final_protocol, timing_conditions
from attnrx.decide.planning.planner import Planner
from attnrx.decide.planning.space import format_of
from attnrx.decide.planning.uniform import portable_form, require_portable
from attnrx.exporting import Baseline, Onnx, parse_format, subject_of, write_exported
from attnrx.nouns.diagnosis import Diagnosis
from attnrx.nouns.effort import EFFORTS, Effort, PlanSettings, final_rounds
from attnrx.nouns.plan import Plan, TargetMet
from attnrx.nouns.prescription import Prescription
from attnrx.nouns.target import DIVERGENCE, DROP, RECALL, Target, target_of
from attnrx.show.checks import Check, Costs, Index, Latency, Promises
from attnrx.show.checks.check import keeping_outputs
from attnrx.support.arguments import COUNT, FASTER, checked, instance, number, optional, or_percent
from attnrx.support.atomic_writes import file_lock, scratch_folder
from attnrx.support.errors import InvalidInput, NotSupported
from attnrx.support.progress import Log, begin, no_log, phases
from attnrx.support.shapes import Tensor
from attnrx.support.subprocess_runner import shared_subprocess
from attnrx.vit.models import accepting, family_of, model_fingerprint
from attnrx.vit.models.boundary.verbs import verb
from attnrx.vit.outputs import (
    Divergence,
    Embeddings,
    Metric,
    SetMetric,
    judged,
    most_images,
    name_of,
    output_kind_of,
    recalled,
)
from attnrx.workflows.load import load_original, preflight
from attnrx.workflows.rivals import FileRun, MeasuredFile, measure_baseline, measure_files
from attnrx.workflows.shrunk import (
    Shrunk,
    checks_of,
    require_result_folder,
    result_files,
    result_path,
    samples_of,
    with_accuracy,
    with_file,
)
from attnrx.workflows.verify import verify

# If a latency target saves less than this share, the whole decoder is kept. A smaller decoder could meet such a target
# on its own, without any change to the blocks.
LARGEST_DECODER = 0.2

# For a divergence target, at most CORRECTIONS plans are made. The search ends if a plan uses at least the share ENOUGH
# of the allowed loss. The next plan aims at the share AIMED, and its limit is raised at most by the factor FARTHEST.
CORRECTIONS, ENOUGH, AIMED, FARTHEST = 4, 0.8, 0.95, 1.6
# A recall target counts this many neighbours. A cosine distance d loses the share LOST * sqrt(d) of them, measured on a
# ViT-Tiny's features in an index of 10,000 images (2026-11).
NEIGHBOURS, LOST = 10, 1.3

# The unchanged model's file meets a speed target if its timed speed is at least this multiple of the target.
ENOUGH_SPEED = 1.02

# The phases of `shrink`, with their usual shares of the time for a quick call with a MACs target (`progress.Phases`).
# The shares before the repair are CPU seconds, measured with a ViT-Tiny at 224 pixels on one thread of a loaded machine
# (2026-11).
PHASE_SHARES = {
    "loading the model": 3.0,
    "reading the images": 8.0,
    "timing your model": 0.0,
    "diagnosing": 16.0,
    "measuring costs": 1.0,
    "measuring sensitivities": 19.0,
    "searching plans": 30.0,
    "predicting on other images": 7.0,
    "realizing and repairing": 54.0,
    "distilling": 0.0,
    "verifying": 20.0,
    "measuring speed": 0.0,
}

MODEL_OR_NAME = instance("a model, a folder or a name, e.g. 'timm:vit_tiny_patch16_224'", nn.Module, str, Path)
BELOW_ONE = number(0.0, math.nextafter(1.0, 0.0), "a share of the original's above 0 and below 1, e.g. 0.6")
POINTS = number(0.0, 100.0, "points of accuracy from 0 to 100, e.g. 1", above=False)


@checked(
    model=MODEL_OR_NAME,
    faster=optional(FASTER),
    macs=optional(or_percent(BELOW_ONE)),
    params=optional(or_percent(BELOW_ONE)),
    max_drop=optional(POINTS),
    max_kl=optional(number(0.0, 1e3)),
    size=optional(number(0.0, 1e6)),
    recall=optional(or_percent(BELOW_ONE)),
    multiple=optional(COUNT),
)
@judged
@verb
def shrink(  # noqa: PLR0913  (a keyword for every target)
    model: nn.Module | str | Path,
    data: ImageData | Splits | str | Path,
    *,
    faster: float | None = None,
    macs: float | str | None = None,
    params: float | str | None = None,
    max_drop: float | None = None,
    max_kl: float | None = None,
    size: float | None = None,
    recall: float | str | None = None,
    keep_index: bool = False,
    batch: int = 32,
    threads: int | None = None,
    effort: Literal["quick", "normal", "thorough"] = "quick",
    to: str | None = None,
    portable: bool = False,
    multiple: int | None = None,
    inputs: Callable[[Any], Any] | None = None,
    weights: str | Path | None = None,
    columns: Columns | None = None,
    folder: Path | str | None = None,
    seed: int = 0,
    log: Log = no_log,
    divergence: Divergence | None = None,
    metric: Metric | None = None,
    metric_of_set: SetMetric | None = None,
) -> Shrunk:
    """Makes a model smaller for one target, without labels, and verifies it on images that the plan has not seen.

    Pass one target: `faster`, `macs`, `params`, `size`, `max_kl`, `recall` or `max_drop`.

    attnrx reads your data once. It reads the images that the effort needs, and at most 10,000 to verify on. The effort
    "quick" verifies on as many images as the model can process in 6e12 multiply-accumulates, but on at least 256.
    Random transforms and samplers run once, seeded with `seed`. If your data have splits, the plan uses training and
    validation images, and the evidence uses test images. Other data are divided into three parts. No image is in two
    parts, and images with the same pixels count as one image.

    If the unchanged model already reaches the requested speed in attnrx's kernels, or as a file in the format `to`, you
    get the unchanged model back.

    With `to`, the vendor's own tool also writes your unchanged model as a float file and, with the tool's default
    settings, as an 8-bit file. One run times all files and compares their outputs. If attnrx's own file of the
    unchanged model is faster than the plan's file, and its outputs diverge no more from the original's, nothing is
    removed. `Shrunk.form` then names the format of this file.

    Args:
        model: A model, or anything that `load` accepts.
        data: Images in any form that `load_data` or `data.image_set` accepts, or `Splits`.
        faster: The speed-up, e.g. 1.6, measured on this machine. It is relative to your model in eager PyTorch or, with
            `to`, relative to the vendor's own file in that runtime and precision.
        macs: The share of the MACs to keep, e.g. 0.5 or 50%.
        params: The share of the parameters to keep, e.g. 0.7 or 70%.
        max_drop: The accuracy that may be lost, in percentage points, e.g. 1pt.
        max_kl: The allowed mean divergence from the original's outputs, e.g. 0.05. For class outputs, it is in nats.
            Other outputs have their own divergence. With `to`, the limit applies to the file. attnrx removes MACs until
            this limit is reached.
        size: The size of the weights or, with `to`, of the file, in megabytes, e.g. 4.
        recall: The share of the 10 nearest neighbours that the smaller model's queries still find in an index of the
            original's embeddings, e.g. 0.98 or 98%. attnrx removes MACs until this limit is reached. Implies
            `keep_index`.
        keep_index: Keeps the smaller model's embeddings usable as queries to a search index of the original's
            embeddings. The model is then distilled by the cosine distance to these embeddings. With quick, it is
            distilled only if it has at most 5e9 MACs per image.
        batch: Images per timed forward pass.
        threads: CPU threads during a timed forward pass (by default torch's number).
        effort: How much to measure: quick (minutes), normal or thorough. Normal and thorough also distill the model
            from the original at the end. Normal does so only if the model has at most 5e9 MACs per image.
        to: The format of the file that the target applies to (see export), e.g. int8 or 'openvino(precision=bf16)'. For
            `faster`, blocks are timed in the runtime of the format. `Shrunk.save` writes the file. If the unchanged
            model's 8-bit file meets this target, and is faster and no farther from the original, it is the result.
        portable: Returns a model of the library's own class, with smaller layers. `Shrunk.save` then writes a
            checkpoint that the library loads without attnrx (see `save`). attnrx prunes all MLPs to one width. It also
            prunes heads if the class has an argument for their number. `faster` then applies to the library's own code.
        multiple: The MLP width of a portable model is a multiple of this number, by default 8, or 64 on a GPU.
        inputs: A function that returns your own module's arguments for a batch. `inputs(batch)` returns a tensor, a
            tuple of arguments or a mapping of named arguments. By default, attnrx takes the images from every batch.
        weights: A local file of weights, for a model that you pass by name.
        columns: The names of the columns with the images and the labels, if the data are tables.
        folder: The folder that `Shrunk.save` will write to. If files that attnrx did not write are in the way, an error
            is raised before the work starts. Only one call at a time can use a folder.
        seed: The seed of every random draw.
        log: A function that receives a line for every step.
        divergence: Your own divergence, `divergence(original, smaller)`. It returns one number per image, 0 for equal
            outputs. The plan and the evidence use it, and so do the fits if it has gradients.
        metric: Your own metric for the evidence, `metric(outputs, (images, labels))` (see `verify`).
        metric_of_set: Your own metric over all images for the evidence, `metric_of_set(outputs, labels)` (see
            `verify`).

    Returns:
        The smaller model with its prescription, plan and evidence.

    Raises:
        InvalidInput: You did not pass exactly one target, or results in the `folder` would overwrite files that attnrx
            did not write.
        DataError: There are too few images, or `max_drop` was passed without labels that fit the model.
        CheckpointError: Another process or thread uses the folder.
        NotSupported: No plan reaches the target, or the class of a portable model has no argument for the MLPs' width.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> shrunk = rx.shrink(vit, torch.randn(96, 3, 32, 32), macs=0.7)  # or a DataLoader, a dataset ...
        >>> answers = shrunk.model(torch.randn(1, 3, 32, 32))
        >>> folder = shrunk.save("faster")
    """
    target = target_of(faster, macs, params, max_drop, max_kl, size, recall)
    keep_index = keep_index or target.quantity == RECALL
    if keep_index and divergence is not None:
        raise InvalidInput(
            f"divergence={name_of(divergence)} with {'keep_index=True' if recall is None else str(target)}: an index "
            "is searched by cosine similarity, so leave the divergence out."
        )
    form = None if to is None else parse_format(to)
    portability = portable_settings(portable, multiple)
    preflight(data=data, columns=columns, folder=folder, formats=() if form is None else (form,))
    # If a library is missing that `Shrunk.save` needs, the log says so before hours of work. This is not an error,
    # because the result need not be saved.
    for check in (partial(preflight, report=True), partial(preflight, formats=(form or Onnx(),))):
        try:
            check()
        except NotSupported as missing:
            log(f"for Shrunk.save: {missing}")
    # All latency measurements share one process, which starts while the images are read.
    one_process = shared_subprocess() if target.minimized == "latency" else nullcontext()
    one_call = nullcontext() if folder is None else file_lock(folder, seconds=0.0)
    shares = phase_shares(target.minimized, effort, portable, to is not None, keep_index)
    with one_call, phases(shares, log), one_process:
        data = ModelBatches.of(data, inputs)
        original = load_original(model, weights, data)
        if keep_index and not isinstance(kind := output_kind_of(original), Embeddings):
            asked, instead = ("keep_index=True", "leave it out") if recall is None else (target, "give another target")
            raise InvalidInput(
                f"{asked} is about embeddings, and this model returns {kind.returns}: {instead}, or load the model "
                'with outputs="embedding".'
            )
        if folder is not None:  # before the work starts
            require_result_folder(Path(folder), original, result_files(Path(folder), None if to else Onnx(), to))
        conditions = replace(timing_conditions(original, threads, batch, form, log), plain=portable)
        if conditions.on_cuda and target.minimized != "latency":
            log("on a CUDA device fewer MACs are not less time: faster=N plans for its time (docs/results/gpu.md)")
        about = {"batch": batch, "conditions": conditions, "to": to, "seed": seed, "log": log, **portability}
        settings = PlanSettings.preset(effort, portable=portable, **about)
        if portable:  # before the work starts
            require_portable(original, settings)
        # The decoder is made smaller only if the target also needs smaller blocks.
        decoder = target.quantity == target.minimized == "latency" and target.limit < 1 - LARGEST_DECODER
        decoder = decoder and not portable
        run = ShrinkRun.start(original, data, columns, effort, settings, decoder, target, keep_index)
        if target.quantity == DROP:
            require_labels(run.images.planned)
        result = run.result(target)
        if isinstance(result, TargetMet):
            # The unchanged model reaches the speed in attnrx's kernels or in the format, so nothing has to be removed.
            log(result.reason)
            return run.unchanged(target)
        return result


def portable_settings(portable: bool, multiple: int | None) -> dict[str, int]:
    """Returns the setting `multiple` for the widths of a portable model, or an empty dict if `multiple` is None.

    Raises:
        InvalidInput: You passed a `multiple`, but the model is not portable.
    """
    if multiple is not None and not portable:
        raise InvalidInput(f"multiple={multiple} is that of a portable model: give portable=True, too.")
    return {} if multiple is None else {"multiple": multiple}


def phase_shares(
    spend: str, effort: str, portable: bool = False, is_file: bool = False, keep_index: bool = False
) -> dict[str, float]:
    """Returns the share of the total time that each phase of a call usually takes.

    `spend` is the cost that the target of the call limits.
    """
    shares = dict(PHASE_SHARES)
    if spend == "latency":
        # For a latency target, blocks and whole plans are timed, too. The shares are wall-clock seconds on one thread
        # of an idle machine (2026-11).
        shares |= {"diagnosing": 11.0, "measuring costs": 18.0, "measuring sensitivities": 12.0}
        shares |= {"searching plans": 34.0, "realizing and repairing": 34.0, "measuring speed": 50.0}
        shares["timing your model"] = 20.0 if is_file else 0.0
    if EFFORTS[effort].distill_epochs or keep_index:
        shares["distilling"] = 150.0
    if portable:  # there are only a few plans, and every plan is measured as a whole
        shares["measuring sensitivities"] = 0.0
    return {name: share for name, share in shares.items() if share}


@dataclass(frozen=True, eq=False)
class ShrinkRun:
    """The state that all targets of one call share: the original, its diagnosis, and the images for each use."""

    original: nn.Module
    diagnosis: Diagnosis
    planned: FixedImages  # the images that the plan is chosen on, a part of the images that weights are fitted to
    images: ImageParts
    class_names: tuple[str, ...]
    effort: Effort
    about: Mapping[str, Any]
    planned_model: nn.Module  # the original, or a copy of it with a smaller decoder
    baseline: Baseline | None = None  # the vendor's file, to which the speeds of files are relative
    planned_baseline: Baseline | None = None  # like `baseline`, with attnrx's files of the planned model
    unchanged_speed: float = 0.0  # the speed of attnrx's file of the unchanged model, relative to the baseline
    measured: dict[str, Planner] = field(default_factory=dict)  # the planners with their measurements, by cost

    @classmethod
    def start(
        cls,
        original: nn.Module,
        data: Any,
        columns: Columns | None,
        effort: str,
        settings: PlanSettings,
        decoder: bool = False,
        target: Target | None = None,
        keep_index: bool = False,
    ) -> "ShrinkRun":
        """Divides the images and diagnoses the model. If the target is a file's speed, also times the vendor's file.

        Raises:
            NotSupported: The target's speed would be out of reach even if all blocks were removed.
            InvalidInput: There are too few images to verify the search in an index of embeddings.
        """
        log, seed = settings.log, settings.seed
        begin("reading the images")
        kind = output_kind_of(original)
        if kind.note:
            log(kind.note)
        if isinstance(data, str | Path):
            data = adapt_preprocessing(load_data(str(data), columns=columns), original)
        needed = Effort.of(effort, kind, settings=settings, keep_index=keep_index)
        counts = needed.fitted_images, needed.predicted_images, needed.verified_images
        splits = splits_for(original, data, limit=sum(counts), seed=seed)
        # Choices, predictions and reported results are measured on disjoint images. The chosen plan is the best of many
        # plans on its own images, so its divergence there is too low.
        images = three_parts(splits, *counts)
        for line in (images.summary, *images.notes):
            log(line)
        if keep_index and len(images.verified) < Index.least:
            raise InvalidInput(
                f"{len(images.verified)} images are left to verify on, and a search for {NEIGHBOURS} neighbours in an "
                f"index of them needs {Index.least}: give more images, 300 or more of any kind."
            )
        original, splits = _at_size_of(images.planned, original, splits, log)
        work = Effort.of(effort, kind, family_of(original).costs(original).macs, settings, keep_index)
        images = _verified_on(images, most_images(original), "the outputs are large", log)
        images = _verified_on(images, work.verified_images, f"a {effort} call", log)
        if work.image_share is not None:
            fewer = {name: _share_of(getattr(images, name), work.image_share) for name in ("planned", "predicted")}
            images = images._replace(**fewer)
        if keep_index and not work.distill_epochs:
            log("not distilled: the model is large, and effort='normal' distills it for the index")
        planned = images.planned.take(min(work.settings.num_images, len(images.planned)))
        planned_model = original
        form, baseline, planned_baseline, unchanged = format_of(settings), None, None, 0.0
        if target is not None and target.quantity == target.minimized == "latency" and form is not None:
            begin("timing your model")
            baseline, unchanged = measure_baseline(original, form, images.planned, work.settings, target.limit)
            planned_baseline = baseline
        begin("diagnosing")
        if decoder and (smaller := smaller_decoder(original, images.planned, work.decoder_fits[0], seed)) is not None:
            planned_model, divergence = smaller
            work = work.with_smaller_decoder()
            units = " + ".join(str(cut.units) for cut in around.cuts) if (around := planned_model.around) else ""
            log(f"decoder: {units} channels are left; divergence {divergence:.3g}, before the plan")
            if baseline is not None:
                planned_baseline = baseline.of_copy(planned_model, images.planned, settings.in_subprocess)
        diagnosed = planned.take(min(work.diagnosed_images, len(planned)))
        diagnosis = diagnose(planned_model, diagnosed, moments=True, batch_size=32)
        about = {"effort": effort, "batch": settings.batch, "planned_on": planned.fingerprint}
        about |= {"portable": True} if settings.portable else {}
        about |= {"keep_index": True} if keep_index else {}
        used, speeds = (images, splits.class_names), (baseline, planned_baseline, unchanged)
        return cls(original, diagnosis, planned, *used, work, about, planned_model, *speeds)

    @property
    def settings(self) -> PlanSettings:
        """How plans are searched and timed."""
        return self.effort.settings

    def result(self, target: Target) -> Shrunk | TargetMet:
        """Plans, realizes, fits and verifies the smaller model for a target.

        Returns `TargetMet` if the unchanged model meets the target.

        Raises:
            NotSupported: No plan meets the target, or attnrx cannot write a file in the format.
        """
        if self.baseline is not None and self.unchanged_speed >= ENOUGH_SPEED / target.limit:
            speed, where = self.unchanged_speed, f"as {self.settings.to}"
            return TargetMet.by_speed(1 / target.limit, speed, where, self.baseline.title)
        if target.quantity in (DIVERGENCE, RECALL):
            made = self._within(target)
        else:
            plan = self._planned(target)
            if isinstance(plan, TargetMet):
                return plan
            made = self._realized(plan)
        with keeping_outputs():
            files = self._files(made.model)
            if files is not None and (instead := self._instead(files, target)) is not None:
                return self.unchanged(target, files, instead)
            last = (Promises(rounds=self._final_rounds),)
            return self._verified(made.model, target, made.plan, made.prescription, last, files)

    def _within(self, target: Target) -> "_Made":
        """Returns the plan and the model with the fewest MACs whose loss on held-out images meets the target.

        If the call has a format (`to`), the loss is measured on the file.

        Raises:
            NotSupported: No plan meets the target.
        """
        # A plan is chosen by its divergence in float and before the repair. The loss that is measured afterwards
        # corrects the limit for the next plan.
        loss = self._loss_of(target)
        limit, best, last, measured = loss.limit, None, None, list[float]()
        refusal: NotSupported | None = None
        for _ in range(CORRECTIONS):
            try:
                plan = self._planned(Target(DIVERGENCE, limit))
            except NotSupported as error:
                if measured:
                    break
                refusal, limit = error, limit * FARTHEST**loss.power  # before the repair a plan may diverge by more
                continue
            assert isinstance(plan, Plan)  # the unchanged model can only meet cost targets
            if last is not None and (plan.cost, plan.explained) == (last.cost, last.explained):
                if best is not None:
                    break
                limit /= FARTHEST  # the limit fell too little to change a choice
                continue
            last, made = plan, self._realized(replace(plan, target=str(target)))
            measured.append(loss.measured(made.model))
            self.settings.log(f"{loss.name} on other images: {measured[-1]:.3g}, and {loss.allowed:.3g} is allowed")
            if measured[-1] <= loss.allowed:
                best = made
                if measured[-1] >= ENOUGH * loss.allowed:
                    break
            elif best is not None:
                break
            limit *= min(AIMED * loss.allowed / max(measured[-1], 1e-30), FARTHEST) ** loss.power
        if best is not None:
            return best
        if not measured:
            raise NotSupported(f"{target}: no plan is expected to lose so little ({refusal})") from refusal
        reached = f"{loss.name} of the results of {len(measured)} plans is {min(measured):.3g} or more on other images"
        raise NotSupported(f"{target}: the {reached}. {loss.advice(1.1 * min(measured))}, or take a greater effort.")

    def _loss_of(self, target: Target) -> "_Loss":
        """Returns the loss that a divergence or recall target limits."""
        if target.quantity != RECALL:

            def most(loss: float) -> str:
                return f"Allow at least max_kl={loss:.2g}"

            return _Loss("divergence", target.limit, target.limit, 1, self._divergence_of, most)

        def least(loss: float) -> str:
            return f"Ask for recall={max(1 - loss, 0.0):.3f} or less"

        lost = 1 - target.limit
        # The share of lost neighbours grows with the square root of the divergence.
        name, limit = "share of the neighbours that are lost", (lost / LOST) ** 2
        return _Loss(name, lost, limit, 2, self._share_lost_by, least)

    def _divergence_of(self, model: nn.Module) -> float:
        """Returns the mean divergence of a model, or of its file, on the images held out for predictions."""
        return self._answers_of(model).divergence("original", "result").double().mean().item()

    def _share_lost_by(self, model: nn.Module) -> float:
        """Returns the share of nearest neighbours in the original's index that a model, or its file, no longer finds.

        The queries are the images held out for predictions. One standard error is added to the returned share.
        """
        answers = self._answers_of(model)
        old, new = answers.outputs["original"], answers.outputs["result"]
        index, own = torch.cat([old, self._stored]), torch.arange(len(old))
        lost = 1 - recalled((old, index), (new, index), (NEIGHBOURS,), own)
        # Without the standard error, a plan could meet the limit by luck on these few queries, and miss it on others.
        return float(lost.mean() + lost.std(correction=0) / len(lost) ** 0.5)

    @cached_property
    def _stored(self) -> Tensor:
        """The original's embeddings [images, features] of the images that are used for fitting and for verification.

        Plans are tested in an index of these embeddings. It is at least as large as the index that the verification
        uses. The queries are the images held out for predictions.
        """
        parts = [self.images.planned, self.images.verified]
        rows = [predict({"original": self.original}, each, task="making an index").outputs for each in parts]
        return torch.cat([each["original"] for each in rows])

    def _answers_of(self, model: nn.Module) -> Predictions:
        """Returns the outputs of the original and of a model (or its file) on the images held out for predictions."""
        form, images = format_of(self.settings), self.images.predicted
        with scratch_folder() as folder:
            candidate = model
            if form is not None:
                subject = subject_of(model, form, self._calibration)
                candidate = write_exported(subject, folder / f"model{form.suffix}", form)
            return predict({"original": self.original, "result": candidate}, images, task="comparing outputs")

    @property
    def _calibration(self) -> FixedImages:
        """The images that calibrate 8-bit files."""
        return self.images.planned.take(min(self.effort.calibrated_images, len(self.images.planned)))

    def _planned(self, target: Target) -> Plan | TargetMet:
        images, shared = (self.planned, self.images.predicted), {"settings": self.settings, "reference": self.original}
        about = self.planned_model, self.diagnosis, target
        return plan_sharing(*about, *images, self.measured, **shared, baseline=self.planned_baseline)

    def _realized(self, plan: Plan) -> "_Made":
        """Realizes a plan as a smaller model, and fits the model."""
        log = self.settings.log
        begin("realizing and repairing")
        chosen = plan.with_predictions
        # The fits use bfloat16 if plans were compared in it.
        bfloat16, images, form = bool(plan.about["bfloat16"]), self.images.planned, format_of(self.settings)
        # The diagnosis has already shown its notes, so the fits need not repeat them.
        fitted = replace(images, notes=(*images.notes, *self.diagnosis.about.get("notes", ())))
        bits = 8 if form is not None and form.calibrated else None
        slim, fits = realize_with_effort(self.planned_model, chosen, fitted, self.effort, bfloat16, log, bits)
        if self.settings.portable:
            slim = portable_form(slim, self.original, fitted)
        if self.has_smaller_decoder:
            budget = self.effort.decoder_fits[1]
            slim, line = fit_decoder(slim, self.original, fitted, budget, self.settings.seed)
            log(line)
            # The plan is for a copy with a smaller decoder. Its prescription changes only the blocks, which are the
            # original's, so it gets the original's fingerprint.
            chosen = replace(chosen, fingerprint=model_fingerprint(self.original))
        # `attnrx realize` and the matched controls repeat the settings in this record.
        how = {"by": "compress", "calibration_images": len(fitted), **fits_record(*fits)}
        return _Made(plan, slim, replace(chosen, about={**chosen.about, "realized": how}))

    @property
    def has_smaller_decoder(self) -> bool:
        """Whether the plan is for a copy of the original with fewer channels in its decoder."""
        return self.planned_model is not self.original

    @property
    def _final_rounds(self) -> int:
        return final_rounds(self.settings.batch, family_of(self.original).costs(self.original).macs)

    def _files(self, model: nn.Module | None) -> FileRun | None:
        """Measures a model's file together with the vendor's and attnrx's files of the unchanged model.

        Returns None if the call has no format (`to`).
        """
        settings, form = self.settings, format_of(self.settings)
        if form is None:
            return None
        begin("measuring speed")
        rounds = final_rounds(settings.batch, family_of(self.original).costs(self.original).macs, of_files=True)
        protocol = replace(settings.protocol, rounds=rounds)
        images, noise = (self._calibration, self.images.verified), settings.noise(self.original)
        about = *images, protocol, noise, settings.log, self.baseline
        shared = {"class_names": self.class_names, "in_subprocess": settings.in_subprocess}
        return measure_files(self.original, model, form, *about, **shared)

    def _instead(self, files: FileRun, target: Target) -> MeasuredFile | None:
        """Returns a file of the unchanged model if it should replace the plan's file, else None.

        For a latency target, a file that attnrx wrote replaces the plan's file if it meets the target, is faster, and
        diverges no more from the original. The fastest of these files is returned. For a parameter target, no file
        replaces the plan's file, because such a plan need not make the model faster. For other targets, the unchanged
        model's file in the same format is returned if it is faster than the plan's file.
        """
        log, result = self.settings.log, files.result
        for file in files.better():
            log(f"{file.title} is faster than {result.title}, and no farther from the original")
        if target.minimized == "params":
            return None
        if target.minimized != "latency":
            return files.unchanged if result.gain < 1 else None
        enough = 1 / target.limit
        return next((file for file in files.better() if file.is_own and file.speed.value >= enough), None)

    def unchanged(self, target: Target, files: FileRun | None = None, instead: MeasuredFile | None = None) -> Shrunk:
        """Returns the original, with evidence about its speed relative to its own library.

        If plans were made for a smaller decoder, the returned model has this decoder. If a file of the unchanged model
        replaces the plan's file, pass it as `instead`. The returned model then has the original's own decoder.
        """
        batch, model = self.settings.batch, self.planned_model if instead is None else self.original
        files = files or self._files(self.planned_model if self.has_smaller_decoder else None)
        # The speed of a file was already measured, together with the other files.
        speed = Latency(batch, final_protocol(self.settings.conditions, batch, self.original), library=True)
        last = () if files is not None else (speed,)
        return self._verified(model, target, None, None, last, files, instead)

    def _verified(
        self,
        model: nn.Module,
        target: Target,
        plan: Plan | None,
        prescription: Prescription | None,
        last: tuple[Check, ...],
        files: FileRun | None = None,
        instead: MeasuredFile | None = None,
    ) -> Shrunk:
        """Verifies a model, or its file if there is a format, against the original.

        `last` holds the checks that run at the end, e.g. whether the plan's predictions were right.
        """
        begin("verifying")
        tested, names = self.images.verified, self.class_names
        chosen = None if files is None else files.chosen(instead)
        file, form = None if chosen is None else chosen.file, self.settings.to if instead is None else str(instead.form)
        about = {"target": str(target), **self.about}
        context = {"prescription": prescription, "seed": self.settings.seed, "batch_size": 32}
        of_outputs = with_accuracy(tested, self.original, *checks_of(target, self.original, tested))
        checks = (*(of_outputs if file is None else ()), Costs(), *last)
        evidence = verify(model, self.original, tested, checks, about, **context)
        if file is not None:  # the user runs the file, whose 8 bits may change answers that the model keeps
            of_file = verify(file, self.original, tested, of_outputs, seed=self.settings.seed, batch_size=32)
            evidence = with_file(evidence, of_file, result_path(Path(), file.form).name, str(form))
        evidence = evidence if files is None else files.added_to(evidence, target, instead)
        samples, maps = samples_of(self.original, model, tested, names)
        # The diagnosis covers only the blocks, and a copy with a smaller decoder has the original's blocks. So the
        # diagnosis gets the original's fingerprint.
        diagnosis = replace(self.diagnosis, fingerprint=model_fingerprint(self.original))
        in_kernels = self.settings.to is None and self.settings.conditions.in_kernels
        parts = diagnosis, samples, names, self.images, maps, in_kernels
        return Shrunk(model, prescription, evidence, plan, target, *parts, form, file)


@dataclass(frozen=True, eq=False)
class _Made:
    """A plan, the model that was realized from it and fitted, and its prescription."""

    plan: Plan
    model: nn.Module
    prescription: Prescription


class _Loss(NamedTuple):
    """The loss that a target limits.

    `allowed` is the loss that the target allows. `limit` is the limit for the first plan's divergence. The divergence
    grows like the loss raised to `power`. `measured` returns a model's loss, and `advice` says what to request instead.
    """

    name: str
    allowed: float
    limit: float
    power: int
    measured: Callable[[nn.Module], float]
    advice: Callable[[float], str]


def _verified_on(images: ImageParts, most: int, reason: str, log: Log) -> ImageParts:
    """Returns the images, with at most `most` images to verify on."""
    if len(images.verified) <= most:
        return images
    log(f"{reason}: verified on {most:,} of {len(images.verified):,} images")
    return images._replace(verified=images.verified.take(most))


def _share_of(images: FixedImages, share: float) -> FixedImages:
    return images.take(max(round(share * len(images)), 1))


def _at_size_of(images: ImageSet, model: nn.Module, splits: Splits, log: Log) -> tuple[nn.Module, Splits]:
    """Returns the model and the splits, adapted to the size of the images."""
    shape = next(iter(images.take(1).batches(1))).images.shape[1:]
    fitting, before = accepting(model, tuple(shape)), family_of(model).input_shape(model)
    if fitting is model:
        return model, splits
    height, width = int(shape[1]), int(shape[2])
    log(f"images of {height} x {width} pixels: the model, made for {before[1]} x {before[2]}, is used at that size")
    side = height if height == width else (height, width)
    return fitting, replace(splits, image_size=side, channels=int(shape[0]))
