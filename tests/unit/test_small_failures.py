"""Inputs of unusual kinds: each is refused, or used, with words that say what it was."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.data.formats import Columns
from attnrx.exporting.formats import raising
from attnrx.support.errors import AttnrxError, CheckpointError, DataError, InvalidInput, NotSupported, UserCodeError
from support.command_line import call
from support.diagnoses import diagnosis
from support.pictures import rows, write_parquet
from support.pretrained import of_timm
from support.users_models import Around

timm = pytest.importorskip("timm")
DIGITS = "svda:digits"
LONG = "/".join(["a" * 200] * 25)


def model() -> Any:
    return rx.load(of_timm("vit_tiny_patch16_224")).float()


def images(count: int = 8) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def run(*words: object, shell: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs the command line in a process of its own, with redirections of the shell."""
    command = " ".join([sys.executable, "-m", "attnrx", *map(str, words), shell])
    return subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ, **environment})


# links and paths


def looped(folder: Path) -> Path:
    (folder / "one").symlink_to(folder / "two")
    (folder / "two").symlink_to(folder / "one")
    return folder / "one"


WRITERS: dict[str, Callable[[Path], object]] = {
    "save": lambda path: rx.save(model(), path),
    "diagnosis": lambda path: rx.diagnose(model(), images()).save(path),
    "evidence": lambda path: rx.Evidence((), {}).save(path),
    "report": lambda path: rx.write_report(path, rx.reports.ReportContent("title", diagnosis=diagnosis(2, 4, 2))),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_links_that_lead_to_themselves_are_not_written_to(kind: str, tmp_path: Path) -> None:
    path = looped(tmp_path)
    with pytest.raises(CheckpointError, match="one is a symbolic link that leads back to itself"):
        WRITERS[kind](path)
    assert sorted(each.name for each in tmp_path.iterdir() if not each.name.startswith(".")) == ["one", "two"]


def test_commands_refuse_such_links_and_long_paths_before_they_work(tmp_path: Path) -> None:
    done = call("export", DIGITS, "--out", looped(tmp_path))
    assert done.code == 2 and "leads back to itself" in done.err and "writing" not in done.err
    done = call("export", DIGITS, "--out", tmp_path / LONG)
    assert done.code == 2 and "too long" in done.err and len(done.err) < 1000


@pytest.mark.parametrize(
    "use",
    [
        rx.load,
        rx.load_data,
        lambda path: rx.save(model(), path),
        lambda path: rx.export(model(), path),
        lambda path: rx.load("timm:vit_tiny_patch16_224", weights=path),
    ],
)
def test_a_path_of_5000_characters_is_an_invalid_argument(use: Callable[[str], object]) -> None:
    with pytest.raises(InvalidInput, match=r"\(.*='aaa.* \.\.\.'\): give"):
        use(LONG)


# streams


@pytest.mark.slow
def test_a_closed_stream_changes_no_code(tmp_path: Path) -> None:
    for shell in (">&-", "2>&-", ">&- 2>&-", "<&- >&-"):
        out = tmp_path / f"evidence{len(shell)}.json"
        words = ("verify", DIGITS, "--reference", DIGITS, "--data", "digits", "--checks", "fidelity", "--out", out)
        assert run(*words, shell=shell).returncode == 0 and rx.Evidence.load(out).findings
    done = run("costs", DIGITS, shell="> /dev/full")
    assert done.returncode == 2 and "No space left" in done.stderr


@pytest.mark.slow
def test_names_that_a_terminal_cannot_print_are_escaped(tmp_path: Path) -> None:
    rx.save(rx.load(DIGITS), tmp_path / "größe")
    done = run("costs", tmp_path / "größe", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0
    done = run("export", DIGITS, "--out", tmp_path / "größe.onnx", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0 and "gr\\xf6\\xdfe.onnx" in done.stdout


# models


@pytest.mark.parametrize("role", ["candidate", "reference"])
def test_a_module_without_weights_is_no_model(role: str) -> None:
    models = {"candidate": model(), "reference": model(), role: nn.Identity()}
    with pytest.raises(InvalidInput, match=rf"verify\({role}=\.\.\.\): this Identity has no weights"):
        rx.verify(models["candidate"], models["reference"], images())


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_of_the_caller_changes_nothing(device: str, tmp_path: Path) -> None:
    original, data = model(), images()
    expected = rx.diagnose(original, data).layers[0].readings["entropy"]
    torch.set_default_device(device)
    try:
        diagnosis = rx.diagnose(original, data)
        small = rx.realize(original, rx.prescribe(diagnosis, "qk=total_rank:0.5"))
        assert rx.verify(small, original, data, "fidelity,costs").findings
        rx.save(small, tmp_path / "small")
    finally:
        torch.set_default_device(None)
    assert torch.equal(diagnosis.layers[0].readings["entropy"], expected)
    assert rx.load(tmp_path / "small")(data).shape == (8, 5)


@pytest.mark.parametrize("name", [DIGITS, "dense:cifar10", "lvvit:t", "timm:vit_tiny_patch16_224"])
@pytest.mark.parametrize("ratio", [1e308, 1e17])
def test_an_mlp_of_any_size_is_refused(name: str, ratio: float) -> None:
    with pytest.raises(InvalidInput, match="mlp_ratio"):
        rx.models.build_model(name, mlp_ratio=ratio)


class Quits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = of_timm("vit_tiny_patch16_224")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise SystemExit(0)


class QuittingData:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> torch.Tensor:
        raise SystemExit(0)


def test_code_of_the_user_does_not_end_the_process() -> None:
    with pytest.raises(UserCodeError, match=r"Quits ended the process \(SystemExit: 0\)"):
        rx.load(Quits())
    with pytest.raises(DataError, match=r"item 0 of data .* raised SystemExit"):
        rx.diagnose(model(), QuittingData())


def test_a_module_that_is_not_supported_says_why() -> None:
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(784, 5))
    with pytest.raises(NotSupported, match=r"is not supported; use .*svda:NAME.* Tried on it: ") as refusal:
        rx.load(other)
    assert "svda:fashion_mnist" not in str(refusal.value)


# images


@pytest.mark.parametrize("of", [lambda data: data, lambda data: [data], torch.utils.data.TensorDataset])
def test_channels_at_the_end_are_named(of: Callable[[torch.Tensor], Any]) -> None:
    last = of(images().permute(0, 2, 3, 1))
    for use in (lambda: rx.diagnose(model(), last), lambda: rx.verify(model(), model(), last, "fidelity")):
        with pytest.raises(DataError, match=r"has images of 16 x 16 x 3, .*permute\(0, 3, 1, 2\)"):
            use()


def test_images_with_nan_are_named() -> None:
    data = images(40)
    data[3, 0, 0, 0], data[20] = float("nan"), float("inf")
    with pytest.raises(DataError, match=r"NaN or infinity: 3, 20, counted from 0"):
        rx.diagnose(model(), data)
    with pytest.raises(DataError, match=r"infinity: 0, 1, 2, 3, 4 and 35 more"):
        rx.diagnose(model(), data * float("nan"))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "pets.parquet", rows(30) + rows(9, "test"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("ATTNRX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match=r"written into the cache .*file/cache.*: Not a directory.*ATTNRX_CACHE"):
        rx.load_data(path)


# files of runtimes


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    exported = rx.export(model(), tmp_path / "model.onnx")
    exported.facts["images"]["device"] = "cuda:3"
    rx.serialization.write_json(tmp_path / "model.onnx.json", exported.facts)
    with pytest.raises(CheckpointError, match=r"onnx\.json: images\.device is 'cuda:3', and files of onnx run on"):
        rx.load(tmp_path / "model.onnx")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 9 bytes")])
def test_missing_memory_is_not_the_file_s_fault(error: Exception) -> None:
    with pytest.raises(type(error)), raising("the file does not run"):
        raise error


# arguments


def test_an_unknown_argument_names_the_function_and_the_nearest() -> None:
    call_: Any = rx.load_data
    with pytest.raises(
        TypeError, match=r"load_data\(\) has no argument 'label_column': .*columns=Columns\(label_column"
    ):
        call_("digits", label_column="x")
    call_ = rx.shrink
    with pytest.raises(TypeError, match=r"shrink\(\) has no argument 'mac': did you mean 'macs'"):
        call_(None, None, mac=0.5)
    call_ = rx.verify
    with pytest.raises(TypeError, match=r"verify\(\) missing a required argument: 'reference'"):
        call_(None)
    assert Columns("image").image_column == "image" and issubclass(UserCodeError, AttnrxError)


# modules of users whose code does more than call a Vision Transformer


def without_gradients(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        features = module.net(pictures)
    return module.head(features)


def of_an_early_block(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    return module.net.get_intermediate_layers(pictures, n=[1])[0]


def positions_in_every_block(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    net = module.net
    tokens = torch.cat([net.cls_token.expand(len(pictures), -1, -1), net.patch_embed(pictures)], 1)
    for block in net.blocks:
        tokens = block(tokens + net.pos_embed)
    return module.head(net.norm(tokens)[:, 0])


def of_six_bands(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    return module.head(module.net(module.bands(pictures)))


def under_autocast(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.head(module.net(pictures))


@pytest.mark.parametrize(
    "run",
    [without_gradients, of_an_early_block, positions_in_every_block, of_six_bands, under_autocast],
    ids=lambda run: run.__name__,
)
@pytest.mark.usefixtures("single_precision")
def test_a_plan_and_its_fits_follow_what_the_module_does(
    run: Callable[[Any, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    pictures = torch.randn(48, 6 if run is of_six_bands else 3, 32, 32)
    given: dict[str, Any] = {"inputs": lambda batch: batch} if run is of_six_bands else {}
    lines: list[str] = []
    result = rx.shrink(Around(run).eval(), list(pictures.split(16)), macs=0.7, log=lines.append, **given)
    assert any("needs all tokens between its blocks" in line for line in lines) == (run is positions_in_every_block)
    assert result.evidence.findings
    result.save(tmp_path / "small", onnx=False)
