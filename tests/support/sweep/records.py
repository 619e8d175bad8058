"""Edited fields of every kind of JSON file that attnrx reads: it is refused by its name, or read and used."""

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attnrx as rx
from attnrx.cli.options import _label_map
from attnrx.exporting import load_exported
from attnrx.nouns.elastic import Elastic
from attnrx.nouns.plan import Plan
from attnrx.support.seals import SEAL, sealed
from support import tiny_runs
from support.sweep.case import Case, finite
from support.sweep.draws import generator, shuffled
from support.sweep.workshop import WORKSHOP

HUGE, DEEP = 10**30, 300
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 10**6, 2**31, 2**63, HUGE, -HUGE, 0.5, -0.5, 1e-300, 1e308, -1e308, 1.0, "", "a",
    "../a", "/etc/passwd", "\ud800", "\x00", "x" * 10_000, "%s{0}", "<script>", "1", "nan", "cuda", [], [[]], [None],
    [1, 2, 3], ["a"], [[]] * 50, {}, {"a": 1}, {"type": "int"}, {"tuple": []}, {"type": []}, {"": None},
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
ACTIONS = ("replace", "remove", "add", "twice", "double", "nest", "rename", "nudge")


@dataclass(frozen=True)
class Kind:
    """A JSON file: the folder that is copied for a case, its path in it, and what reads and uses it."""

    folder: Callable[[], Path]
    path: str
    use: Callable[[Path], Any]
    law: Callable[[Any], str | None] = finite


class Resumed(BaseException):
    """Ends a run that has read its checkpoint."""


def _ending(line: str) -> None:
    raise Resumed


def _resumed(folder: Path) -> None:
    try:
        tiny_runs.run(folder, log=_ending)
    except Resumed:
        return


def _realized(path: Path) -> Any:
    """A prescription, and the model that it gives."""
    prescription = rx.Prescription.load(path)
    return prescription, rx.realize(WORKSHOP.model, prescription)(WORKSHOP.images[:2])


def _prescribed(path: Path) -> Any:
    diagnosis = rx.Diagnosis.load(path)
    return diagnosis, rx.prescribe(diagnosis, "qk=total_rank:0.5 vo=total_rank:0.5")


def _loaded(path: Path) -> Any:
    model = rx.load(path.parent)
    images = torch.zeros(2, *rx.models.family_of(model).input_shape(model))
    return model, model(images)


def _shown(path: Path) -> Any:
    evidence = rx.Evidence.load(path)
    return evidence, len(rx.reports.render(rx.reports.ReportContent("a", evidence=evidence)))


@cache
def kinds() -> dict[str, Kind]:
    made = WORKSHOP
    return {
        "prescription": Kind(lambda: made.prescription_file.parent, "prescription.json", _realized),
        "diagnosis": Kind(lambda: made.diagnosis_file.parent, "diagnosis.json", _prescribed),
        "evidence": Kind(lambda: made.evidence_file.parent, "evidence.json", _shown),
        "plan": Kind(lambda: made.plan_file.parent, "plan.json", lambda path: Plan.load(path).to_record()),
        "elastic": Kind(lambda: made.elastic_folder, "elastic.json", lambda path: rx.load(path.parent, macs=0.9)),
        "sizes": Kind(lambda: made.elastic_folder, "elastic.json", lambda path: Elastic.read(path.parent)),
        "own model": Kind(lambda: made.own_folder, "config.json", _loaded),
        "timm model": Kind(lambda: made.timm_folder, "config.json", _loaded),
        "portable model": Kind(lambda: made.portable_folder, "attnrx.json", _loaded),
        "its configuration": Kind(lambda: made.portable_folder, "config.json", _loaded),
        "beside a model": Kind(
            lambda: made.own_folder,
            "prescription.json",
            lambda path: rx.verify(path.parent, made.model, made.images, "costs,fidelity"),
        ),
        "export": Kind(
            lambda: made.export_file.parent, "model.onnx.json", lambda path: load_exported(path.with_suffix(""))
        ),
        "run": Kind(lambda: made.run_folder, "training.json", lambda path: tiny_runs.run(path.parent)),
        "checkpoint": Kind(
            lambda: made.stopped_folder, "checkpoints/step-00000004/state.json", lambda path: _resumed(path.parents[2])
        ),
        "class map": Kind(lambda: _class_map_folder(), "map.json", _mapped),
    }


