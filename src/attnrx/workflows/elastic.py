"""`elastic` makes several sizes of a model in one folder, each for its own budget, and times them together."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from attnrx.data import Columns, ImageData, Splits
from attnrx.data.model_data import ModelBatches
from attnrx.decide.planning.measured_costs import final_protocol, timing_conditions
from attnrx.decide.planning.uniform import require_portable
from attnrx.nouns.effort import PlanSettings
from attnrx.nouns.elastic import INDEX, KIND, ORIGINAL, Elastic, Size
from attnrx.nouns.evidence import Evidence
from attnrx.nouns.plan import TargetMet
from attnrx.nouns.target import Target, target_of
from attnrx.support.arguments import COUNT, FASTER, checked, each, optional, or_percent
from attnrx.support.atomic_writes import file_lock, require_absent
from attnrx.support.errors import InvalidInput, NoOpPrescription
from attnrx.support.progress import Log, no_log, phases
from attnrx.support.storage import file_kind
from attnrx.support.subprocess_runner import shared_subprocess
from attnrx.vit.costs import compare_latencies
from attnrx.vit.models import family_of, model_fingerprint, timed_form
from attnrx.vit.models.boundary.verbs import verb
from attnrx.workflows.load import load, load_original, preflight
from attnrx.workflows.save import save
from attnrx.workflows.shrink import BELOW_ONE, MODEL_OR_NAME, ShrinkRun, phase_shares, portable_settings
from attnrx.workflows.shrunk import require_result_folder

SIZE_NAME = re.compile(r"(faster|macs|params)-[\w.+-]+")  # matches the name of a size's folder
SHARES = each(or_percent(BELOW_ONE), "budgets: shares above 0 and below 1, e.g. (0.8, 0.6) or ('80%', '60%')")
SPEEDS = each(FASTER, "budgets: numbers above 1, e.g. (1.3, 1.6)")


@checked(model=MODEL_OR_NAME, faster=SPEEDS, macs=SHARES, params=SHARES, multiple=optional(COUNT))
@verb
def elastic(  # noqa: PLR0913  (a keyword for every target)
    model: nn.Module | str | Path,
    data: ImageData | Splits | str | Path,
    folder: Path | str,
    *,
    faster: Sequence[float] = (),
    macs: Sequence[float | str] = (),
    params: Sequence[float | str] = (),
    batch: int = 32,
    threads: int | None = None,
    effort: Literal["quick", "normal", "thorough"] = "quick",
    portable: bool = False,
    multiple: int | None = None,
    inputs: Callable[[Any], Any] | None = None,
    weights: str | Path | None = None,
    columns: Columns | None = None,
    seed: int = 0,
    log: Log = no_log,
) -> Elastic:
    """Makes several sizes of a model in one folder, for `load` to choose from.

    `load` returns the best size within a budget: `load(folder, macs=0.65)`, `load(folder, faster=1.4)` or, on the
    command line, `FOLDER@macs=0.65`. Every size is planned, fitted and verified separately, and saved with its evidence
    in its own subfolder. The largest size is the original. All sizes are timed together, and their speeds are relative
    to the original in its own library.

    If a call is interrupted, repeat it. The repeated call continues with the first missing size. To add sizes to the
    folder, call `elastic` again with other budgets. If the original already reaches a requested speed in attnrx's
    kernels, no size is made for this speed.

    Args:
        model: A model, or anything that `load` accepts.
        data: Images in any form that `load_data` or `data.image_set` accepts, or `Splits`.
        folder: The folder to which the sizes are written.
        faster: The speed-ups, e.g. 1.3,1.6,2, relative to your model in eager PyTorch, measured on this machine.
        macs: The shares of the MACs to keep, e.g. 0.8,0.6,0.4.
        params: The shares of the parameters to keep, e.g. 0.8,0.6.
        batch: Images per timed forward pass.
        threads: CPU threads during a timed forward pass (by default torch's number).
        effort: How much to measure: quick, normal or thorough. Normal and thorough also distill sizes (see `shrink`).
        portable: Makes every size a model of the library's own class. The library can load a size's folder without
            attnrx (see `shrink`).
        multiple: The MLP width of a portable size is a multiple of this number, by default 8, or 64 on a GPU.
        inputs: A function that returns your own module's arguments for a batch. `inputs(batch)` returns a tensor, a
            tuple of arguments or a mapping of named arguments. By default, attnrx takes the images from every batch.
        weights: A local file of weights, for a model that you pass by name.
        columns: The names of the columns with the images and the labels, if the data are tables.
        seed: The seed of every random draw.
        log: A function that receives a line for every step.

    Returns:
        The sizes in the folder, with their costs.

    Raises:
        InvalidInput: You did not pass exactly one kind of budget, or the folder has sizes that were made from another
            original, with other data or with other settings.
        NoOpPrescription: The original meets every budget.
        NotSupported: No plan reaches a budget.

    Examples:
        >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=10)
        >>> sizes = rx.elastic(vit, torch.randn(96, 3, 32, 32), "sizes", macs=(0.8, 0.6))
        >>> model = rx.load("sizes", macs=0.7)  # the size for 0.6
    """
    kinds = {"faster": faster, "macs": macs, "params": params}
    given = {name: tuple(values) for name, values in kinds.items() if values}
    if len(given) != 1:
        raise InvalidInput(
            f"{' and '.join(given) or 'no budgets'} given: give one of faster=(1.3, 1.6), macs=(0.8, 0.6) or params=..."
        )
    ((kind, values),) = given.items()
    # Sizes are made from the largest to the smallest, so shares are in descending order, and speeds in ascending order.
    ordered = sorted(map(float, {*values}), reverse=kind != "faster")
    targets = {f"{kind}-{value:g}": target_of(**{kind: value}) for value in ordered}
    portability = portable_settings(portable, multiple)
    preflight(data=data, columns=columns, folder=folder, report=True)
    folder = Path(folder)
    shares = phase_shares("latency" if kind == "faster" else kind, effort, portable)
    steps = phases(shares, log, repeated=len(targets), again="searching plans")
    with file_lock(folder, seconds=0.0):
        with steps, shared_subprocess() if kind == "faster" else nullcontext():
            data = ModelBatches.of(data, inputs)
            original = load_original(model, weights, data)
            # An error is raised if a user's file would be overwritten, or if `load` would no longer find a saved model.
            require_absent([folder / INDEX], lambda path: file_kind(path) == KIND)
            if (folder / "config.json").exists():
                raise InvalidInput(
                    f"{folder} has a model, which `load` would not find beside sizes; choose another folder."
                )
            conditions = replace(timing_conditions(original, threads, batch, log=log), plain=portable)
            sizes_of = {"portable": portable, **portability}
            settings = PlanSettings.preset(effort, batch=batch, conditions=conditions, seed=seed, log=log, **sizes_of)
            if portable:
                require_portable(original, settings)
            run = ShrinkRun.start(original, data, columns, effort, settings)
            stored = _stored_sizes(folder, run, targets)
            missing = {name: target for name, target in targets.items() if name not in stored}
            for name in missing:
                require_result_folder(folder / name, original, files={})
            unneeded = dict[str, TargetMet]()
            # If the call is interrupted, the next call continues with the next size.
            for name, target in missing.items():
                result = run.result(target)
                if isinstance(result, TargetMet):  # the original meets the target, and it is a size already
                    log(f"{name}: {result.reason}")
                    unneeded[name] = result
                    continue
                result.save(folder / name, onnx=False)
                log(f"{name}: {result.summary()}")
            if len(unneeded) == len(targets):
                raise NoOpPrescription(list(unneeded.values())[-1].reason)
        original = run.original  # adapted to the size of the images
        # All sizes are timed in one run, because ratios of separate runs depend on the state of the machine.
        save(original, folder / ORIGINAL, portable=portable)
        names = (ORIGINAL, *dict.fromkeys((*stored, *(name for name in targets if name not in unneeded))))
        costs = family_of(original).costs(original)
        about = {
            "fingerprint": model_fingerprint(original),
            "macs": costs.macs,
            "params": costs.params,
            "effort": effort,
            "seed": seed,
            "timing": {"batch": batch, "threads": threads, "hardware": conditions.hardware},
        }
        Elastic(folder, _measured_sizes(run, folder, names), about).write()
        return Elastic.read(folder)


def _stored_sizes(folder: Path, run: ShrinkRun, targets: Mapping[str, Target]) -> list[str]:
    """Returns the names of all sizes in a folder, including sizes for other budgets.

    Raises:
        InvalidInput: A size was made under other conditions, e.g. from another original or on other data.
    """
    conditions: dict[str, Any] = {
        "reference": model_fingerprint(run.original),
        "data": run.images.verified.fingerprint,
        "seed": run.settings.seed,
        "portable": None,  # evidence of sizes that are not portable has no such field
        **run.about,
    }
    # A size is saved atomically with its evidence, so its folder is either complete or absent.
    paths = [path for path in sorted(folder.glob("*/evidence.json")) if SIZE_NAME.fullmatch(path.parent.name)]
    for path in paths:
        name, expected = path.parent.name, dict(conditions)
        if name in targets:
            expected["target"] = str(targets[name])
        if not name.startswith("faster"):  # only a speed depends on the batch
            del expected["batch"]
        stored = Evidence.load(path).about
        for key, value in expected.items():
            if stored.get(key) != value:
                raise InvalidInput(
                    f"{path.parent} was made with {key} {stored.get(key)}, not {value}; choose another folder."
                )
    return [path.parent.name for path in paths]


def _measured_sizes(run: ShrinkRun, folder: Path, names: Sequence[str]) -> tuple[Size, ...]:
    """Returns the stored sizes with their costs. One run times all sizes in turns."""
    models = {name: load(folder / name) for name in names}
    family = family_of(run.original)
    original, reference = family.costs(run.original), family.library_model(run.original)
    protocol = replace(final_protocol(run.settings.conditions, run.settings.batch, run.original), processes=1)
    timed = {name: timed_form(model, not protocol.conditions.plain) for name, model in models.items()}
    speeds = compare_latencies(timed, reference, run.settings.noise(run.original), protocol)
    measured = []
    for name, model in models.items():
        costs, path, fingerprint = family_of(model).costs(model), folder / name, model_fingerprint(model)
        findings = ()
        if (path / "evidence.json").exists():
            evidence = Evidence.load(path / "evidence.json")
            evidence.require(fingerprint, str(path))
            findings = evidence.findings
        divergence = next((one.value for one in findings if one.details.get("quantity") == "divergence"), None)
        shares, latency = (costs.macs / original.macs, costs.params / original.params), 1 / speeds[name].faster.value
        measured.append(Size(name, *shares, fingerprint, latency, divergence))
    # Sizes are sorted from the largest to the smallest, even if they were made for different kinds of budgets.
    return tuple(sorted(measured, key=lambda size: size.macs, reverse=True))
