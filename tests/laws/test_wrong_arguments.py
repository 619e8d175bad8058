"""Every public function and settings class refuses arguments of a wrong type, and values that mean nothing, by name."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.change.realization.distillation import Distill
from attnrx.change.realization.repair import Repair
from attnrx.data import Augmentation, Columns
from attnrx.data.model_data import splits_for
from attnrx.decide.diagnostics import DIAGNOSTICS
from attnrx.decide.planning import PlanSettings, Target
from attnrx.show.checks import Accuracy, Calibration, Costs, Features, Fidelity, Latency, Promises
from attnrx.support.errors import AttnrxError, InvalidInput, UserCodeError
from attnrx.vit.costs import Conditions, LatencyProtocol
from attnrx_lab.vision_transformer import VisionTransformer, ViTConfig, initialize_
from support.pretrained import VIT, of_timm
from support.time_limits import time_limit
from support.wrong_arguments import Case, of_class, of_function

SECONDS = 20  # of one call
FUNCTIONS = tuple(name for name in rx.__all__ if inspect.isfunction(getattr(rx, name)))
# Arguments that the function itself validates: data, rules and sources of models, which have many forms.
OWN_VALIDATION = {
    "data",
    "images",
    "others",
    "calibration",
    "checks",
    "rules",
    "source",
    "name_or_path",
    "to",
    "template",
}


@pytest.fixture(autouse=True)
def as_for_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No type checks of arguments, which users do not have either, and a cache of the test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_default_dtype(default)
    jaxtyping.config.update("jaxtyping_disable", False)


def small_model() -> nn.Module:
    config = ViTConfig.uniform(
        "dense", width=16, depth=2, heads=2, image_size=16, patch_size=4, channels=3, classes=3, mlp_ratio=2.0
    )
    return initialize_(VisionTransformer(config), seed=0).float().eval()


def valid_arguments(folder: Path) -> dict[str, dict[str, Any]]:
    """Valid arguments of every public function."""
    model = small_model()
    images, labels = torch.randn(12, 3, 16, 16), torch.arange(12) % 3
    diagnosis = rx.diagnose(model, images)
    prescription = rx.prescribe(diagnosis, "qk=total_rank:0.5")
    slim = rx.realize(model, prescription)
    named = {"splits": splits_for(model, {"train": (images, labels), "validation": (images, labels)})}
    pair, on_images = {"candidate": slim, "reference": model}, {"model": model, "data": images}
    loaded = rx.load(of_timm(VIT))
    return {
        "accelerate": {"model": loaded},
        "adapt_preprocessing": {**named, "model": model},
        "diagnose": on_images,
        "distill": {**pair, "calibration": images},
        "elastic": {**on_images, "folder": folder / "elastic", "macs": (0.5,)},
        "export": {"model": model, "path": folder / "model.pt2", "to": "program"},
        "figures": {"source": diagnosis, "folder": folder / "figures", "formats": ("csv",)},
        "load": {"source": model},
        "load_data": {"name_or_path": str(folder / "missing")},
        "plain": {"model": rx.accelerate(loaded)},
        "plan": {"model": model, "diagnosis": diagnosis, "target": "macs=0.5x", "images": images, "others": images},
        "prescribe": {"diagnosis": diagnosis, "rules": "qk=total_rank:0.5"},
        "push_to_hub": {"folder": folder / "missing", "repository": "me/slim"},
        "realize": {"model": model, "prescription": prescription},
        "repair": {**pair, "calibration": images},
        "save": {"model": model, "folder": folder / "saved"},
        "shrink": {**on_images, "macs": 0.5},
        "train": {
            "model": model,
            "data": named["splits"],
            "config": rx.TrainingConfig(epochs=1, batch_size=4),
            "folder": folder / "run",
        },
        "use_backend": {"model": model, "backend": "auto"},
        "verify": {**pair, "data": images},
        "write_report": {"path": folder / "report.html", "prescription": prescription},
    }


SETTINGS: Mapping[type, Mapping[str, Any]] = {
    rx.TrainingConfig: {},
    Augmentation: {},
    Columns: {},
    Conditions: {},
    Distill: {},
    LatencyProtocol: {},
    PlanSettings: {},
    Repair: {},
    Target: {"quantity": "macs", "limit": 0.5},
    **{check: {} for check in (Accuracy, Calibration, Costs, Features, Fidelity, Latency, Promises)},
    **{diagnostic: {} for diagnostic in DIAGNOSTICS.values()},
}


def faults(cases: Iterator[Case]) -> tuple[int, list[str]]:
    """Returns the number of cases, and those that were accepted, hung, or ended in another error."""
    count, found = 0, list[str]()
    for case in cases:
        count += 1
        try:
            with time_limit(SECONDS):
                case.call()
        except AttnrxError as error:
            # Named by the argument, unless the function has a message of its own.
            if case.argument not in OWN_VALIDATION and case.argument not in str(error):
                found.append(f"{case}: does not name the argument: {error}"[:300])
        except Exception as error:
            found.append(f"{case}: {type(error).__name__}: {error}"[:300])
        else:
            found.append(f"{case}: accepted")
    return count, found


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    arguments = valid_arguments(tmp_path_factory.mktemp("valid"))
    torch.set_default_dtype(default)
    return arguments


def test_every_function_states_the_kind_of_every_argument() -> None:
    for name in FUNCTIONS:
        function = getattr(rx, name)
        parameters = inspect.signature(function).parameters.values()
        stated = getattr(function, "kinds", {})
        assert not {each.name for each in parameters if each.kind is not each.VAR_KEYWORD} - stated.keys(), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_refuses_wrong_arguments(name: str, valid: dict[str, dict[str, Any]]) -> None:
    # Data of any class are accepted by annotation; those that hold no images are the subject of the tests of data.
    free: dict[str, Any] = dict.fromkeys(("data", "images", "others", "calibration"), torch.Tensor)
    free |= {"calibration": torch.Tensor | None} if name in ("realize", "export") else {}
    count, found = faults(of_function(getattr(rx, name), valid[name], free))
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_settings_refuse_wrong_values(kind: type) -> None:
    count, found = faults(of_class(kind, SETTINGS[kind], {}))
    assert not found, f"{len(found)} of {count}:\n" + "\n".join(found)


def test_an_error_of_a_log_callback_names_it_and_is_the_cause() -> None:
    def log(line: str) -> None:
        raise ValueError("no disk")

    with pytest.raises(UserCodeError, match=r"log of shrink.*raised ValueError: no disk") as caught:
        rx.shrink("svda:digits", torch.zeros(2, 1, 28, 28), macs=0.5, log=log)
    assert isinstance(caught.value.__cause__, ValueError)


def test_integers_of_numpy_are_whole_numbers() -> None:
    import numpy as np

    assert type(Repair(steps=np.int64(3)).steps) is int  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="steps=True"):
        Repair(steps=True)
