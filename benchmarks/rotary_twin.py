"""Distils a rotary twin of a pre-trained ViT-Tiny, on which rotary prescriptions are measured without DINOv3's weights.

    python benchmarks/rotary_twin.py --data DATA --weights W --label-column L --test-column T --out runs/rotary_twin

The twin has the teacher's shape and the rotary embedding of DINOv3 (axial, base 100, halves of a row rotated) in every
layer. It starts from the teacher's weights. First the query and key maps of every layer are fitted to the teacher's
attention, layer by layer on the teacher's inputs; then all weights are trained to the teacher's logits and block
outputs on the training images. Training is kept in the folder and goes on after an interruption.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

import attnrx as rx
from attnrx.cli.options import add_data, splits_argument

NAME = "vit_small_patch16_rope_ape_224"
ARGUMENTS = {
    "embed_dim": 192,
    "num_heads": 3,
    "init_values": 1.0,  # of the scales that the teacher lacks
    "no_embed_class": False,
    "rope_type": "dinov3",
    "rope_temperature": 100.0,
    "rope_rotate_half": True,
    "rope_grid_indexing": "ij",
}
IMAGES, FIT_STEPS, FIT_BATCH = 48, 120, 8  # of the fit of every layer
BATCH, RATE, HIDDEN = 16, 4e-5, 1.0


def started(weights: Path) -> nn.Module:
    """Returns the twin with the teacher's weights."""
    twin = timm.create_model(NAME, **ARGUMENTS)
    missing, unexpected = twin.load_state_dict(load_file(weights), strict=False)
    # LayerScale alone is new; its first value of 1 changes nothing.
    assert not unexpected and all("gamma" in name for name in missing), (missing, unexpected)
    return twin


def fit_layers_(twin: nn.Module, teacher: nn.Module, images: torch.Tensor) -> None:
    """Fits query and key of every layer of the twin to the teacher's attention on the teacher's inputs."""
    embedding = twin.rope.get_embed(shape=(14, 14))  # patches of a side at 224 x 224
    for index, (block, original) in enumerate(zip(twin.blocks, teacher.blocks, strict=True)):
        captured: list[torch.Tensor] = []
        handle = original.attn.register_forward_pre_hook(lambda _, args, captured=captured: captured.append(args[0]))
        with torch.no_grad():
            teacher(images)
        handle.remove()
        inputs = captured[0]
        with torch.no_grad():
            target = attention_of(original.attn, inputs, None)
        parameters = [block.attn.qkv.weight, block.attn.qkv.bias]
        optimizer = torch.optim.Adam(parameters, lr=2e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FIT_STEPS)
        for step in range(FIT_STEPS):
            # The inputs of the teacher, so that the layers are independent of each other's errors.
            batch = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))[:FIT_BATCH]
            # KL(teacher || twin) of every row of the maps, in the mean.
            logs = attention_of(block.attn, inputs[batch], embedding).clamp_min(1e-12).log()
            loss = F.kl_div(logs, target[batch], reduction="sum") / logs[..., 0].numel()
            optimizer.zero_grad()
            loss.backward()
            # Query, key and value are one map.
            width = block.attn.qkv.weight.shape[1]
            block.attn.qkv.weight.grad[2 * width :] = 0  # the values stay
            block.attn.qkv.bias.grad[2 * width :] = 0
            optimizer.step()
            schedule.step()
        print(f"layer {index}: KL of the attention {loss.item():.4f} nats", flush=True)


