"""What people run next costs a result what it costs the original: quantizers, converters, compilers, adapters."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.vit.models import family_of

timm = pytest.importorskip("timm")
pytestmark = [pytest.mark.usefixtures("single_precision"), pytest.mark.slow]

CASES = {
    "original": "",
    "ranks": "qk=total_rank:0.75 vo=total_rank:0.75",
    "hidden units": "hidden=uniform_rank:0.75",
    "three stages": "tokens=ward:0.7@2,3,4",
    "every layer": "tokens=tome:8@every",
    "pruning": "tokens=evit:0.7@2,3",
}
REDUCED = [name for name in CASES if name != "original"]
MOST = 0.03  # nats, beyond what the tool costs the original and what the plan costs


@cache
def original() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 4, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                nn.init.xavier_uniform_(weight)
            # As pre-trained models have it: one feature of the residual stream is far larger than all others, which
            # the norms make small again.
            if name.startswith("blocks.1.mlp.fc2.bias"):
                weight[5] += 60
            if name.split(".")[:2] > ["blocks", "1"] and name.endswith(("norm1.weight", "norm2.weight", "norm.weight")):
                weight.fill_(8.0)[5] = 0.1
    return rx.load(model).eval()


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    """Smooth images, whose patches are alike in places."""
    noise = torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(noise, size=(32, 32), mode="bicubic")


@cache
def result(case: str) -> nn.Module:
    if not CASES[case]:
        return original()
    diagnosis = rx.diagnose(original(), pictures(64, 1), batch_size=64)
    return rx.realize(original(), rx.prescribe(diagnosis, CASES[case])).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns the file of a case in a format, which is written once."""
    folder = tmp_path_factory.mktemp("files")

    def file(case: str, to: str) -> Path:
        path = folder / f"{case}-{to}{'.xml' if to == 'openvino' else '.onnx'}".replace(" ", "-")
        if not path.exists():
            rx.export(result(case), path, to, calibration=pictures(32, 1))
        return path

    return file


def divergence(logits: torch.Tensor, images: torch.Tensor) -> float:
    """The mean KL divergence from the original, in nats."""
    with torch.no_grad():
        wanted = original()(images).log_softmax(-1)
    return float(nn.functional.kl_div(logits.float().log_softmax(-1), wanted, reduction="batchmean", log_target=True))


def require_kept(case: str, answers: Callable[[str], torch.Tensor]) -> None:
    """Requires that a tool costs a result no more than it costs the original; `answers` are those of its output."""
    images = pictures(64)
    with torch.no_grad():
        planned = divergence(result(case)(images), images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usual, found = (divergence(answers(name), images) for name in ("original", case))
    assert found <= usual + planned + MOST, f"{found:.3f} against {usual:.3f} and {planned:.3f}"


def run_onnx(path: Path, images: torch.Tensor) -> torch.Tensor:
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    half = "float16" in session.get_inputs()[0].type
    return torch.from_numpy(session.run(None, {"images": (images.half() if half else images).numpy()})[0])


def run_openvino(model: Any, images: torch.Tensor) -> torch.Tensor:
    openvino = pytest.importorskip("openvino")
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled(images.numpy())[0].copy())


def calibration() -> Any:
    batches = iter(pictures(64, 1).split(16))
    return SimpleNamespace(get_next=lambda: next(({"images": batch.numpy()} for batch in batches), None))


def static(source: Path, made: Path) -> None:
    pytest.importorskip("onnxruntime.quantization").quantize_static(source, made, calibration())


