"""Measures portable models: the price of one MLP width for all layers, its speed, and reloading without attnrx.

    python benchmarks/portable.py price MODEL --data DATA [--params 0.6] [--weights W] [--label-column L] ...
    python benchmarks/portable.py speed [--model timm:vit_tiny_patch16_224] [--threads 1]
    python benchmarks/portable.py reload [--classes 28] [--tags 100] [--seed 0]

`price` shrinks a model twice to the same number of parameters, as a portable model and with a width per layer. It
compares the divergences of both on the same test images. `speed` removes half of the hidden units, loads the folder
with only timm, and times it in turns with the original, eager and compiled. `reload` draws transformers classes and
timm weight files that have attention. It makes a small model of each with random weights, and saves it with half of the
hidden units. Then it loads and runs the folder in a process that cannot import attnrx. The folder --out stores models
and results, so an interrupted run resumes.
"""

import argparse
import importlib
import inspect
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attnrx as rx
from attnrx.cli.options import add_data, add_model, model_argument, splits_argument
from attnrx.decide.planning.uniform import Sizes, UniformSpace, middle_first, portable_form
from attnrx.nouns.target import Target
from attnrx.show.checks import Comparison
from attnrx.show.checks.statistics import mean_estimate, studentized
from attnrx.support.errors import AttnrxError
from attnrx.support.estimate import Estimate
from attnrx.support.modules import tensors_of
from attnrx.support.storage import read_json, write_json
from attnrx.support.tables import markdown_table
from attnrx.vit.costs.measured import interleave, ratio_of
from attnrx.vit.models import LIBRARIES, family_of, hidden_units, working_copy
from attnrx.vit.models.boundary.working_copy import answer, library_form
from attnrx.vit.outputs import output_kind_of
from attnrx.workflows.shrink import ShrinkRun

ROUNDS = {1: 60, 32: 12}  # the rounds of a timing, by batch size


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Price ----------------------------------------------------------------------------------------------------------------


def portable_model(model: nn.Module, splits: rx.data.Splits, options: argparse.Namespace) -> nn.Module:
    """Returns the portable model. It is loaded from the folder, or made and saved there."""
    folder = options.out / "portable"
    if not folder.is_dir():
        about = {"effort": options.effort, "seed": options.seed, "log": log}
        rx.shrink(model, splits, params=options.params, portable=True, **about).save(folder, onnx=False)
    return rx.load(folder)


def free_model(model: nn.Module, splits: rx.data.Splits, params: float, options: argparse.Namespace) -> nn.Module:
    """Returns the model with one MLP width per layer and a share `params` of the parameters. The folder caches it."""
    folder = options.out / "free"
    if not folder.is_dir():
        settings = rx.planning.PlanSettings.preset(options.effort, axes=("mlp",), seed=options.seed, log=log)
        found = ShrinkRun.start(model, splits, None, options.effort, settings).result(Target("params", params))
        assert isinstance(found, rx.Shrunk)
        found.save(folder, onnx=False)
    return rx.load(folder)


def price(options: argparse.Namespace) -> None:
    """Prints the parameters of both models, and how much their outputs on the test images change."""
    options.out.mkdir(parents=True, exist_ok=True)
    model = model_argument(options.model, "cpu", options.weights, options.trust).eval()
    splits = splits_argument(model, options)
    shape = next(iter(splits.test.take(1).batches(1))).images.shape[1:]
    if tuple(shape) != tuple(family_of(model).input_shape(model)):
        model = rx.load(model, image_size=(shape[1], shape[2]))
    total = family_of(model).costs(model).params
    candidates = {"portable": portable_model(model, splits, options)}
    # The budget is exactly the portable model's number of parameters.
    share = family_of(candidates["portable"]).costs(candidates["portable"]).params / total
    candidates["free"] = free_model(model, splits, share + 1e-9, options)
    images, rows = splits.test.take(min(options.images, len(splits.test))), []
    divergences: dict[str, torch.Tensor] = {}
    for name, candidate in candidates.items():
        found = Comparison(candidate, model, images, batch_size=32).predictions
        divergences[name] = found.divergence("reference", "candidate")
        agreement = 100 * float(found.agreement("reference", "candidate").double().mean())
        units, heads = hidden_units(family_of(candidate).mlp(candidate)), family_of(candidate).specs(candidate)
        widths = f"{min(units)} to {max(units)}" if len({*units}) > 1 else str(units[0])
        costs = f"{100 * family_of(candidate).costs(candidate).params / total:.1f} %"
        kept = sum(len(spec.heads) for spec in heads)
        divergence = _shown(mean_estimate(divergences[name], options.seed), 4)
        rows.append([name, widths, str(kept), costs, f"{agreement:.1f} %", divergence])
    distance = output_kind_of(model).distance
    print(markdown_table(["model", "hidden units", "heads", "parameters", "decisions unchanged", distance], rows))
    both = torch.stack([divergences["portable"], divergences["free"]], dim=1)
    ratio = studentized(both, lambda means: means[..., 0] / means[..., 1], options.seed)
    print(f"\nportable / free: {_shown(ratio, 2)} ({len(images)} test images, effort {options.effort})")