def attention_of(attention: nn.Module, inputs: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
    """Returns the attention maps of timm's module."""
    batch, count, _ = inputs.shape
    query, key, _ = attention.qkv(inputs).reshape(batch, count, 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
    if embedding is not None:
        query, key = (rotated(side, embedding) for side in (query, key))
    return (query @ key.mT * attention.scale).softmax(-1)


def rotated(rows: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    # The class token is not rotated, as in timm.
    patches = timm.layers.apply_rot_embed_cat(rows[:, :, 1:], embedding, half=True)
    return torch.cat([rows[:, :, :1], patches], dim=2)


def outputs(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the logits and the outputs of the blocks."""
    block_outputs: list[torch.Tensor] = []
    handles = [
        block.register_forward_hook(lambda _, args, output: block_outputs.append(output)) for block in model.blocks
    ]
    logits = model(images)
    for handle in handles:
        handle.remove()
    return logits, block_outputs


@torch.no_grad()
def agreement(twin: nn.Module, teacher: nn.Module, images: torch.Tensor) -> float:
    same = [(twin(part).argmax(1) == teacher(part).argmax(1)).float() for part in images.split(50)]
    return float(torch.cat(same).mean())


class Training:
    """The training of the twin: its state in a folder, the step that goes on, and the evaluation on test images."""

    def __init__(self, folder: Path, weights: Path, test: torch.Tensor):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.record, self.test = folder / "twin.safetensors", folder / "twin.json", test
        self.teacher = timm.create_model("vit_tiny_patch16_224").eval().requires_grad_(False)
        self.teacher.load_state_dict(load_file(weights))
        self.twin, self.done = started(weights).eval(), -1  # -1: the layers are not fitted yet
        if self.record.is_file():
            self.twin.load_state_dict(load_file(self.file))
            self.done = json.loads(self.record.read_text())["steps"]

    def save(self, steps: int) -> None:
        save_file(self.twin.state_dict(), self.file)
        evaluation = {
            "steps": steps,
            "agreement": agreement(self.twin, self.teacher, self.test),
            "images": len(self.test),
        }
        self.record.write_text(json.dumps({**evaluation, "name": NAME, "arguments": ARGUMENTS}))
        print(evaluation, flush=True)

    def run(self, train: rx.data.ImageSet, steps: int) -> None:
        """Trains all weights to the teacher's logits and block outputs."""
        optimizer = torch.optim.AdamW(self.twin.parameters(), lr=RATE, weight_decay=0.0)
        # AdamW's moments are not stored: after an interruption they start again, with another warm-up of 30 steps.
        generator = torch.Generator().manual_seed(self.done)
        batches: Iterator[rx.data.Batch] = iter(())
        for step in range(self.done, steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * min(1, (step - self.done + 1) / 30) * max(0.02, 1 - step / steps)
            batch = next(batches, None)
            if batch is None:
                batches = train.batches(BATCH, seed=int(torch.randint(1 << 30, (), generator=generator)))
                batch = next(batches)
            flipped = torch.rand((), generator=generator) < 0.5
            loss = self.loss(batch.images.flip(-1) if flipped else batch.images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % 50 == 0 or step + 1 == steps:
                self.save(step + 1)

    def loss(self, images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target, hidden = outputs(self.teacher, images)
        logits, twin_hidden = outputs(self.twin, images)
        # Relative to the energy of each block's output, so that all blocks count the same.
        errors = [F.mse_loss(a, b) / b.square().mean() for a, b in zip(twin_hidden, hidden, strict=True)]
        divergence = F.kl_div(logits.log_softmax(-1), target.softmax(-1), reduction="batchmean")
        return divergence + HIDDEN * torch.stack(errors).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, required=True)
    add_data(parser, "training images for the training, test images for the measurement")
    parser.add_argument("--out", type=Path, default=Path("runs/rotary_twin"))
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    teacher = rx.load("timm:vit_tiny_patch16_224", weights=arguments.weights)
    splits = splits_argument(teacher, arguments)
    test = torch.cat([batch.images for batch in splits.test.batches(100)])
    training = Training(arguments.out, arguments.weights, test)
    if training.done < 0:
        images = torch.cat([batch.images for batch in splits.train.take(IMAGES).batches(IMAGES)])
        fit_layers_(training.twin, training.teacher, images)
        training.done = 0
        training.save(0)
    training.run(splits.train, arguments.steps)


if __name__ == "__main__":
    main()
