"""The wheel, in an empty environment without a compiler: its kernels run, a model gets smaller, its ONNX file runs."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.backends.cpu import get_cpu_capability

from attnrx.vit.kernels.compilation import cpp_compiler
from attnrx.vit.kernels.flags import SHIPPED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXTRAS = "data,onnx,report,timm"
KERNELS = SHIPPED.get(platform.machine(), {}) if sys.platform == "linux" else {}
LAWS = ["native", "native_blocks", "native_products", "native_merging"]
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
OPERATIONS = """
import torch
import attnrx as rx
from torch.profiler import profile
from attnrx.vit.kernels.compilation import native_library

model, images = rx.accelerate(rx.load("vit")), torch.randn(1, 3, 64, 64)
with torch.inference_mode(), profile() as recorded:
    model(images)
is_native = any(event.key.startswith("attnrx::native_") for event in recorded.key_averages())
print("native" if is_native else "other", getattr(native_library(), "_name", None))
"""


def run(words: list[str | Path], folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run([str(word) for word in words], cwd=folder, env=variables, capture_output=True, text=True)


def program(name: str) -> str | None:
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)


@pytest.fixture(scope="module")
def uv() -> str:
    found = program("uv")
    if found is None:
        pytest.skip("uv, which builds the wheel and the environment, is not installed")
    return found


@pytest.fixture(scope="module")
def wheel(uv: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for this platform: of the folder $WHEELS, or built here; with kernels on Linux."""
    folder, given = tmp_path_factory.mktemp("dist"), os.environ.get("WHEELS")
    if given:
        wheels = [path for path in (ROOT / given).glob("*.whl") if ("none-any" in path.name) != bool(KERNELS)]
        (path,) = [path for path in wheels if not KERNELS or path.stem.endswith(platform.machine())]
        return path
    audit = program("auditwheel")
    with_kernels = bool(KERNELS and audit and cpp_compiler())
    # From the source distribution, which must be enough to build it.
    command = [uv, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder]
    built = run(command, HATCH_BUILD_HOOK_ENABLE_CUSTOM=str(with_kernels).lower())
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    if not audit or not with_kernels:
        return path
    programs = os.pathsep.join((str(Path(audit).parent), os.environ["PATH"]))
    repaired = run([audit, "repair", "--wheel-dir", folder / "repaired", path], PATH=programs)
    assert repaired.returncode == 0, repaired.stderr
    (path,) = (folder / "repaired").glob("*.whl")
    assert "py3-none-manylinux_2" in path.name, path.name
    return path


class Environment(NamedTuple):
    """An environment with the wheel, without a compiler, and with no kernel that was built before."""

    folder: Path
    programs: Path
    has_kernels: bool

    def run(self, name: str, *words: str | Path, folder: str = ".", **variables: str) -> str:
        alone = {"PATH": str(self.programs), "PYTHONPATH": "", "HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        alone |= {"XDG_CACHE_HOME": str(self.folder / "cache"), "CC": "", "CXX": "", "PYTHONDONTWRITEBYTECODE": "1"}
        ran = run([self.programs / name, *words], self.folder / folder, **alone, **variables)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        return ran.stdout


@pytest.fixture(scope="module")
def empty(uv: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("empty")
    programs = folder / "venv" / Path(sysconfig.get_path("scripts")).name
    python = programs / Path(sys.executable).name
    assert run([uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"]).returncode == 0
    install = [uv, "pip", "install", "--quiet", "--python", python]
    install += ["--constraint", ROOT / "requirements" / "constraints.txt", "pytest"]
    install += [f"attnrx[{EXTRAS}] @ {wheel.as_uri()}"]
    # From uv's cache, which holds what `make setup` installed, or else from an index.
    if run([*install, "--offline"]).returncode:
        installed = run(install)
        if installed.returncode:
            pytest.skip(f"uv's cache lacks packages and no index is reachable: {installed.stderr.strip()[-200:]}")
    made = Environment(folder, programs, "none-any" not in wheel.name)
    made.run(python.name, "-c", INPUTS)
    return made


def test_the_wheel_has_every_file_that_the_checkout_has(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if ".dist-info/" not in name and not name.endswith("/")}
    assert {Path(name).suffix for name in sources} >= {".py", ".cpp", ".hpp", ".j2", ".typed"}
    compiled = set() if "none-any" in wheel.name else {f"attnrx/vit/kernels/native_{name}.so" for name in KERNELS}
    assert inside == sources | compiled


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_the_wheel_run_without_a_compiler(empty: Environment, name: str) -> None:
    if not empty.has_kernels:
        pytest.skip("the wheel has no kernels: auditwheel or a C++ compiler is missing")
    found = get_cpu_capability().lower()
    if name == "avx512" != found:
        pytest.skip(f"this processor has {found}")
    # PyTorch's setting, which chooses the library too.
    chosen = {} if name == "default" else {"ATEN_CPU_CAPABILITY": name}
    kernel, library = empty.run("python", "-c", OPERATIONS, **chosen).split()
    assert kernel == "native"
    assert Path(library) == next((empty.folder / "venv").rglob(f"native_{name}.so"))
    laws = [ROOT / "tests" / "laws" / f"test_{law}.py" for law in LAWS]
    passed = empty.run("python", "-m", "pytest", "-p", "no:cacheprovider", "--all", *laws, **chosen)
    assert int(re.findall(r"(\d+) passed", passed)[-1]) > 100
    assert not (empty.folder / "cache").exists(), "a library was built"


def test_a_processor_without_a_library_runs_pytorchs_kernels(empty: Environment) -> None:
    kernel, library = empty.run("python", "-c", OPERATIONS, ATTNRX_BUILD="0").split()
    assert kernel != "native" and library == "None"
    if "avx2" in KERNELS:
        kernel, library = empty.run("python", "-c", OPERATIONS, ATEN_CPU_CAPABILITY="default").split()
        assert kernel != "native" and library == "None"


def test_the_wheel_shrinks_a_model_in_an_empty_environment(empty: Environment) -> None:
    started = time.monotonic()
    words = ["shrink", "vit", "--data", "images", "--macs", "0.7", "--effort", "quick", "--out", "smaller"]
    shrunk = empty.run("attnrx", *words)
    print(f"attnrx shrink: {time.monotonic() - started:.0f} s")
    assert re.search(r"\d+ % fewer MACs", shrunk) and "model.onnx" in shrunk
    assert not list((empty.folder / "cache").rglob("native-*")), "a kernel was built although there is no compiler"

    evidence = json.loads((empty.folder / "smaller" / "evidence.json").read_text())
    assert evidence["findings"]
    started = time.monotonic()
    assert empty.run("python", "run_model.py", "../images/0.png", folder="smaller").strip()
    print(f"its ONNX file: {time.monotonic() - started:.0f} s")
