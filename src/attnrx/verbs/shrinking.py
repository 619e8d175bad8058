"""The whole workflow in one call: plans, realizes and verifies a smaller model for a target."""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from attnrx.change.exporting import parse_format
from attnrx.change.realization.elastic import ORIGINAL, Elastic
from attnrx.data import Columns, ImageData, Splits
from attnrx.decide.planning import Target
from attnrx.decide.planning.effort import EFFORTS
from attnrx.decide.planning.target import DROP, target_of
from attnrx.nouns.evidence import Evidence
from attnrx.support.arguments import (
    ANY,
    BATCH,
    CALLBACK,
    FASTER,
    FLAG,
    PATH,
    SEED,
    TEXT,
    THREADS,
    checked,
    each,
    instance,
    number,
    one_of,
    optional,
)
from attnrx.support.atomic_writes import locked
from attnrx.support.errors import InvalidInput, TargetMet
from attnrx.support.progress import Log, no_log, phases
from attnrx.support.subprocess_runner import shared_subprocess
from attnrx.verbs.api import save
from attnrx.verbs.preflight import preflight
from attnrx.verbs.result_folder import require_result_folder
from attnrx.verbs.shrink_run import ShrinkRun, shares_of_phases
from attnrx.verbs.shrunk import Shrunk
from attnrx.vit.models import family_of, model_fingerprint
from attnrx.vit.models.verbs import verb

SIZE = re.compile(r"(faster|macs|params)-[\w.+-]+")  # the names of the folders of sizes


MODEL_OR_NAME = instance("a model, a folder or a name, e.g. 'timm:vit_tiny_patch16_224'", nn.Module, str, Path)
# What `shrink` and `elastic` have in common.
SHARED = {
    "model": MODEL_OR_NAME,
    "data": ANY,
    "batch": BATCH,
    "threads": optional(THREADS),
    "effort": one_of(*EFFORTS),
    "weights": optional(PATH),
    "columns": optional(instance("Columns, e.g. attnrx.data.Columns(image_column='image')", Columns)),
    "seed": SEED,
    "log": CALLBACK,
}
BELOW_ONE = number(0.0, math.nextafter(1.0, 0.0), "a share of the original's above 0 and below 1, e.g. 0.6")
SHARES = each(BELOW_ONE, "budgets: shares above 0 and below 1, e.g. (0.8, 0.6)")
SPEEDS = each(FASTER, "budgets: numbers above 1, e.g. (1.3, 1.6)")
POINTS = number(0.0, 100.0, "points of accuracy from 0 to 100, e.g. 1", above=False)


@checked(
    **SHARED,
    faster=optional(FASTER),
    macs=optional(BELOW_ONE),
    params=optional(BELOW_ONE),
    max_drop=optional(POINTS),
    by_image=FLAG,
    to=optional(TEXT),
    folder=optional(PATH),
)
@verb
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
    that may be lost at the fewest MACs. `model` and `data` are objects, or what `load` and `load_data` read. The data
    are read once, as many images as the effort needs and at most 10,000 to verify on; random transforms and samplers
    are one draw of `seed`. Of data with splits the plan sees training and validation images, and the evidence is about
    test images; other data are divided into three parts. No two parts have images of the same pixels.
    `effort` is "quick" (minutes), "normal" or "thorough", which measures most and distills the model from the
    original at the end (`distill`). With `by_image` every image has its own number of tokens, and those of the plan are
    means over images; such a model is not exported. With a format `to`, e.g.
    "openvino(precision=bf16)", `faster` is the speed of the file that `Shrunk.save_exported` writes: the plan is made
    with the costs of the model in attnrx, which are corrected by the measured speed of the files of its plans.

    If the unchanged model is as fast as requested, by its kernels or by the format, it is the result.

    With a `folder` the intermediate results are kept in it, so that an interrupted call goes on; `Shrunk.save` writes
    the results to it. One call at a time uses a folder.

    Raises:
        InvalidInput: Not exactly one target, labels that do not fit, or a `folder` in which the results would overwrite
            files that attnrx did not write.
        CheckpointError: Another process or thread uses the folder.
        NotSupported: No plan reaches the target.
    """
    target = target_of(faster, macs, params, max_drop)
    preflight(
        data=data,
        columns=columns,
        folder=folder,
        formats=() if to is None else (parse_format(to),),
        plans=True,
    )
    if to is not None and by_image:
        raise InvalidInput(f"to {to} with tokens by_image: an exported file has fixed shapes; omit one of them.")
    # One process for all latency measurements, which starts while the images are read.
    one_process = shared_subprocess() if target.spend == "latency" else nullcontext()
    with _claimed(folder), phases(shares_of_phases(target.spend, effort), log), one_process:
        run = ShrinkRun.of(
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
            (result,) = run.shrunk((target,))
        except TargetMet as met:
            # The kernels of attnrx, or the format, reach the speed alone: nothing has to be removed.
            log(str(met))
            result = run.unchanged(target)
    return result


@checked(**SHARED, folder=PATH, faster=SPEEDS, macs=SHARES, params=SHARES)
@verb
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
    preflight(data=data, columns=columns, folder=folder, plans=True, report=True)
    targets = {f"{kind}-{value:g}": by_value[value] for value in sorted(by_value, reverse=kind != "faster")}
    folder = Path(folder)
    shares = shares_of_phases("latency" if kind == "faster" else kind, effort)
    steps = phases(shares, log, repeated=len(targets), again="searching plans")
    with _claimed(folder):
        with steps, shared_subprocess() if kind == "faster" else nullcontext():
            run = ShrinkRun.of(
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
            made = _made_sizes(folder, run.size_conditions(), targets)
            missing = {name: target for name, target in targets.items() if name not in made}
            for name in missing:
                require_result_folder(folder / name, run.original, onnx=False)
            unneeded = _make_sizes(run, folder, missing, log)
            if len(unneeded) == len(targets):
                *_, met = unneeded.values()
                raise met
        # All sizes are timed in one run, as ratios of separate runs depend on the state of the machine.
        save(run.original, folder / ORIGINAL)
        sizes = run.sizes(
            folder, (ORIGINAL, *dict.fromkeys((*made, *(name for name in targets if name not in unneeded))))
        )
        costs = family_of(run.original).costs(run.original)
        about = {"fingerprint": model_fingerprint(run.original), "macs": costs.macs, "params": costs.params}
        about |= {"effort": effort, "seed": seed}
        elastic_model = Elastic(folder, sizes, {**about, "timing": run.timing_record()})
        elastic_model.write()
        return elastic_model


def _claimed(folder: Path | str | None) -> AbstractContextManager[None]:
    """Locks the folder of a call, so that no other one uses its intermediate results or writes to it."""
    return nullcontext() if folder is None else locked(folder, seconds=0.0)


def _make_sizes(run: ShrinkRun, folder: Path, targets: Mapping[str, Target], log: Log) -> dict[str, TargetMet]:
    """Plans, verifies and saves one size after the other; returns the targets that the original meets.

    An interrupted call continues with the next size.
    """
    missing, unneeded = dict(targets), dict[str, TargetMet]()
    # A generator that has raised is finished: after a target that is met, the loop makes another for the rest.
    while missing:
        try:
            for result in run.shrunk(tuple(missing.values())):
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
