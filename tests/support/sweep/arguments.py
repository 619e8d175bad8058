"""Calls of public functions, methods and classes in which one argument is odd."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import attnrx as rx
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.repair import Repair
from attnrx.data import Augmentation, Columns, Normalization, from_tensors, image_set
from attnrx.decide.diagnostics import DIAGNOSTICS
from attnrx.decide.planning import PlanSettings, Target
from attnrx.decide.rules import RULES, parse_rule
from attnrx.exporting import FORMATS
from attnrx.nouns.elastic import Elastic, Size
from attnrx.nouns.plan import Plan
from attnrx.show.checks import CHECKS
from attnrx.training.losses import LOSSES, parse_loss
from attnrx.vit.costs import Conditions, LatencyProtocol, compare_latencies, compare_latency, compare_memory
from attnrx.vit.tokens import REDUCERS, TokenPolicy
from support.sweep.case import Case, finite
from support.sweep.draws import VALUES, shuffled
from support.sweep.workshop import SIZE, WORKSHOP, small_model

# Arguments about which a message speaks in words of its own: data, rules, names of models.
IN_OTHER_WORDS = {
    "data",
    "images",
    "others",
    "calibration",
    "checks",
    "rules",
    "source",
    "name_or_path",
    "to",
    "limit",
    "text",
    "model",
    "folder",
    "base_model",
    "max_bytes",
    "layers",
    "label_map",
}
Call = Callable[..., Any]
Valid = Callable[[Path], Mapping[str, Any]]


def settings(values: Any) -> Valid:
    return lambda folder: values


def verbs() -> dict[str, tuple[Call, Valid]]:
    """The functions of the package, with valid arguments of each."""
    made = WORKSHOP
    return {
        "accelerate": (rx.accelerate, lambda folder: {"model": made.loaded}),
        "adapt_preprocessing": (rx.adapt_preprocessing, lambda folder: {"splits": made.splits, "model": made.model}),
        "diagnose": (rx.diagnose, lambda folder: {"model": made.model, "data": made.images}),
        "distill": (
            rx.distill,
            lambda folder: {
                "candidate": made.slim, "reference": made.model, "calibration": made.images,
                "settings": Distill(epochs=1, learning_rates=(1e-3,)),
            },
        ),
        "elastic": (
            rx.elastic,
            lambda folder: {"model": made.model, "data": made.images, "folder": folder / "sizes", "macs": (0.6,)},
        ),
        "export": (rx.export, lambda folder: {"model": made.model, "path": folder / "model.pt2", "to": "program"}),
        "load": (rx.load, lambda folder: {"source": made.own_folder}),
        "load_data": (rx.load_data, lambda folder: {"name_or_path": made.data_folder, "image_size": SIZE}),
        "plain": (rx.plain, lambda folder: {"model": rx.accelerate(made.loaded)}),
        "plan": (
            rx.plan,
            lambda folder: {
                "model": made.model, "diagnosis": made.diagnosis, "target": "macs=0.6x", "images": made.images,
                "others": made.others, "settings": PlanSettings.preset("quick", in_subprocess=False),
            },
        ),
        "prescribe": (rx.prescribe, lambda folder: {"diagnosis": made.diagnosis, "rules": "qk=total_rank:0.5"}),
        "push_to_hub": (
            rx.push_to_hub, lambda folder: {"folder": folder / "missing", "repository": "me/slim"},
        ),
        "realize": (rx.realize, lambda folder: {"model": made.model, "prescription": made.prescription}),
        "repair": (
            rx.repair,
            lambda folder: {
                "candidate": made.slim, "reference": made.model, "calibration": made.images,
                "settings": Repair(steps=2),
            },
        ),
        "save": (rx.save, lambda folder: {"model": made.slim, "folder": folder / "saved"}),
        "shrink": (rx.shrink, lambda folder: {"model": made.model, "data": made.images, "macs": 0.6}),
        "train": (
            rx.train,
            lambda folder: {
                "model": small_model(), "data": made.splits, "config": rx.TrainingConfig(epochs=1, batch_size=8),
                "folder": folder / "run",
            },
        ),
        "use_backend": (rx.use_backend, lambda folder: {"model": made.model, "backend": "auto"}),
        "verify": (
            rx.verify,
            lambda folder: {
                "candidate": made.slim, "reference": made.model, "data": made.images, "checks": "costs,fidelity",
            },
        ),
        "write_report": (
            rx.write_report, lambda folder: {"path": folder / "report.html", "prescription": made.prescription},
        ),
    }  # fmt: skip


def others() -> dict[str, tuple[Call, Valid]]:
    """Functions of the subpackages and methods that the reference lists."""
    made, latency = WORKSHOP, LatencyProtocol(rounds=2, warmup=1)
    images = made.images
    pair = {"candidate": made.slim, "reference": made.model, "images": images[:2]}
    pixels = torch.zeros(4, 3, SIZE, SIZE, dtype=torch.uint8)
    content = rx.reports.ReportContent("a", prescription=made.prescription)
    return {
        "Diagnosis.load": (rx.Diagnosis.load, lambda folder: {"path": made.diagnosis_file}),
        "Diagnosis.save": (made.diagnosis.save, lambda folder: {"path": folder / "a.json"}),
        "Diagnosis.require": (made.diagnosis.require, settings({"fingerprint": "0" * 16, "what": "a model"})),
        "LayerDiagnosis.reading": (made.diagnosis.layers[0].reading, settings({"name": "selectivity"})),
        "Prescription.load": (rx.Prescription.load, lambda folder: {"path": made.prescription_file}),
        "Prescription.save": (made.prescription.save, lambda folder: {"path": folder / "a.json"}),
        "Evidence.load": (rx.Evidence.load, lambda folder: {"path": made.evidence_file}),
        "Evidence.save": (made.evidence.save, lambda folder: {"path": folder / "a.json"}),
        "Evidence.of": (made.evidence.of, settings({"check": "accuracy"})),
        "Plan.load": (Plan.load, lambda folder: {"path": made.plan_file}),
        "Plan.save": (made.plan.save, lambda folder: {"folder": folder / "plan"}),
        "Elastic.read": (Elastic.read, lambda folder: {"folder": made.elastic_folder}),
        "Elastic.best": (Elastic.read(made.elastic_folder).best, settings({"quantity": "macs", "limit": 0.9})),
        "PlanSettings.preset": (PlanSettings.preset, settings({"effort": "quick"})),
        "Target.parse": (Target.parse, settings({"text": "macs=0.5x"})),
        "parse_rule": (parse_rule, settings({"text": "top_rank:3"})),
        "parse_rules": (rx.rules.parse_rules, settings({"rules": "qk=top_rank:3"})),
        "parse_policy": (rx.tokens.parse_policy, settings({"text": "evit:0.7@2"})),
        "parse_reducer": (rx.tokens.parse_reducer, settings({"text": "tome"})),
        "parse_checks": (rx.checks.parse_checks, settings({"text": "costs"})),
        "parse_format": (rx.exporting.parse_format, settings({"text": "onnx"})),
        "parse_loss": (parse_loss, settings({"text": "task:0.1"})),
        "from_tensors": (
            from_tensors,
            settings(
                {
                    "name": "a", "pixels": pixels, "labels": torch.zeros(4, dtype=torch.int64),
                    "normalization": Normalization((0.5,) * 3, (0.5,) * 3),
                }
            ),
        ),
        "image_set": (image_set, settings({"data": images})),
        "compare_latency": (compare_latency, settings({**pair, "protocol": latency})),
        "compare_latencies": (
            compare_latencies,
            settings(
                {
                    "candidates": {"a": made.slim}, "reference": made.model, "images": images[:2],
                    "protocol": latency,
                }
            ),
        ),
        "compare_memory": (compare_memory, settings(pair)),
        "build_model": (rx.models.build_model, settings({"name": "svda:digits"})),
        "family_of": (rx.models.family_of, settings({"model": made.model})),
        "model_fingerprint": (rx.models.model_fingerprint, settings({"model": made.model})),
        "render": (rx.reports.render, settings({"content": content})),
        "model_card": (rx.reports.model_card, settings({"facts": {}, "evidence": made.evidence})),
        "score_bound": (
            rx.rules.score_bound,
            settings({"spectrum": made.diagnosis.layers[0].spectrum, "decision": made.prescription.layers[0].qk}),
        ),
        "read_json": (rx.serialization.read_json, lambda folder: {"path": made.evidence_file}),
        "read_tensors": (
            rx.serialization.read_tensors, lambda folder: {"path": made.own_folder / "model.safetensors"},
        ),
        "write_json": (rx.serialization.write_json, lambda folder: {"path": folder / "a.json", "record": {"a": 1}}),
    }  # fmt: skip


def classes() -> dict[str, tuple[Call, Valid]]:
    """Classes whose fields users state."""
    rule, reducer = parse_rule("top_rank:3"), rx.tokens.parse_reducer("class_attention")
    stated: dict[type, dict[str, Any]] = {
        rx.TrainingConfig: {}, Augmentation: {}, Columns: {}, Conditions: {}, Distill: {}, LatencyProtocol: {},
        PlanSettings: {}, Repair: {}, Normalization: {"mean": (0.5,), "std": (0.5,)},
        Target: {"quantity": "macs", "limit": 0.5}, Size: {"name": "a", "macs": 0.5, "params": 0.5, "fingerprint": "0"},
        rx.Finding: {"check": "accuracy", "claim": "top-1", "value": 0.5},
        rx.Reader: {"input_shape": (3, 16, 16)},
        TokenPolicy: {"reducer": reducer, "layers": (2,), "keep": (0.5,)},
        rx.reports.ReportContent: {"title": "a", "prescription": WORKSHOP.prescription},
        rx.Evidence: {"findings": WORKSHOP.evidence.findings, "about": {}},
    }  # fmt: skip
    knobs: dict[str, Any] = {
        "rank": 3, "rho": 0.5, "factor": 1.0, "amount": 0.1, "limit": 0.5, "selectivity": 0.1, "tau": 0.1,
        "rules": (rule, rule), "rule": rule, "scores": reducer, "teacher": str(WORKSHOP.original_folder),
        "label_smoothing": 0.1, "scale": 0.1, "precision": "fp32",
    }  # fmt: skip
    for registry in (CHECKS, RULES, REDUCERS, FORMATS, LOSSES, DIAGNOSTICS):
        for name in registry:
            kind: Any = registry[name]
            required = [each.name for each in dataclasses.fields(kind) if each.init]
            needed = [
                each for each in required if inspect.signature(kind).parameters[each].default is inspect.Parameter.empty
            ]
            if required:
                stated[kind] = {each: knobs[each] for each in needed}
    return {kind.__name__: (kind, settings(values)) for kind, values in stated.items()}


@cache
def calls() -> dict[str, tuple[Call, Valid]]:
    return {**verbs(), **others(), **classes()}


# Verbs that take long where a value is accepted get fewer cases.
SLOW = ("elastic", "export", "plan", "shrink", "train", "distill", "repair")


@cache
def slots() -> tuple[tuple[str, str, str], ...]:
    """Every call, argument and value, in a fixed random order; the calls take turns."""
    by_call = []
    for name, (call, _) in calls().items():
        parameters = inspect.signature(call).parameters.values()
        names = [
            each.name for each in parameters if each.kind is not each.VAR_KEYWORD and not each.name.startswith("_")
        ]
        every = shuffled([(name, argument, value) for argument in names for value in VALUES], name)
        by_call.append(every[: 12 if name in SLOW else None])
    longest = max(map(len, by_call))
    return tuple(every[turn] for turn in range(longest) for every in by_call if turn < len(every))


def draw(number: int, folder: Path) -> Case:
    name, argument, label = slots()[number]
    call, valid = calls()[name]
    value = VALUES[label]()
    given = {**valid(folder), argument: value}
    # A finding may be of what could not be measured.
    law = (lambda made: None) if call is rx.Finding else finite
    shown = str(value)[:1] if isinstance(value, str | Path) else argument
    words = () if argument in IN_OTHER_WORDS else (argument, shown)
    return Case(f"{name}({argument}={label})", lambda: call(**given), law, words)
