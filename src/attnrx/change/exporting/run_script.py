"""The script beside an exported file, which classifies an image with the runtime, NumPy and Pillow alone."""

import inspect
from pathlib import Path

from attnrx.change.exporting.format import script_path
from attnrx.support import pictures

HEAD = '''"""Classifies an image: python {script} IMAGE"""

import io
import json
import sys
from pathlib import Path

import numpy as np
import {runtime}
'''
TAIL = """

here = Path(__file__)
{opening}
how, names = about["preprocessing"], about["class_names"]
pixels = pixels_of(open_picture(Path(sys.argv[1]).read_bytes()), how["channels"], how["alpha"])
images = normalize_pixels(fit_pixels(pixels, how), how["mean"], how["std"])[None].repeat(batch, 0)
logits = {call}[0]
if len(logits) == 1:  # that of class 1 against class 0
    logits = np.array([0.0, logits[0]])
best = int(logits.argmax())
probability = np.exp(logits[best] - np.logaddexp.reduce(logits))
print(names[best] if names else best, f"{{probability:.3f}}")
"""


def run_script(path: Path, runtime: str, opening: str, call: str) -> str:
    """Returns the script of the file at `path`.

    `opening` are statements that set `about`, the facts of the file, and `batch`, the number of images that it takes;
    `call` is an expression of `images` for the outputs.
    """
    # The text of the module itself, so that a script and attnrx compute the same.
    computing = inspect.getsource(pictures).partition("import numpy as np\n")[2]
    head = HEAD.format(script=script_path(path).name, runtime=runtime)
    return head + computing + TAIL.format(opening=opening, call=call)
