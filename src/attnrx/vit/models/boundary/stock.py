"""Creates and saves portable models, i.e. pruned models that their own library can load without attnrx.

A library's class has an argument for the MLP width, and some classes have one for the number of heads. `Stock` finds
the arguments for given sizes. It tries arguments that libraries commonly use, creates a model with them on the meta
device, and compares the model's sizes with the given sizes. `stock_form` then creates the model, copies the weights
into it, and compares its outputs with the original model's outputs. `save_stock` saves it in the library's own
checkpoint format, with an additional attnrx.json for attnrx.
"""

import copy
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attnrx.support.atomic_writes import ReplacedFiles, parts_by, replacing_folder
from attnrx.support.errors import AttnrxError, InvalidInput, NotSupported
from attnrx.support.modules import evaluating, random_images, tensors_of
from attnrx.support.records import to_dict
from attnrx.support.seals import sealed
from attnrx.support.storage import file_sha256, require_finite_tensors, write_json, write_tensors, write_text
from attnrx.vit.models.boundary.loading import require_same
from attnrx.vit.models.boundary.working_copy import answer, library_form, working_copy
from attnrx.vit.models.checkpoint import KIND, LIBRARY_FILES, PARTS, SCHEMA, STOCK, is_model_file, write_processor
from attnrx.vit.models.families import LIBRARIES, family_of, require_ordinary_weights
from attnrx.vit.models.family import stated_outputs
from attnrx.vit.models.libraries.adopted_family import AdoptedFamily
from attnrx.vit.models.libraries.timm_family import is_layer
from attnrx.vit.models.parts.mlp import hidden_units
from attnrx.vit.models.parts.record import RECORD, Record
from attnrx.vit.models.parts.token_reduction import reduction_of
from attnrx.vit.models.parts.vit_parts import model_name
from attnrx.vit.models.working.adopted import Adopted
from attnrx.vit.models.working.adoption_proof import difference_of

# Per family: the argument for the MLP width in units, the argument for the number of blocks, and the argument for the
# MLP width as a ratio to the model width. Some classes lack some of these arguments.
UNITS: Mapping[str, str] = {"huggingface": "intermediate_size", "torchvision": "mlp_dim"}
DEPTHS: Mapping[str, str] = {
    "timm": "depth", "huggingface": "num_hidden_layers", "torchvision": "num_layers", "open_clip": "layers",
}  # fmt: skip
RATIOS: Mapping[str, str] = {"timm": "mlp_ratio", "huggingface": "mlp_ratio", "open_clip": "mlp_ratio"}
# Settings that transformers' configurations compute from the number of blocks and then store.
STAGES = ("stage_names", "out_features", "out_indices")
# Factors of the ratio in gated MLPs: timm counts the outputs of both halves, transformers' DINOv2 3 / 2 of the units.
GATES = (1.0, 2.0, 1.5)
# Offsets to try. Most libraries round ratio * width down, but DINOv2's gated MLP rounds up to a multiple of 8. An exact
# value is tried first. If floating-point error changes its rounding, a slightly larger or smaller value is right.
ROUNDINGS = (0.0, 0.25, -0.5)
PORTABLE = (
    "a portable model is a plain Vision Transformer of timm, transformers, torchvision or open_clip, with other sizes"
)


