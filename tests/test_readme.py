"""The first lines of the README run as printed, with a dataset and a timm model."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

timm = pytest.importorskip("timm")
README = Path(__file__).parents[1] / "README.md"


@pytest.mark.slow
def test_the_first_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines, *_) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert sum(bool(line.strip()) for line in lines.splitlines()) <= 10
    create = timm.create_model

    def short(name: str, pretrained: bool) -> torch.nn.Module:
        """The model without its weights, which would be downloaded, and with a quarter of its layers."""
        assert pretrained
        return create(name, pretrained=False, depth=3).eval()

    monkeypatch.setattr(timm, "create_model", short)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        dataset = TensorDataset(torch.randn(48, 3, 224, 224), torch.arange(48))
        names: dict[str, Any] = {"dataset": dataset}
        exec(lines, names)
    finally:
        torch.set_default_dtype(before)
    assert "x faster" in capsys.readouterr().out
    assert {"model.safetensors", "model.onnx", "report.html", "README.md"} <= {
        path.name for path in Path("faster").iterdir()
    }