def _shown(value: Estimate, digits: int) -> str:
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


# Reload ---------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 96, "num_heads": 3}
# The process runs without attnrx. It loads every folder with the code on its model card, and calls it like the
# library's model.
CHILD = """
import json, re, sys, warnings
from pathlib import Path
sys.modules["attnrx"] = None
warnings.simplefilter("ignore")
import torch

def tensors(output):
    values = [output] if isinstance(output, torch.Tensor) else getattr(output, "values", lambda: output)()
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]

for folder in map(Path, sys.argv[1:]):
    try:
        code = re.search(r"```python\\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
        names = {}
        exec(code.replace("path/to/this/folder", str(folder)), names)
        arguments, named, expected = torch.load(folder / "call.pt", weights_only=True)
        torch.manual_seed(0)  # MAE orders the patches at random
        with torch.no_grad():
            found = tensors(names["model"].eval()(*arguments, **named))
        is_equal = len(found) == len(expected) and all(map(torch.equal, found, expected))
        outcome = EQUAL if is_equal else "the outputs differ"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps([folder.name, outcome]), flush=True)
"""
EQUAL = "reloads with difference 0"


def reload(options: argparse.Namespace) -> None:
    """Prints how many models load without attnrx and return the same outputs, and why the others do not."""
    options.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(options.seed)
    for library, names in (("transformers", classes(options.classes, draw)), ("timm", tags(options.tags, draw))):
        record = options.out / f"reload-{library}-{options.seed}.json"
        found: dict[str, str] = read_json(record) if record.exists() else {}
        for name in names:
            if name not in found:
                found[name] = saved(library, name, options.out / f"{library}-{name}")
                log(f"{name}: {found[name] or 'saved'}")
                write_json(record, found)
        waiting = [str(options.out / f"{library}-{name}") for name in names if not found[name]]
        if waiting:
            words = [sys.executable, "-c", f"EQUAL = {EQUAL!r}\n{CHILD}", *waiting]
            lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
            outcomes = dict(json.loads(line) for line in lines if line.startswith("["))
            found |= {name: outcomes[f"{library}-{name}"] for name in names if not found[name]}
            write_json(record, found)
        counts = Counter(re.sub(r"the class \w+ has", "the class has", found[name]) for name in names)
        print(f"\n{library}: {counts[EQUAL]} of {len(names)}\n")
        print(markdown_table(["outcome", "models"], [[reason, str(n)] for reason, n in counts.most_common()]))


def classes(count: int, draw: random.Random) -> list[str]:
    """Returns transformers classes that attnrx reads."""
    from attnrx.vit.models.libraries.huggingface_family import MAPS, READERS

    names = sorted(name for name, reader in READERS.items() if reader.answer != MAPS)
    return draw.sample(names, min(count, len(names)))


def tags(count: int, draw: random.Random) -> list[str]:
    """Returns timm weight files whose architecture has attention."""
    import timm

    modules = {module for module in timm.list_modules() if "Attention" in source_of(f"timm.models.{module}")}
    names = {name for module in modules for name in timm.list_models(module=module)}
    drawn, found = [name for name in timm.list_models(pretrained=True) if name.partition(".")[0] in names], []
    draw.shuffle(drawn)
    for name in drawn:
        with torch.device("meta"):
            model = timm.create_model(name)
        if any("Att" in type(part).__name__ for part in model.modules()):
            found.append(name)
        if len(found) == count:
            break
    return found


def source_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def saved(library: str, name: str, folder: Path) -> str:
    """Saves a portable model, and next to it a call with its outputs. Returns "", or the reason if this fails."""
    torch.manual_seed(0)
    try:
        model = rx.load(small_timm(name) if library == "timm" else small_transformers(name))
        images = rx.data.image_set(torch.randn(8, *family_of(model).input_shape(model)))
        portable = narrower(model, images)
        rx.save(portable, folder, portable=True)
        calls: list[tuple[Any, Any]] = []
        hook = portable.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        with torch.no_grad():
            answer(portable.eval(), next(iter(images.take(2).batches(2))).images)
            hook.remove()
            arguments, named = calls[0]
            torch.manual_seed(0)
            outputs = [*tensors_of(portable(*arguments, **named)).values()]
            torch.save((arguments, named, outputs), folder / "call.pt")
    except AttnrxError as error:
        return f"refused: {str(error).partition(': ')[2] or error}".partition(". ")[0]
    except Exception as error:  # libraries raise errors of any type for sizes that do not fit
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def narrower(model: nn.Module, images: rx.data.ImageSet) -> nn.Module:
    """Returns the library's own model with about half of the hidden units."""
    settings = rx.planning.PlanSettings(portable=True)
    space = UniformSpace.of_class(model, rx.diagnose(model, images, moments=True), settings)
    heads, widths = space.stock.heads, middle_first(space.widths[1:])
    width = next(width for width in widths if space.stock.arguments(width, heads) is not None)
    realized = working_copy(rx.realize(model, space.prescription(Sizes(width, heads))))
    return library_form(portable_form(realized, model, images))


