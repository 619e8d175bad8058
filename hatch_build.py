"""Compiles the C++ kernels into a wheel for this processor; only with HATCH_BUILD_HOOK_ENABLE_CUSTOM=true, on Linux.

The libraries have a plain C interface and are loaded by ctypes, so one wheel serves every Python and PyTorch.
"""

import os
import platform
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelHook(BuildHookInterface):
    """Adds `native_NAME.so` beside the sources, and the tag of the platform."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = platform.machine()
        build = runpy.run_path(str(Path(self.root) / "src" / "attnrx" / "vit" / "kernels" / "flags.py"))
        if version == "editable":  # a checkout builds them at first use
            return
        if sys.platform != "linux" or machine not in build["SHIPPED"]:
            raise RuntimeError(f"kernels are compiled into wheels on Linux for {', '.join(build['SHIPPED'])} only.")
        self.folder = TemporaryDirectory()
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        for name, instructions in build["SHIPPED"][machine].items():
            library = Path(self.folder.name) / build["shipped_library"](name).name
            objects = library.with_suffix("")
            objects.mkdir()
            flags = [*build["FLAGS"], build["THREADS"], *instructions]
            subprocess.run([*compiler, *flags, "-c", *build["SOURCES"]], cwd=objects, check=True)
            # Linked without OpenMP: its functions are those of the library that PyTorch has loaded, whose threads they
            # share. A second OpenMP would start as many threads again.
            subprocess.run([*compiler, "-shared", "-s", *objects.iterdir(), "-o", library], check=True)
            build_data["force_include"][str(library)] = f"attnrx/vit/kernels/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()
