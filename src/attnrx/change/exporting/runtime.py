"""Where parts of a model run to be timed: PyTorch, eager or compiled, or the runtime of a file format."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from attnrx.change.exporting.format import Format, raising
from attnrx.change.exporting.writing import captured
from attnrx.support.errors import NotSupported
from attnrx.support.modules import copy_module
from attnrx.support.shapes import Float, Tensor
from attnrx.vit.costs import Conditions
from attnrx.vit.costs.conditions import PRECISIONS


@dataclass(frozen=True)
class Runtime:
    """PyTorch under some conditions or, with a `form`, the runtime of the files of this format on their device and
    threads.
    """

    conditions: Conditions
    form: Format | None = None

    def prepare(self, module: nn.Module, example: Float[Tensor, "batch *sizes"]) -> Callable[[Tensor], Any]:
        """Returns a function that runs a module, e.g. some blocks, on inputs like the example with any second size.

        The module itself is unchanged. In 8 bits all linear maps are quantized: which of them stay in float in a whole
        model depends on its outputs, which blocks alone do not have.

        Raises:
            NotSupported: The module cannot be written in the format, or its files have fixed sizes.
        """
        if self.form is None:
            return self.conditions.prepare(module)
        if self.form.fixed_batch is not None:
            raise NotSupported(
                f"plans are not made for the speed of {self.form.name}: parts of a model are timed with several numbers"
                " of tokens, and such a file has fixed sizes. Plan for MACs or another runtime, and export the result."
            )
        form: Any = self.form  # a dataclass, as every format
        form = replace(form, tolerance=inf) if form.calibrated else form
        ready = copy_module(module).eval().to(self.conditions.device, PRECISIONS[self.conditions.precision])
        threads = self.conditions.threads or torch.get_num_threads()
        # AUTO and not a named size: where a block needs all tokens, e.g. for biases of pairs, the size becomes fixed.
        with TemporaryDirectory() as folder, raising(f"a part of this model cannot be timed as {form.name}"):
            program = captured(ready, example, ({1: Dim.AUTO},))
            path = Path(folder) / f"part{form.suffix}"
            form.write(program, path, [example])
            return form.open(path, self.conditions.device, threads)
