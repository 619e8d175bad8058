"""What people do with a model of a library works on a loaded and on a smaller one as on the original.

Attributes, heads, checkpointing, hidden states, tracing, freezing by name, adapters, trainers, places in larger models.
"""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnrx as rx
from attnrx.vit.models import answer, family_of, working_copy
from support import pretrained
from support.pretrained import VIT, of_hf, of_open_clip, of_timm, of_torchvision, shaken

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

HIDDEN, RANKS = "hidden=uniform_rank:0.5", "qk=uniform_rank:0.5 hidden=uniform_rank:0.5"
LIBRARIES: dict[str, Callable[[], Any]] = {
    "timm": lambda: of_timm(VIT),
    "transformers": lambda: of_hf("ViTForImageClassification"),
    "torchvision": of_torchvision,
}


def smaller(model: nn.Module, rules: str = HIDDEN) -> Any:
    loaded = rx.load(model)
    images = pretrained.inputs(working_copy(loaded), 12)
    return rx.realize(loaded, rx.prescribe(rx.diagnose(loaded, images, moments=True), rules))


def images(model: nn.Module, count: int = 3) -> torch.Tensor:
    return pretrained.inputs(working_copy(model), count)


FORMS = {
    "loaded": rx.load,
    "hidden": smaller,
    "ranks": lambda model: smaller(model, RANKS),
    "heads": lambda model: smaller(model, "heads=total_rank:0.67"),
    "tokens": lambda model: smaller(model, "tokens=tome:0.6@2"),
    "plain": lambda model: rx.plain(rx.accelerate(rx.load(model))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("library", [*LIBRARIES, "open_clip"])
def test_every_form_is_frozen_trained_copied_and_saved(library: str, form: str, tmp_path: Path) -> None:
    original = of_open_clip() if library == "open_clip" else LIBRARIES[library]()
    model = FORMS[form](original)
    assert type(model) is type(original)
    frozen = {name for name, _ in original.named_parameters() if "norm" in name or "ln_" in name}
    for name, weight in model.named_parameters():
        weight.requires_grad_(name not in frozen)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    pixels = images(model)
    answer(model.train(), pixels).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    trained = {name for name, weight in model.eval().named_parameters() if not torch.equal(weight, before[name])}
    assert len(trained) > 10 and frozen <= before.keys() and not trained & frozen
    expected = answer(model, pixels)
    for other in (copy.deepcopy(model), rx.load(model)):
        assert torch.equal(answer(other, pixels), expected)
        assert all(weight.requires_grad == (name not in frozen) for name, weight in other.named_parameters())
    assert torch.equal(answer(rx.load(rx.save(model, tmp_path)), pixels), expected)


class Flagged(nn.Module):
    """A user's model, whose forward reads an attribute and a buffer."""

    flag, temperature = False, 1.0

    def __init__(self):
        super().__init__()
        self.net = of_timm(VIT)
        self.register_buffer("shift", torch.zeros(5, dtype=torch.float64))

    def forward(self, pixels: torch.Tensor) -> Any:
        logits = self.net(pixels) / self.temperature + self.shift
        return (logits, 1.0) if self.flag else logits


@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
def test_attributes_and_buffers_that_are_written_count(rules: str) -> None:
    small, pixels = smaller(shaken(Flagged()), rules), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    before = small(pixels)
    small.temperature = 2.0
    small.shift += 1.0
    assert torch.allclose(small(pixels), before / 2 + 1)
    small.flag = True
    assert isinstance(small(pixels), tuple)


def test_attributes_that_are_written_to_an_accelerated_model_stay() -> None:
    fast: Any = rx.accelerate(rx.load(shaken(Flagged())))
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    before = fast(pixels)
    fast.temperature, fast.note = 2.0, {"written": "since"}
    assert torch.equal(fast(pixels), before / 2)
    for model in (rx.plain(fast), rx.load(fast), copy.deepcopy(fast)):
        assert model.note == {"written": "since"} and torch.allclose(model(pixels), before / 2)
    fast = rx.accelerate(rx.load(of_hf("ViTModel")))
    fast(images(fast), output_hidden_states=True)
    assert len(rx.plain(fast)(images(fast), output_hidden_states=True).hidden_states) == 3


@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
def test_another_head_and_another_classifier_are_saved(rules: str, tmp_path: Path) -> None:
    small = smaller(of_timm(VIT), rules)
    small.head = nn.Linear(12, 7, dtype=torch.float64)
    other = smaller(of_timm(VIT), rules)
    other.reset_classifier(4, "avg")
    other.double()
    third = smaller(of_hf("ViTForImageClassification"), rules)
    third.classifier = nn.Linear(12, 6, dtype=torch.float64)
    for index, (model, classes) in enumerate(((small, 7), (other, 4), (third, 6))):
        expected = answer(model.eval(), images(model))
        assert expected.shape == (3, classes)
        loaded = rx.load(rx.save(model, tmp_path / f"{index}"))
        assert type(loaded) is type(model) and torch.equal(answer(loaded, images(model)), expected)
        assert family_of(loaded).output_kind(loaded) == "logits"


def test_checkpointing_of_the_library_gives_the_same_gradients() -> None:
    for make, switch in (
        (LIBRARIES["timm"], lambda model: model.set_grad_checkpointing(True)),
        (LIBRARIES["transformers"], lambda model: model.gradient_checkpointing_enable()),
    ):
        small = smaller(make(), RANKS).train()
        gradients = []
        for model in (small, copy.deepcopy(small)):
            if model is not small:
                switch(model)
            answer(model, images(small)).square().sum().backward()
            gradients.append([weight.grad for weight in model.parameters() if weight.grad is not None])
        assert len(gradients[0]) == len(gradients[1]) > 10
        assert all(torch.allclose(one, other) for one, other in zip(*gradients, strict=True))


def test_hidden_states_and_attentions_are_those_of_transformers() -> None:
    original = of_hf("ViTModel", attn_implementation="eager")
    loaded, small = rx.load(original), smaller(original)
    pixels = images(loaded)
    for model in (loaded, small):
        output = model(pixels, output_hidden_states=True, output_attentions=True)
        expected = original(pixels, output_hidden_states=True, output_attentions=True)
        assert type(output) is type(expected) and output.keys() == expected.keys()
        assert [each.shape for each in output.hidden_states] == [each.shape for each in expected.hidden_states]
        assert [each.shape for each in output.attentions] == [each.shape for each in expected.attentions]
    assert torch.equal(loaded(pixels, output_attentions=True).attentions[1], expected.attentions[1])
    small = smaller(original, RANKS)
    with pytest.raises(rx.AttnrxError, match="output_attentions"):  # of attention with fewer directions there is none
        small(pixels, output_attentions=True)
    small.config.output_attentions = True
    for model in (small, copy.deepcopy(small), rx.load(small)):
        with pytest.raises(rx.AttnrxError, match="output_attentions"):
            model(pixels)
        assert answer(model, pixels).shape == (3, 12)


def test_attention_weights_are_refused_where_layers_are_not_told_that_they_are_wanted() -> None:
    original = of_hf("VideoMAEForVideoClassification", attn_implementation="eager")
    video = torch.randn(1, 4, 3, 16, 16, dtype=torch.float64)
    assert len(smaller(original)(video, output_attentions=True).attentions) == 2
    small = smaller(original, RANKS)
    with pytest.raises(rx.AttnrxError, match="output_attentions"):
        small(video, output_attentions=True)
    assert len(small(video, output_hidden_states=True).hidden_states) == 3


def test_biases_that_are_interpolated_to_pruned_tokens_are_refused() -> None:
    original = of_hf("BeitForImageClassification", use_relative_position_bias=True)
    small, larger = smaller(original, "tokens=tome:0.5@2"), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert smaller(original)(larger, interpolate_pos_encoding=True).logits.shape == (1, 5)
    assert small(images(small), interpolate_pos_encoding=False).logits.shape == (3, 5)
    with pytest.raises(rx.AttnrxError, match="another size than the model was created for"):
        small(larger, interpolate_pos_encoding=True)


@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
def test_a_configuration_may_request_all_outputs(rules: str, tmp_path: Path) -> None:
    options = {"output_attentions": True, "output_hidden_states": True, "attn_implementation": "eager"}
    original = of_hf("ViTForImageClassification", **options)
    small = smaller(original, rules)
    assert (small.config.output_attentions, small.config.output_hidden_states) == (True, True)
    pixels = images(small)
    assert answer(rx.load(rx.save(small, tmp_path)), pixels).shape == (3, 5)
    if rules == HIDDEN:
        assert small(pixels).keys() == original(pixels).keys()
        assert len(small(pixels).attentions) == 2


@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_it_is_traced_and_gives_features(library: str, rules: str) -> None:
    small = smaller(LIBRARIES[library](), rules)
    pixels = images(small)
    assert torch.allclose(torch.fx.symbolic_trace(small)(pixels), small(pixels))
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    node = "blocks.1" if library == "timm" else "encoder.layers.encoder_layer_1"
    names = [name for name in extraction.get_graph_node_names(small)[1] if name.startswith(node)]
    extractor = extraction.create_feature_extractor(small, {names[-1]: "block"})
    assert extractor(pixels)["block"].shape == (3, 5, 12)


def test_tracers_refuse_what_depends_on_the_images() -> None:
    small = smaller(LIBRARIES["timm"](), "tokens=tome:0.6@2")
    with pytest.raises(rx.AttnrxError, match=r"torch\.fx"):
        torch.fx.symbolic_trace(small)
    with pytest.raises(rx.AttnrxError, match=r"torch\.jit\.script"):
        torch.jit.script(small)
    with pytest.raises(rx.AttnrxError, match=r"torch\.fx .* attnrx\.plain"):
        torch.fx.symbolic_trace(rx.accelerate(smaller(LIBRARIES["timm"]())))


def test_torchscript_reads_what_has_no_attention_of_attnrx() -> None:
    for rules in (HIDDEN, "fc1=uniform_rank:0.5 fc2=uniform_rank:0.5"):
        small = smaller(LIBRARIES["timm"](), rules)
        assert torch.allclose(torch.jit.script(small)(images(small)), small(images(small)))
    with pytest.raises(rx.AttnrxError, match=r"torch\.jit\.script"):
        torch.jit.script(smaller(LIBRARIES["timm"](), RANKS))


def test_another_size_after_the_biases_of_pairs_were_moved_is_refused() -> None:
    small = smaller(of_timm("beit_base_patch16_224"), RANKS)
    with pytest.raises(rx.AttnrxError, match="call set_input_size before the"):
        small.set_input_size((24, 24))


@pytest.mark.usefixtures("single_precision")
@pytest.mark.parametrize("library", LIBRARIES)
def test_torchao_quantizes_the_maps_that_it_quantizes_in_the_original(library: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")

    def quantized(model: nn.Module) -> set[str]:
        before = {name: type(weight.data) for name, weight in model.named_parameters()}
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return {name for name, weight in model.named_parameters() if type(weight.data) is not before[name]}

    original = LIBRARIES[library]().float()
    small = smaller(original)
    pixels = images(small).float()
    expected = answer(small, pixels)
    names = quantized(small)
    assert names == quantized(original) and len(names) >= 5
    assert torch.allclose(answer(small, pixels), expected, atol=0.05)


WITH_DROPOUT: dict[str, Callable[[], Any]] = {
    "timm": lambda: of_timm(VIT, attn_drop_rate=0.1, proj_drop_rate=0.2),
    "transformers": lambda: of_hf(
        "ViTForImageClassification", attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.2
    ),
}


@pytest.mark.parametrize("library", WITH_DROPOUT)
def test_dropout_stays_where_the_attention_of_the_library_is(library: str, tmp_path: Path) -> None:
    def rates(model: nn.Module) -> list[float]:
        return sorted(part.p for part in model.modules() if isinstance(part, nn.Dropout))

    original = WITH_DROPOUT[library]()
    for model in (rx.load(original), smaller(original)):
        assert rates(model) == rates(original)
        assert rates(rx.load(rx.save(model, tmp_path / "m"))) == rates(original)
        pixels = images(model)
        torch.manual_seed(0)
        first, second = (answer(model.train(), pixels) for _ in range(2))
        assert not torch.equal(first, second)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
def test_frozen_weights_stay_frozen_and_names_freeze(library: str, rules: str) -> None:
    original = LIBRARIES[library]().requires_grad_(False)
    small = smaller(original, rules)
    assert not any(weight.requires_grad for weight in small.parameters())
    small.requires_grad_(True)
    names = [name for name, _ in original.named_parameters() if "mlp" in name]
    for name, weight in small.named_parameters():
        weight.requires_grad_(name not in names)
    assert len(names) == 8 and sum(not weight.requires_grad for weight in small.parameters()) == len(names)


def test_learning_rates_decay_by_the_names_of_layers() -> None:
    original = of_timm(VIT)
    decayed = importlib.import_module("timm.optim").param_groups_layer_decay

    def scales(model: Any) -> dict[int, float]:
        groups = decayed(model, 0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.7)
        return {id(weight): group["lr_scale"] for group in groups for weight in group["params"]}

    small = smaller(original, HIDDEN)
    expected, found = scales(original), scales(small)
    weights = dict(small.named_parameters())
    assert all(found[id(weights[name])] == expected[id(weight)] for name, weight in original.named_parameters())


@pytest.mark.parametrize(("library", "target"), [("timm", "qkv"), ("transformers", "q_proj")])
def test_adapters_of_peft_find_the_projections(library: str, target: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    small = smaller(LIBRARIES[library]())
    config = peft.LoraConfig(target_modules=[target], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(small), config).double().eval()
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2
    pixels = images(small)
    merged = adapted.merge_and_unload()
    assert type(merged) is type(small) and list(merged.state_dict()) == list(small.state_dict())
    assert not torch.allclose(answer(merged, pixels), answer(small, pixels))
    again = smaller(merged, "hidden=total_rank:0.9")  # another step, on what was trained
    assert type(again) is type(small)


class OwnConfig(transformers.PretrainedConfig):
    model_type = "own-vit"


class OwnPretrained(transformers.PreTrainedModel):
    """A user's own model of transformers, with a loss."""

    config_class = OwnConfig
    main_input_name = "pixel_values"

    def __init__(self, config: Any):
        super().__init__(config)
        self.vit = of_hf("ViTModel").float()
        self.classify = nn.Linear(12, 5)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leaves the weights as they are."""

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor | None = None, **options: Any) -> Any:
        logits = self.classify(self.vit(pixel_values).last_hidden_state[:, 0])
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


@pytest.mark.usefixtures("single_precision")
def test_the_trainer_of_transformers_trains_a_users_own_model(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    small = smaller(OwnPretrained(OwnConfig()).eval(), RANKS)
    assert type(small) is OwnPretrained
    pixels = images(small, 8).float()
    rows = [{"pixel_values": each, "labels": index % 5} for index, each in enumerate(pixels)]
    settings = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(small, settings, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before


def test_lightning_fits_a_module_of_a_user(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is not installed")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = of_timm(VIT)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            return self.net(pixels)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    small = smaller(Module().eval(), RANKS)
    before = {name: weight.clone() for name, weight in small.named_parameters()}
    data = torch.utils.data.TensorDataset(images(small, 8), torch.arange(8) % 5)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(small, torch.utils.data.DataLoader(data, batch_size=4))
    assert any(not torch.equal(before[name], weight) for name, weight in small.named_parameters())


class Language(nn.Module):
    """As LLaVA: a tower whose last but one hidden state is projected into the width of a language model."""

    def __init__(self, tower: nn.Module):
        super().__init__()
        self.tower, self.project = tower, nn.Linear(12, 8, dtype=torch.float64)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.tower(pixels, output_hidden_states=True).hidden_states
        return self.project(states[-2][:, 1:])


@pytest.mark.parametrize("rules", [HIDDEN, RANKS])
@pytest.mark.parametrize("kind", ["CLIPVisionModel", "SiglipVisionModel"])
def test_a_smaller_tower_is_put_back_into_a_larger_model(kind: str, rules: str, tmp_path: Path) -> None:
    whole = Language(of_hf(kind)).eval()
    pixels = images(rx.load(whole.tower))
    before = whole(pixels)
    whole.tower = smaller(whole.tower, rules)
    after = whole(pixels)
    assert after.shape == before.shape and not torch.equal(after, before)
    state = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    for parameter in whole.parameters():
        nn.init.zeros_(parameter)
    whole.load_state_dict(state)
    assert torch.equal(whole(pixels), after)


def test_a_smaller_encoder_is_put_back_into_an_encoder_and_decoder() -> None:
    """As TrOCR, whose weights transformers saves and loads by the names of the encoder."""
    encoder = of_hf("ViTModel")
    decoder = transformers.BertConfig(
        vocab_size=11, hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        is_decoder=True, add_cross_attention=True,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder.config, decoder)
    whole = shaken(transformers.VisionEncoderDecoderModel(config))
    words = torch.tensor([[1, 2, 3]])
    whole.encoder = smaller(whole.encoder, HIDDEN)
    pixels = images(whole.encoder, 1)
    expected = whole(pixel_values=pixels, decoder_input_ids=words).logits
    other = copy.deepcopy(whole)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(whole.state_dict())
    assert torch.equal(other(pixel_values=pixels, decoder_input_ids=words).logits, expected)
    assert set(whole.state_dict()) == set(transformers.VisionEncoderDecoderModel(config).state_dict())
