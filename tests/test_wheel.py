"""The wheel, in an empty environment without a compiler: a model gets smaller, and its ONNX file runs by its script."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXTRAS = "data,onnx,plan,report,timm"
INPUTS = """
import numpy as np, timm, torch
from pathlib import Path
from PIL import Image
import attnrx as rx

assert "site-packages" in rx.__file__, rx.__file__
random = np.random.default_rng(0)
Path("images").mkdir()
for index in range(64):
    pixels = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((80, 72), Image.Resampling.BICUBIC).save(f"images/{index}.png")
torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=64, patch_size=16, embed_dim=96, depth=3, num_classes=10)
rx.save(rx.load(model), "vit")
"""


def run(words: list[str | Path], folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run([str(word) for word in words], cwd=folder, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def uv() -> str:
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        pytest.skip("uv, which builds the wheel and the environment, is not installed")
    return found


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # From the source distribution, which must be enough to build it.
    command = [uv, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder]
    built = run(command)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_every_file_that_the_checkout_has(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {Path(name).suffix for name in sources} >= {".py", ".cpp", ".hpp", ".j2", ".typed"}
    assert inside == sources


def test_the_wheel_shrinks_a_model_in_an_empty_environment(uv: str, wheel: Path, tmp_path: Path) -> None:
    programs = tmp_path / "venv" / Path(sysconfig.get_path("scripts")).name
    python = programs / Path(sys.executable).name
    assert run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"]).returncode == 0
    install = [uv, "pip", "install", "--quiet", "--python", python]
    install += ["--constraint", ROOT / "requirements" / "constraints.txt", f"attnrx[{EXTRAS}] @ {wheel.as_uri()}"]
    # From uv's cache, which holds what `make setup` installed, or else from an index.
    if run([*install, "--offline"]).returncode:
        installed = run(install)
        if installed.returncode:
            pytest.skip(f"uv's cache lacks packages and no index is reachable: {installed.stderr.strip()[-200:]}")
    # No compiler is found, nothing is read from the checkout, and no kernel that was built before.
    alone = {"PATH": str(programs), "PYTHONPATH": "", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    alone["OMP_NUM_THREADS"] = "1"

    made = run([python, "-c", INPUTS], tmp_path, **alone)
    assert made.returncode == 0, made.stderr
    words = ["shrink", "vit", "--data", "images", "--macs", "0.7", "--effort", "quick", "--out", "smaller"]
    shrunk = run([programs / "attnrx", *words], tmp_path, **alone)
    assert shrunk.returncode == 0, shrunk.stderr
    assert re.search(r"\d+ % fewer MACs", shrunk.stdout) and "model.onnx" in shrunk.stdout
    assert not list((tmp_path / "cache").rglob("native-*")), "a kernel was built although there is no compiler"

    evidence = json.loads((tmp_path / "smaller" / "evidence.json").read_text())
    assert evidence["findings"]
    answered = run([python, "run_model.py", "../images/0.png"], tmp_path / "smaller", **alone)
    assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr
