"""The base dependencies of pyproject.toml are enough to diagnose, prescribe, realize, verify, save, load and shrink."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def test_six_verbs_and_shrink_run_with_the_base_dependencies_alone(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv, which builds the environment, is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = [re.split(r"[<>=]", text)[0] for text in project["dependencies"]]
    assert {"torch", "numpy", "safetensors"} <= set(base) <= {"torch", "numpy", "safetensors", "jaxtyping"}
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(tmp_path / "venv")], check=True)
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    pinned = ["--constraint", str(ROOT / "requirements" / "constraints.txt")]
    # From uv's cache, which holds what `make setup` installed.
    done = subprocess.run([*install, "--offline", *pinned, *base], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the base dependencies are not in uv's cache: {done.stderr.strip()[-200:]}")
    # attnrx itself as it is installed here, without building it again.
    found = subprocess.run([str(python), "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True)
    site = Path(found.stdout.decode().strip())
    for part in Path(sysconfig.get_paths()["purelib"]).glob("*attnrx*"):
        shutil.copytree(part, site / part.name) if part.is_dir() else shutil.copy(part, site)
    script = [str(python), "-W", "ignore", str(ROOT / "tests" / "support" / "base_environment.py"), str(tmp_path)]
    ran = subprocess.run(script, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) == 4