class Stock:
    """Finds arguments with which a library creates a model of a given MLP width, number of heads and depth."""

    def __init__(self, model: nn.Module):
        """Reads a model's present sizes.

        Raises:
            NotSupported: The model is not a Vision Transformer of a supported library.
        """
        model, family = working_copy(model), family_of(model)
        if not _is_of_library(model):
            raise NotSupported(
                f"{model_name(library_form(model))} cannot be portable: {PORTABLE}. Of a module of your own shrink the "
                "Vision Transformer in it, and put the result in its place."
            )
        adopted: Any = model
        self.family: AdoptedFamily = family  # type: ignore[assignment]
        self.family.refresh_(adopted)
        self.model, self.origin = adopted, adopted.origin
        self.name = self.origin.architecture
        self.width: int = self.family.specs(adopted)[0].width
        self.depth = len(self.family.block_paths(library_form(adopted)))
        self._found: dict[tuple[int, int, int], Mapping[str, Any] | None] = {}
        self._followers: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """The number of hidden units per MLP, the number of heads per layer, and the number of directions per head.

        Raises:
            NotSupported: No MLP consists of two linear layers, or the sizes differ between layers or between heads.
        """
        return self._sizes(self.model)

    @property
    def hidden(self) -> int:
        return self.sizes[0]

    @property
    def heads(self) -> int:
        return self.sizes[1]

    def _sizes(self, model: nn.Module) -> tuple[int, int, int]:
        units, specs = hidden_units(self.family.mlp(model)), self.family.specs(model)
        sizes = {(len(spec.heads), size) for spec in specs for size in (*spec.ranks, *spec.value_dims)}
        if not units:
            raise NotSupported(f"{self.name} cannot be portable: it has no MLPs of two linear maps.")
        if len({*units}) > 1 or len(sizes) != 1:
            what = f"{min(units)} to {max(units)} hidden units" if len({*units}) > 1 else "other heads"
            raise NotSupported(
                f"{self.name} cannot be portable: its layers have {what}, and its library creates all layers alike. "
                "Prescribe or shrink with portable=True."
            )
        return units[0], *sizes.pop()

    def arguments(self, hidden: int, heads: int, depth: int | None = None) -> Mapping[str, Any] | None:
        """Returns arguments with which the library creates a model of these sizes, or None if no arguments do."""
        key = hidden, heads, depth or self.depth
        if key not in self._found:
            self._found[key] = next(filter(lambda each: self._creates(each, key), self._candidates(*key)), None)
        return self._found[key]

    def _creates(self, arguments: Mapping[str, Any], sizes: tuple[int, int, int]) -> bool:
        try:
            with torch.device("meta"):
                created = self.family.create(self.name, arguments)
            vars(created)[RECORD] = Record(self.family.name, self.origin)
            depth = len(self.family.block_paths(created))
            return self._sizes(created) == (*sizes[:2], self.sizes[2]) and depth == sizes[2]
        except AttnrxError:
            return False
        except Exception:  # libraries raise errors of many types for sizes that their classes refuse
            return False

    def _candidates(self, hidden: int, heads: int, depth: int) -> Iterator[dict[str, Any]]:
        """Yields arguments with which the library might create a model of these sizes."""
        given = dict(self.origin.arguments)
        inside = "vision_config" if isinstance(given.get("vision_config"), Mapping) else ""  # in a CLIP class
        own, width = dict(given[inside] if inside else given), self.width
        if heads != own.get("num_attention_heads", heads):  # transformers, in which some classes read `head_dim`
            own |= {"num_attention_heads": heads, "head_dim": self.sizes[2]}
        if depth != self.depth:
            own = {name: value for name, value in own.items() if name not in STAGES}
            own[DEPTHS[self.family.name]] = depth
        units, ratio = UNITS.get(self.family.name, ""), RATIOS.get(self.family.name, "")
        # timm's arguments are only those that the caller passed. Other libraries list all of their arguments.
        changes: list[dict[str, Any]] = [{}] if (hidden, heads) == (self.hidden, self.heads) else []
        changes += [{units: hidden}] if units in own else []
        if ratio in own or self.family.name == "timm":
            # transformers' DINOv2 accepts only whole ratios.
            changes += [] if hidden % width else [{ratio: hidden // width}]
            changes += [{ratio: (gate * hidden + more) / width} for gate in GATES for more in ROUNDINGS]
        for change in changes:
            yield {**given, inside: {**own, **change}} if inside else {**own, **change}

    def present(self) -> tuple[Mapping[str, Any], dict[str, list[int]]]:
        """Returns the arguments for the model's current sizes, and the sizes of layers that arguments cannot describe.

        The second result maps the path of each such linear layer to its sizes, [inputs, outputs]. It is empty if the
        arguments describe the whole model.

        Raises:
            NotSupported: The arguments include classes, which no file can store.
        """
        with suppress(NotSupported):
            arguments = self.arguments(self.hidden, self.heads)
            if arguments is not None and not self.followers(self.hidden, self.heads):
                self.require_parts(self.hidden, self.heads)
                return arguments, {}
        self.require_files()
        arguments = self.origin.arguments
        with torch.device("meta"):
            created = dict(self.family.create(self.name, arguments).named_modules())
        changed: dict[str, list[int]] = {}
        for path, part in library_form(self.model).named_modules():
            other = created.get(path)
            if isinstance(part, nn.Linear) and isinstance(other, nn.Linear):
                own = [part.in_features, part.out_features]
                changed |= {} if own == [other.in_features, other.out_features] else {path: own}
        return arguments, changed

    def followers(self, hidden: int, heads: int) -> tuple[tuple[str, str], ...]:
        """Returns the MLPs outside the blocks that the library would also create with `hidden` hidden units.

        Each MLP is represented by the paths of its two linear layers. For example, the pooling head of SigLIP contains
        such an MLP.
        """
        key = hidden, heads
        if key in self._followers:
            return self._followers[key]
        source, created = library_form(self.model), dict(self._created(hidden, heads).named_modules())
        linears: list[Any] = [
            (path, part, created[path])
            for path, part in self._outside(source).items()
            if isinstance(part, nn.Linear) and isinstance(created.get(path), nn.Linear)
        ]
        # A classifier with `hidden` classes is not counted, because no second map follows it.
        firsts = [path for path, part, other in linears if part.out_features != other.out_features == hidden]
        seconds = [path for path, part, other in linears if part.in_features != other.in_features == hidden]
        self._followers[key] = tuple(zip(firsts, seconds, strict=False))
        return self._followers[key]

    def difference(self, hidden: int, heads: int, depth: int | None = None) -> str:
        """Returns the path of a part outside the blocks that the library would create differently.

        An example is a head that was replaced. If there is no such part, the result is "".
        """
        followers = {path for pair in self.followers(hidden, heads) for path in pair}
        created = self._created(hidden, heads, depth)
        mine, theirs = (self._outside(each) for each in (library_form(self.model), created))
        for path in dict.fromkeys((*mine, *theirs)):
            if path not in followers and _weights_of(mine.get(path)) != _weights_of(theirs.get(path)):
                return path or "model itself"
        return ""

    def require_files(self) -> None:
        """Raises NotSupported if the arguments contain classes, because the library's files cannot store classes."""
        if classes := [name for name, each in self.origin.arguments.items() if is_layer(each)]:
            raise NotSupported(
                f"{self.name} cannot be portable: it was created with a class of layers as {', '.join(classes)}, which "
                "no file of timm holds. Create it with the name of the layer, e.g. act_layer='gelu'."
            )

    def require_parts(self, hidden: int, heads: int, depth: int | None = None) -> None:
        """Raises NotSupported if the library would create any part outside the blocks differently."""
        self.require_files()
        if path := self.difference(hidden, heads, depth):
            raise NotSupported(
                f"{self.name} cannot be portable: its {path} is not the one that {self.family.library} creates; it was "
                "replaced or removed. Create the model with the right arguments (e.g. num_classes=10 of timm), "
                "load the weights into that, and give that one."
            )

    def _outside(self, source: nn.Module) -> dict[str, nn.Module]:
        """Returns the parts outside the blocks, by their paths."""
        inside = tuple(f"{path}." for path in self.family.block_paths(source))
        return {path: part for path, part in source.named_modules() if not f"{path}.".startswith(inside)}

    def _created(self, hidden: int, heads: int, depth: int | None = None) -> nn.Module:
        arguments = self.arguments(hidden, heads, depth)
        assert arguments is not None
        with torch.device("meta"):
            return self.family.create(self.name, arguments)


def _weights_of(part: nn.Module | None) -> list[tuple[str, torch.Size]]:
    return [] if part is None else [(name, weight.shape) for name, weight in part.named_parameters(recurse=False)]


def stock_form(model: nn.Module) -> nn.Module:
    """Returns a new instance of the library's class with the model's weights and without attnrx modules.

    If no arguments of the class describe the sizes, e.g. because they differ between layers, linear layers of the right
    sizes replace the library's linear layers (`Stock.present`). A saved folder then contains the code for this. The new
    model and `model` share the memory of their weights.

    Raises:
        NotSupported: The library has no modules for the model's ranks, token policy or heads.
    """
    own = library_form(model)
    if reduction_of(own) is not None:
        raise NotSupported(f"{model_name(own)} cannot be portable: its tokens are pruned or merged by attnrx.")
    ours = [path for path, part in own.named_modules() if type(part).__module__.partition(".")[0] == "attnrx"]
    if ours:
        raise NotSupported(
            f"{model_name(own)} cannot be portable: its {ours[0]} is of attnrx, because its library has none with "
            "ranks or masks. Prune hidden units alone: portable=True of shrink and prescribe does so."
        )
    stock = Stock(own)
    arguments, linears = stock.present()
    origin = replace(stock.origin, arguments=arguments, replaced={})
    try:
        created = stock.family.created_with(origin, linears, own.state_dict(), stated_outputs(own))
    except RuntimeError as error:
        raise NotSupported(f"{stock.name} cannot be portable: its library creates other weights: {error}.") from error
    copy_modes_(own, created)
    images = random_images(created, origin.input_shape)
    with evaluating((own, created)):
        expected = tensors_of(answer(own, images))
        try:
            difference = difference_of(expected, tensors_of(answer(created, images)))
        except RuntimeError as error:  # e.g. another number of heads
            difference = str(error)
    if difference:
        raise NotSupported(
            f"{stock.name} cannot be portable: as its library creates it, it answers otherwise: {difference}. A part "
            "of it was changed after it was created."
        )
    return created


def copy_modes_(model: nn.Module, created: nn.Module, renamed: Callable[[str], str | None] = str) -> None:
    """Copies the training modes of all parts, and `requires_grad` of all weights, to a newly created model.

    `renamed` returns the name in `created` for a name in `model`, or None if `created` does not have that part.
    """
    created.train(model.training)
    parts, weights = dict(created.named_modules()), dict(created.named_parameters())
    for path, part in model.named_modules():
        if (place := renamed(path)) is not None and place in parts:
            parts[place].training = part.training
    for path, weight in model.named_parameters():
        if (place := renamed(path)) is not None and place in weights:
            weights[place].requires_grad_(weight.requires_grad)


# Folders --------------------------------------------------------------------------------------------------------------


def save_stock(
    folder: Path | str,
    model: nn.Module,
    write_beside: Callable[[Path], object] = lambda new: None,
    parts: ReplacedFiles | None = None,
) -> Path:
    """Saves a model from `stock_form` as a folder that both the model's own library and `attnrx.load` can read.

    An earlier model in the folder is replaced. The library and attnrx read the same weights file, which uses the
    library's weight names. As a check, the folder is loaded again, and the loaded model is compared with `model`.

    Raises:
        NotSupported: The library joins or divides weights in its files, or the model has arguments that no file can
            store.
    """
    folder, stock = Path(folder), Stock(model)
    require_ordinary_weights(model)
    state, (_, linears) = model.state_dict(), stock.present()
    described = {name: value for name, value in to_dict(stock.origin, typed=False).items() if name != "replaced"}
    require_finite_tensors(state, "the model to save")
    names = stock.family.saved_names(model) or {name: name for name in state}
    if {*names.values()} != {*state}:
        raise NotSupported(f"{stock.name} cannot be portable: its library joins or divides weights in its files.")
    with replacing_folder(folder, parts or parts_by(is_model_file), last=STOCK) as new:
        about = {"kind": PARTS["model.safetensors"], "format": "pt"}  # transformers requires a format
        weights = write_tensors(new / "model.safetensors", {name: state[names[name]] for name in names}, about)
        if linears:
            _write_modeling(model, stock, linears, new)
        else:
            WRITERS[stock.family.name](model, stock, new)
        record = {
            "kind": KIND,
            "schema": SCHEMA,
            "family": stock.family.name,
            "model": {**described, "linears": linears},
            "outputs": stated_outputs(model),
            "weights_sha256": file_sha256(weights),
            "files": {path.name: file_sha256(path) for name in LIBRARY_FILES if (path := new / name).exists()},
        }
        write_json(new / STOCK, sealed(record))
        write_processor(new, stock.family, model)
        write_beside(new)
        require_same(new, model)
    return folder


def _write_timm(model: Any, stock: Stock, folder: Path) -> None:
    importlib.import_module("timm.models._hub").save_config_for_hf(model, folder / "config.json")


def _write_huggingface(model: Any, stock: Stock, folder: Path, **more: Any) -> None:
    config = copy.deepcopy(model.config)
    config.update({"architectures": [type(model).__name__], "dtype": next(model.parameters()).dtype, **more})
    config.save_pretrained(folder)


def _write_torchvision(model: Any, stock: Stock, folder: Path) -> None:
    """Writes nothing, because torchvision reads only weights."""


def _write_open_clip(model: Any, stock: Stock, folder: Path) -> None:
    """Writes the configuration of the image tower in open_clip's JSON format. The caller adds any text tower."""
    own, mean_std = stock.origin.arguments, {"mean": list(stock.origin.mean), "std": list(stock.origin.std)}
    vision = {
        "image_size": own["image_size"][0] if len({*own["image_size"]}) == 1 else own["image_size"],
        "patch_size": own["patch_size"][0] if len({*own["patch_size"]}) == 1 else own["patch_size"],
        "layers": own["layers"], "width": own["width"], "head_width": own["width"] // own["heads"],
        "mlp_ratio": own["mlp_ratio"], "ls_init_value": own["ls_init_value"], "no_ln_pre": own["no_ln_pre"],
        "pool_type": own["pool_type"], "final_ln_after_pool": own["final_ln_after_pool"],
    }  # fmt: skip
    cfg = {"embed_dim": own["output_dim"], "vision_cfg": vision, "quick_gelu": own["act_layer"] == "QuickGELU"}
    write_json(folder / "open_clip_config.json", {"model_cfg": cfg, "preprocess_cfg": mean_std})


def _write_modeling(model: nn.Module, stock: Stock, linears: Mapping[str, Any], folder: Path) -> None:
    """Writes modeling.py, which creates models with layer sizes that the arguments of their class cannot describe."""
    name = type(model).__name__
    if stock.family.name == "huggingface":
        # transformers runs this file if `trust_remote_code=True`. `auto_map` tells its Auto classes where the file is.
        classes = [
            "AutoModel",
            *(["AutoModelForImageClassification"] if name.endswith("ForImageClassification") else []),
        ]
        auto_map = dict.fromkeys(classes, "modeling.Model")
        _write_huggingface(model, stock, folder, auto_map=auto_map, linear_sizes=dict(linears))
        write_text(folder / "modeling.py", REMOTE_CODE.format(name=name))
        return
    if stock.family.name not in CREATED:
        raise NotSupported(
            f"{stock.name} cannot be portable: no arguments of {stock.family.library} give its layers their widths. "
            "Give all layers one width: portable=True of shrink and prescribe."
        )
    imported, created = CREATED[stock.family.name]
    write_text(folder / "modeling.py", MODELING.format(imported=imported, created=created))


# For each library: the import in modeling.py, and the expression with which modeling.py creates the model.
CREATED = {
    "timm": ("import timm", 'timm.create_model(facts["architecture"], **facts["arguments"])'),
    "torchvision": ("from torchvision.models import VisionTransformer", 'VisionTransformer(**facts["arguments"])'),
}
MODELING = '''"""Creates and loads the model of this folder, whose layers have widths that no argument gives.

attnrx wrote this file, which does not need it.
"""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
{imported}

FOLDER = Path(__file__).parent


def load():
    """Returns the model in evaluation mode."""
    facts = json.loads((FOLDER / "attnrx.json").read_text())["model"]
    model = {created}
    for path, (inputs, outputs) in facts["linears"].items():
        bias = model.get_submodule(path).bias is not None
        model.set_submodule(path, nn.Linear(inputs, outputs, bias))
    model.load_state_dict(load_file(FOLDER / "model.safetensors"), assign=True)
    return model.eval()
'''
REMOTE_CODE = '''"""The class of the model of this folder, whose layers have widths that no configuration gives.

attnrx wrote this file, which does not need it.
"""

from torch import nn
from transformers import {name}


class Model({name}):
    """{name} whose linear maps have the inputs and outputs of `config.linear_sizes`, by their paths."""

    def __init__(self, config):
        super().__init__(config)
        for path, (inputs, outputs) in config.linear_sizes.items():
            bias = self.get_submodule(path).bias is not None
            self.set_submodule(path, nn.Linear(inputs, outputs, bias))
'''

WRITERS: Mapping[str, Callable[[Any, Stock, Path], None]] = {
    "timm": _write_timm,
    "huggingface": _write_huggingface,
    "torchvision": _write_torchvision,
    "open_clip": _write_open_clip,
}


def _is_of_library(working: nn.Module) -> bool:
    """Returns whether a working copy was made from a model that the model's library can create again."""
    return isinstance(working, Adopted) and working.around is None and family_of(working) in LIBRARIES.values()


def loading_code(model: nn.Module, folder: Path | str) -> str:
    """Returns Python code that loads a portable folder with the model's own library.

    Raises:
        InvalidInput: The model does not come from a library.
    """
    family, where = family_of(model), str(folder)
    if not _is_of_library(working_copy(model)):
        raise InvalidInput(f"{model_name(model)} is no portable model: save one with portable=True.")
    if family.name in WRITERS and Stock(model).present()[1]:
        if family.name == "huggingface":
            code = f"AutoModel.from_pretrained({where!r}, trust_remote_code=True)"
            return f"from transformers import AutoModel\n\nmodel = {code}"
        return f"import runpy\n\nmodel = runpy.run_path({str(Path(where) / 'modeling.py')!r})['load']()"
    if family.name == "timm":
        return f"import timm\n\nmodel = timm.create_model({f'local-dir:{where}'!r}, pretrained=True).eval()"
    if family.name == "huggingface":
        name = type(library_form(model)).__name__
        return f"from transformers import {name}\n\nmodel = {name}.from_pretrained({where!r})"
    # torchvision and open_clip read only weights from the folder, so the code contains the sizes.
    module = {"torchvision": "torchvision.models", "open_clip": "open_clip.transformer"}[family.name]
    arguments, layers = [], dict.fromkeys(["VisionTransformer"])
    for name, value in Stock(model).origin.arguments.items():
        is_layer = name in ("act_layer", "norm_layer")
        layers |= {value: None} if is_layer else {}
        arguments.append(f"{name}={value if is_layer else repr(value)}")
    native = [each for each in layers if each == "GELU"]
    lines = [
        *(f"from torch.nn import {each}" for each in native),
        f"from {module} import {', '.join(each for each in layers if each not in native)}",
        "from safetensors.torch import load_file",
        "",
        f"model = VisionTransformer({', '.join(arguments)}).eval()",
        f"model.load_state_dict(load_file({str(Path(where) / 'model.safetensors')!r}))",
    ]
    return "\n".join(lines)