def small_timm(name: str) -> nn.Module:
    """Returns a timm model with two narrow layers and random weights."""
    import timm

    with torch.device("meta"):
        LIBRARIES["timm"].require_supported(timm.create_model(name))
    try:
        return shaken(timm.create_model(name, **SMALL))
    except AssertionError:  # models with grouped heads need the number of heads for every layer
        return shaken(timm.create_model(name, **SMALL, num_kv_heads=1))


def small_transformers(name: str) -> nn.Module:
    """Returns a transformers model with two narrow layers and random weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    return importlib.import_module("support.pretrained").of_hf(name, hidden_size=24).float()


def shaken(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.1)
    return model.eval()


# Speed ----------------------------------------------------------------------------------------------------------------


def half_of(name: str, out: Path) -> tuple[nn.Module, nn.Module]:
    """Returns timm's original model, and the model with half of the hidden units, which timm loads from its folder."""
    import timm

    torch.manual_seed(0)
    original, folder = timm.create_model(name).eval(), out / f"half-{name}"
    if not folder.is_dir():
        model = rx.load(original)
        noise = torch.randn(8, *family_of(model).input_shape(model))
        rules = rx.prescribe(rx.diagnose(model, noise), "hidden=uniform_rank:0.5", portable=True)
        rx.save(rx.realize(model, rules), folder, portable=True)
    return original, timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def speed(options: argparse.Namespace) -> None:
    """Prints the portable model's speed relative to the original, eager and compiled."""
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    original, half = half_of(options.model.removeprefix("timm:"), options.out)
    record, rows = options.out / "speeds.json", []
    known: dict[str, Any] = read_json(record) if record.exists() else {}
    for mode, batch in product(options.modes, options.batches):
        key = f"{options.model} {mode} {batch} {options.threads} {options.clock}"
        if key not in known:
            known[key] = faster({"original": original, "half": half}, mode, batch, options)
            write_json(record, known)
        value, low, high = known[key]
        rows.append([mode, str(batch), f"{value:.2f}x [{low:.2f}, {high:.2f}]"])
    print(markdown_table(["", "batch", "times faster"], rows))


def faster(models: Mapping[str, nn.Module], mode: str, batch: int, options: argparse.Namespace) -> list[float]:
    """Times two models in turns. Returns the second model's speed relative to the first, with its interval."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()

    def pass_of(model: nn.Module) -> Callable[[], object]:
        called: Any = torch.compile(model) if mode == "compiled" else model
        return lambda: called(images)

    with torch.inference_mode():
        runs = {name: pass_of(model) for name, model in models.items()}
        seconds = interleave(runs, rounds=options.rounds or ROUNDS.get(batch, 12), warmup=3, clock=options.clock)
    found = ratio_of(*(seconds[name] for name in models))
    log(f"{mode}, batch {batch}: {found.value:.3f}")
    return [found.value, found.low, found.high]


def main(words: Sequence[str] | None = None) -> None:
    """Measures the results that are not in the folder, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    of_price = commands.add_parser("price", help="the divergence beside a plan with a width per layer")
    add_model(of_price)
    add_data(of_price, "training images for the plans, test images for the comparison")
    of_price.add_argument("--params", type=float, default=0.6, help="the share of the parameters that stays (0.6)")
    of_price.add_argument("--effort", default="quick", choices=["quick", "normal", "thorough"])
    of_price.add_argument("--images", type=int, default=500, help="test images of the comparison (500)")
    of_price.add_argument("--seed", type=int, default=0)
    of_price.set_defaults(run=price)
    of_reload = commands.add_parser("reload", help="how many models load without attnrx")
    of_reload.add_argument("--classes", type=int, default=28, help="of transformers (28)")
    of_reload.add_argument("--tags", type=int, default=100, help="weight files of timm (100)")
    of_reload.add_argument("--seed", type=int, default=0)
    of_reload.set_defaults(run=reload)
    of_speed = commands.add_parser("speed", help="the speed with half of the hidden units")
    of_speed.add_argument("--model", default="timm:vit_tiny_patch16_224", metavar="timm:NAME")
    of_speed.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    of_speed.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    of_speed.add_argument("--threads", type=int, default=1)
    of_speed.add_argument("--rounds", type=int, metavar="N", help="of every cell (60 or 12 by batch size)")
    of_speed.add_argument(
        "--clock", default="wall", choices=["wall", "cpu"], help="cpu: of one thread on a busy machine"
    )
    of_speed.set_defaults(run=speed)
    for each in (of_price, of_speed, of_reload):
        each.add_argument("--out", type=Path, default=Path("runs/portable"), metavar="FOLDER")
    options = parser.parse_args(words)
    options.run(options)


if __name__ == "__main__":
    main()
