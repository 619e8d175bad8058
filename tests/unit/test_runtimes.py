"""The table of runtimes: the planner keeps to its rows, every format has one, and the page shows them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.decide.planning import PlanSettings
from attnrx.decide.planning.allocation import Frontier
from attnrx.decide.planning.cost_table import exact_cost_table
from attnrx.decide.planning.planner import varied
from attnrx.decide.planning.sensitivity import Sensitivities
from attnrx.decide.planning.space import Choices, Space, runtime_of
from attnrx.decide.planning.uniform import UniformSpace
from attnrx.exporting import FORMATS, OpenVINO, parse_format
from attnrx.nouns.effort import RANKS
from attnrx.nouns.runtime import RUNTIMES, STOCK, Runtime
from attnrx.nouns.target import Target
from attnrx.vit.costs import Conditions
from attnrx_lab.vision_transformer import ViTConfig
from support import cases

# Six layers, heads of 64 directions, 512 hidden units and 36 patches: more stages, ranks and widths than a row has.
CONFIG = ViTConfig.uniform("dense", width=128, depth=6, heads=2, **{**cases.TINY, "image_size": 24, "mlp_ratio": 4.0})
STATED = {name: runtime.named_by for name, runtime in RUNTIMES.items() if runtime.axes != STOCK}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return cases.model(CONFIG)


@pytest.fixture(scope="module")
def diagnosis(model: nn.Module) -> rx.Diagnosis:
    return rx.diagnose(model, cases.pixels(CONFIG, 12), moments=True)


def settings_of(name: str, monkeypatch: pytest.MonkeyPatch) -> PlanSettings:
    monkeypatch.setattr(Conditions, "on_cuda", name == "cuda")  # "cuda" is refused where there is none
    to = RUNTIMES[name].named_by.removeprefix("to=").strip("'") if "to=" in RUNTIMES[name].named_by else None
    return PlanSettings(to=to)


def random_sensitivities(space: Space, seed: int) -> Sensitivities:
    """Returns sensitivities that grow with what goes, and for which many small stages are better than few."""
    random = np.random.default_rng(seed)
    shape = (space.depth, len(space.levels) - 1)
    ranks = {axis: np.pad(random.exponential(size=shape).cumsum(1), ((0, 0), (1, 0))) for axis in RANKS}
    counts = np.log(np.array([1.0, 8.0, 32.0]))
    return Sensitivities(ranks, counts, 2 * counts + random.normal(size=(space.depth, 1)))


@pytest.mark.parametrize("name", STATED)
def test_plans_keep_to_the_row_of_their_runtime(
    name: str, model: nn.Module, diagnosis: rx.Diagnosis, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, settings = RUNTIMES[name], settings_of(name, monkeypatch)
    assert runtime_of(model, settings) is runtime
    space = Space.of(model, diagnosis, Target.parse("faster=1.3"), settings)
    assert space.axes == runtime.axes
    frontier = Frontier(space, exact_cost_table(space, "macs"), random_sensitivities(space, 0))
    limits, random = (0.85, 0.6, 0.4), np.random.default_rng(0)
    plans = [frontier.at(limit).choices for limit in limits]
    plans += [varied(space, choices, random) for choices in plans for _ in range(4)]
    plans += [frontier.near(0.6, start).choices for start in (Choices.nothing(6), *space.even_schedules()[:2])]
    plans += frontier.few_stages(0.8, 2)
    most = max(sum(map(bool, choices.num_pruned)) for choices in (*plans, *space.even_schedules()))
    assert most == (runtime.most_stages or 5)
    for choices in plans:
        require_kept(runtime, space.prescription(choices))


def require_kept(runtime: Runtime, prescription: rx.Prescription) -> None:
    """Asserts that the ranks and widths of a prescription are those of a row."""
    for layer in prescription.layers:
        ranks = (layer.qk.ranks, *(decision.ranks for name, decision in layer.outputs.items() if name == "vo"))
        for per_head in ranks:
            assert all(rank % runtime.rank_step(64) == 0 for rank in per_head)
            assert not runtime.equal_heads or len({*per_head}) == 1
        if layer.hidden is not None:
            assert int(layer.hidden.keep.sum()) % runtime.width_step(512) == 0


def test_free_plans_have_what_other_rows_forbid(model: nn.Module, diagnosis: rx.Diagnosis) -> None:
    """A row that forbids it is then no accident: on a CPU heads differ, and ranks have no steps without a latency."""
    space = Space.of(model, diagnosis, Target.parse("macs=0.6x"), PlanSettings())
    layers = space.prescription(space.uniform("qk", 3)).layers
    assert any(len({*layer.qk.ranks}) > 1 and layer.qk.ranks[0] % 8 for layer in layers)


@pytest.mark.parametrize("name", RUNTIMES)
def test_portable_widths_are_multiples_of_the_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    runtime = RUNTIMES[name]
    if runtime.axes == STOCK:
        (stated,) = (int(word.removeprefix("multiple=")) for word in runtime.named_by.split(", ")[1:])
        assert stated == runtime.width_multiple
        settings = PlanSettings(portable=True, multiple=stated)
    else:
        settings = replace(settings_of(name, monkeypatch), portable=True)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=96, depth=1)
    model = rx.load(vit)
    diagnosis = rx.diagnose(model, torch.randn(8, 3, 16, 16), moments=True)
    space = UniformSpace.of_class(model, diagnosis, settings)
    assert space.widths[1:] and all(width % runtime.width_multiple == 0 for width in space.widths[1:])


def test_every_format_has_a_row() -> None:
    forms = [parse_format(name) for name in FORMATS]
    forms += [OpenVINO(precision=precision) for precision in ("bf16", "int8")]
    assert {form.place for form in forms} == {*RUNTIMES} - {"cuda", "tensorrt", "coreml", "npu"}


def test_the_page_of_every_row_is_there() -> None:
    docs = Path(__file__).parents[2] / "docs"
    for runtime in RUNTIMES.values():
        page = docs / runtime.page.partition("#")[0]
        assert page.exists() or page.with_suffix(".py").exists(), runtime.page