def static_of_maps(source: Path, made: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    quantization.quantize_static(source, made, calibration(), op_types_to_quantize=["MatMul", "Gemm"])


def dynamic(source: Path, made: Path) -> None:
    pytest.importorskip("onnxruntime.quantization").quantize_dynamic(source, made)


def dynamic_of_maps(source: Path, made: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    quantization.quantize_dynamic(source, made, op_types_to_quantize=["MatMul", "Gemm"])


def half(source: Path, made: Path) -> None:
    float16 = pytest.importorskip("onnxconverter_common.float16")
    onnx = pytest.importorskip("onnx")
    # ONNX Runtime adds in half precision on a GPU only.
    kept = [*float16.DEFAULT_OP_BLOCK_LIST, "ScatterElements"]
    onnx.save(float16.convert_float_to_float16(onnx.load(source), op_block_list=kept), made)


def slim(source: Path, made: Path) -> None:
    pytest.importorskip("onnxslim").slim(str(source), str(made))


# The tools of an ONNX file, and the oldest and the newest operator set that they are given.
ONNX_TOOLS = [
    (static, "onnx"),
    (static_of_maps, "onnx"),
    (static_of_maps, "onnx(opset=17)"),
    (dynamic, "onnx(opset=22)"),
    (dynamic, "onnx(opset=17)"),
    (dynamic_of_maps, "onnx"),
    (half, "onnx"),
    (half, "onnx(opset=17)"),
    (slim, "onnx"),
]


@pytest.mark.parametrize(("tool", "to"), ONNX_TOOLS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("case", REDUCED)
def test_tools_of_onnx_files(
    case: str, tool: Callable[[Path, Path], None], to: str, files: Callable[[str, str], Path], tmp_path: Path
) -> None:
    def answers(name: str) -> torch.Tensor:
        tool(files(name, to), tmp_path / f"{name}.onnx")
        return run_onnx(tmp_path / f"{name}.onnx", pictures(64))

    require_kept(case, answers)


@pytest.mark.parametrize("case", REDUCED)
def test_nncf(case: str, files: Callable[[str, str], Path]) -> None:
    openvino, nncf = pytest.importorskip("openvino"), pytest.importorskip("nncf", reason="nncf is not installed")

    def answers(name: str) -> torch.Tensor:
        images = nncf.Dataset(pictures(64, 1).split(1), lambda image: image.numpy())
        model = openvino.Core().read_model(str(files(name, "openvino")))
        return run_openvino(nncf.quantize(model, images, model_type=nncf.ModelType.TRANSFORMER), pictures(64))

    require_kept(case, answers)


@pytest.mark.parametrize("to", ["int8(images=64)", "openvino(precision=int8,images=64)"])
@pytest.mark.parametrize("case", REDUCED)
def test_formats_of_8_bits(case: str, to: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")

    def answers(name: str) -> torch.Tensor:
        path = tmp_path / f"{name}{rx.exporting.parse_format(to).suffix}".replace(" ", "-")
        with torch.no_grad():
            return rx.export(result(name), path, to, calibration=pictures(64, 1))(pictures(64))

    require_kept(case, answers)


@pytest.mark.parametrize("case", REDUCED)
def test_half_precision_of_openvino(case: str, files: Callable[[str, str], Path], tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")

    def answers(name: str) -> torch.Tensor:
        model = openvino.Core().read_model(str(files(name, "openvino")))
        openvino.save_model(model, str(tmp_path / f"{name}.xml"), compress_to_fp16=True)
        return run_openvino(str(tmp_path / f"{name}.xml"), pictures(64))

    require_kept(case, answers)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model)  # type: ignore[return-value]


def with_int8_weights(model: nn.Module) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def with_merged_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["fc1", "proj"], r=2))
    return adapted.merge_and_unload()


def averaged(model: nn.Module) -> nn.Module:
    average = timm.utils.ModelEmaV3(model, decay=0.5)
    average.update(model)
    return average.module.eval()


@pytest.mark.parametrize("tool", [compiled, with_int8_weights, with_merged_adapters, averaged])
@pytest.mark.parametrize("case", REDUCED)
def test_tools_of_models(case: str, tool: Callable[[nn.Module], nn.Module]) -> None:
    def answers(name: str) -> torch.Tensor:
        with torch.no_grad():
            return tool(copy.deepcopy(result(name)))(pictures(64))

    require_kept(case, answers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", REDUCED)
def test_autocast(case: str, dtype: torch.dtype) -> None:
    def answers(name: str) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            return result(name)(pictures(64))

    require_kept(case, answers)


def test_dynamic_quantization_of_the_newest_operator_set_is_of_linear_maps_only(
    files: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """By default ONNX Runtime takes ONNX's own attention for its older one: a file that no session opens."""
    dynamic(files("original", "onnx"), tmp_path / "dynamic.onnx")
    with pytest.raises(Exception, match="INVALID_GRAPH"):
        run_onnx(tmp_path / "dynamic.onnx", pictures(1))


@pytest.mark.data
@pytest.mark.parametrize("policy", ["ward:0.7@4,7,10", "ward:13@every"])
def test_nncf_on_a_real_model(policy: str, real_data: Path, tmp_path: Path) -> None:
    openvino, nncf = pytest.importorskip("openvino"), pytest.importorskip("nncf", reason="nncf is not installed")
    from safetensors.torch import load_file

    library = timm.create_model("vit_tiny_patch16_224").eval()
    library.load_state_dict(load_file(real_data / "vit_tiny_patch16_224.safetensors"))
    model = rx.load(library)
    data = rx.adapt_preprocessing(rx.load_data(real_data / "imagenette224.parquet", image_size=224), model)
    train, images = (next(iter(split.take(100).batches(100))).images for split in (data.train, data.test))
    with torch.no_grad():
        wanted = library(images).log_softmax(-1)

    def quantized(found: nn.Module) -> float:
        rx.export(found, tmp_path / "model.xml", "openvino")
        dataset = nncf.Dataset(train.split(1), lambda image: image.numpy())
        read = openvino.Core().read_model(str(tmp_path / "model.xml"))
        made = nncf.quantize(read, dataset, model_type=nncf.ModelType.TRANSFORMER)
        return kl(torch.cat([run_openvino(made, batch) for batch in images.split(20)]))

    def kl(logits: torch.Tensor) -> float:
        return float(nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True))

    small = rx.realize(model, rx.prescribe(model, f"tokens={policy}"))
    with torch.no_grad():
        planned = kl(small(images))
    assert quantized(small) <= quantized(model) + planned + MOST
    assert family_of(small).costs(small).macs < family_of(model).costs(model).macs
