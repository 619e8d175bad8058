"""The cache of the compiled kernel: a library is loaded only if this user built it and nothing changed since."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

from attnrx.support.errors import KernelWarning
from attnrx.vit.kernels import compilation
from attnrx.vit.kernels.native_attention import native_attention

pytestmark = pytest.mark.skipif(compilation.native_library() is None, reason="the kernel needs a C++ compiler")

PLANTED = '#include <cstdio>\n__attribute__((constructor)) static void run() { fclose(fopen("%s", "w")); }\n'


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class Cache:
    """A cache folder, a compiler that copies a library built before, and a library that leaves a mark where loaded."""

    def __init__(self, root: Path, built: Path, planted: Path, marker: Path):
        self.root, self.folder, self.built, self.planted, self.marker = root, root / "kernels", built, planted, marker

    @property
    def library(self) -> Path:
        (path,) = self.folder.glob("*.so")
        return path

    def builds(self) -> int:
        written = (self.root / "calls").read_text().splitlines()
        return sum(path.endswith(".so") for path in written)  # and an object file for every source

    def load(self) -> bool:
        """Loads the kernel as a new process would; whether there is one that computes attention."""
        compilation.native_library.cache_clear()
        if compilation.native_library() is None:
            return False
        ones = torch.ones(1, 1, 2, 3, dtype=torch.float32)
        torch.testing.assert_close(native_attention([ones], [ones], [ones], None, 1.0), ones[:, 0])
        return True

    def refused(self, *reasons: str) -> None:
        """Loading gives one warning with these reasons, PyTorch's attention, and nothing of what was planted."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not self.load() and compilation.native_library() is None
        assert [each.category for each in caught] == [KernelWarning]
        for reason in reasons:
            assert reason in str(caught[0].message)
        assert not self.marker.exists()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The kernel, a library that leaves a mark, and the mark."""
    folder = tmp_path_factory.mktemp("compiled")
    compiler, built, planted, marker = compilation.cpp_compiler(), folder / "own", folder / "planted", folder / "marker"
    sources = [*map(str, compilation.SOURCES), "-o", str(built)]
    compilation.output_of(
        [*compiler, "-std=c++17", "-shared", "-fPIC", "-w", *sources]
    )  # unoptimized: a third of the time
    (folder / "planted.cpp").write_text(PLANTED % marker)
    subprocess.run([*compiler, "-shared", "-fPIC", str(folder / "planted.cpp"), "-o", str(planted)], check=True)
    return built, planted, marker


@pytest.fixture
def cache(compiled: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    built, planted, marker = compiled
    marker.unlink(missing_ok=True)
    shutil.copy(built, tmp_path / "result")
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\nfor word; do [ "$before" = -o ] && echo "$word" >> {tmp_path}/calls '
        f'&& exec cp {tmp_path}/result "$word"; before=$word; done\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.delenv(compilation.BUILD, raising=False)
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path))
    yield Cache(tmp_path, tmp_path / "result", planted, marker)
    compilation.native_library.cache_clear()


def test_the_folder_and_its_files_belong_to_the_user_alone(cache: Cache) -> None:
    with umask(0):
        assert cache.load() and cache.load()
    assert cache.builds() == 1
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in cache.folder.iterdir()} == {0o600}
    assert len(list(cache.folder.iterdir())) == 1


def test_a_new_cache_folder_is_private(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNRX_CACHE", str(cache.root / "new" / "cache"))
    with umask(0):
        assert cache.load()
    assert (cache.root / "new" / "cache").stat().st_mode & 0o777 == 0o700


def overwrite(path: Path, content: bytes) -> None:
    """As a new file: the library that this process has loaded stays mapped."""
    path.unlink()
    path.write_bytes(content)


def replaced(cache: Cache) -> None:
    overwrite(cache.library, cache.planted.read_bytes())


def linked(cache: Cache) -> None:
    library = cache.library
    library.unlink()
    library.symlink_to(cache.planted)


def flipped(cache: Cache) -> None:
    content = bytearray(cache.library.read_bytes())
    content[len(content) // 2] ^= 1
    overwrite(cache.library, bytes(content))


def writable(cache: Cache) -> None:
    cache.library.chmod(0o666)


@pytest.mark.parametrize("damage", [replaced, linked, flipped, writable])
def test_a_file_that_is_damaged_or_not_private_is_rebuilt_once(cache: Cache, damage: Callable[[Cache], None]) -> None:
    assert cache.load()
    damage(cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load() and cache.load()
    assert cache.builds() == 2
    assert not cache.marker.exists()
    assert not cache.library.is_symlink() and cache.library.stat().st_mode & 0o777 == 0o600


def test_a_library_that_another_name_was_built_for_is_skipped(cache: Cache) -> None:
    assert cache.load()
    planted = cache.library.with_stem(cache.library.stem[:-64] + 64 * "0")
    planted.write_bytes(cache.planted.read_bytes())
    planted.chmod(0o600)
    assert cache.load() and cache.builds() == 1 and not cache.marker.exists()


def test_a_library_that_stays_unusable_is_built_twice_at_most(cache: Cache) -> None:
    cache.built.write_bytes(b"no library")
    cache.refused(str(cache.folder), "PyTorch's attention")
    assert cache.builds() <= 2


def test_a_library_without_the_kernel_is_refused(cache: Cache) -> None:
    plain = cache.root / "plain.cpp"
    plain.write_text("int other;\n")
    real = subprocess.run(["sh", "-c", "command -v c++ || command -v g++ || command -v clang++"], capture_output=True)
    compiler = real.stdout.decode().split()[0]
    subprocess.run([compiler, "-shared", "-fPIC", str(plain), "-o", str(cache.built)], check=True)
    cache.refused("attnrx_attention")


def test_a_folder_that_others_can_write_is_refused(cache: Cache) -> None:
    assert cache.load()
    replaced(cache)
    for mode in (0o770, 0o707, 0o777):
        cache.folder.chmod(mode)
        cache.refused(str(cache.folder), f"{mode:o}", "chmod 700")


def test_a_folder_of_another_user_is_refused(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.load()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    cache.refused(str(cache.folder), f"belongs to user {user}", "ATTNRX_CACHE")


def test_a_folder_that_is_a_symbolic_link_is_refused(cache: Cache) -> None:
    assert cache.load()
    moved = cache.folder.rename(cache.root / "moved")
    cache.folder.symlink_to(moved)
    cache.refused(str(cache.folder), "symbolic link")


@pytest.mark.parametrize("command", ["g++ '", "no-such-compiler-here --quick", ";"])
def test_a_compiler_that_cannot_be_called_is_named_in_the_warning(
    cache: Cache, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command)
    cache.refused("CXX", command)


def test_a_compiler_that_hangs_is_stopped(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = cache.root / "slow"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compilation, "PATIENCE", 0.1)
    cache.refused(str(slow), "timed out")


def test_concurrent_builds_leave_one_whole_library(cache: Cache) -> None:
    def load(_: int) -> bool:
        return compilation.native_library.__wrapped__() is not None

    with ThreadPool(4) as pool:
        assert all(pool.map(load, range(8)))
    assert cache.load()
    assert len(list(cache.folder.iterdir())) == 1