def _class_map_folder() -> Path:
    folder = WORKSHOP.root / "map"
    folder.mkdir(exist_ok=True)
    (folder / "map.json").write_text(json.dumps({"cat": 0, "dog": 1, "eel": 2}))
    return folder


def _mapped(path: Path) -> Any:
    splits = rx.load_data(WORKSHOP.data_folder, image_size=16)
    adapted = rx.adapt_preprocessing(splits, WORKSHOP.model, _label_map(str(path)))
    return [batch.labels for batch in adapted.test.batches(8)], adapted.class_names


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a record, at most two of every list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*path, key))


def edited(record: Any, path: tuple[Any, ...], action: str, random: random.Random) -> Any:
    """A copy of a record with one edit at a path; a duplicate key becomes one in the text (`text_of`)."""
    changed = copy.deepcopy(record)
    *parents, last = path
    inside = changed
    for key in parents:
        inside = inside[key]
    value = inside[last]
    if action == "remove":
        del inside[last]
    elif action == "add" and isinstance(inside, dict):
        inside[random.choice(("colour", "type", "", "kind", "x" * 300))] = random.choice(VALUES)
    elif action == "double" and isinstance(inside, list):
        inside.insert(0, copy.deepcopy(value))
    elif action == "double" and isinstance(value, list):
        inside[last] = value * 2
    elif action == "nest":
        for _ in range(random.choice((1, 1, DEEP))):
            value = random.choice(([value], {"a": value}))
        inside[last] = value
    elif action == "rename" and isinstance(last, str):
        inside[last.upper()] = inside.pop(last)
    elif action == "nudge" and isinstance(value, int | float) and not isinstance(value, bool):
        inside[last] = random.choice((value + 1, -value - 1, value * 1000, float(value), str(value)))
    else:
        inside[last] = random.choice(VALUES)
    return changed


def text_of(record: Any, path: tuple[Any, ...], action: str) -> str:
    """The text of a record; with the action `twice` it states the last key of a path twice, with null at first."""
    if action != "twice" or not isinstance(path[-1], str):
        return json.dumps(record)
    changed = copy.deepcopy(record)
    inside = changed
    for key in path[:-1]:
        inside = inside[key]
    entries = {"\0 first": None, **inside}
    inside.clear()
    inside.update(entries)
    return json.dumps(changed).replace('"\\u0000 first"', json.dumps(path[-1]), 1)


@cache
def slots() -> tuple[tuple[str, tuple[Any, ...], str], ...]:
    """Every kind, path and action, in a fixed random order; the kinds take turns."""
    by_kind = []
    for name, kind in kinds().items():
        record = json.loads((kind.folder() / kind.path).read_text())
        every = [(name, path, action) for path in places(record) if path for action in ACTIONS]
        by_kind.append(shuffled(every, name))
    longest = max(map(len, by_kind))
    return tuple(every[turn] for turn in range(longest) for every in by_kind if turn < len(every))


def draw(number: int, folder: Path) -> Case:
    name, path, action = slots()[number]
    kind, random = kinds()[name], generator("records", number)
    place = folder / "files"
    shutil.copytree(kind.folder(), place)
    file = place / kind.path
    record = json.loads(file.read_text())
    changed = record if action == "twice" else edited(record, path, action, random)
    # As somebody who knows the seal would write it, in every second case; a duplicate key has the right seal.
    if SEAL in record and action != "twice" and random.random() < 0.7:
        changed = sealed({key: value for key, value in changed.items() if key != SEAL})
    file.write_text(text_of(changed, path, action))
    where = ".".join(map(str, path))
    words = () if kind.path.endswith("state.json") else (file.name, str(place), "label map")
    return Case(f"{name}: {action} {where}", lambda: kind.use(file), kind.law, words)
