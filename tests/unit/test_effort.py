"""What "quick", "normal" and "thorough" mean for models of several sizes and kinds of outputs."""

import re
from math import inf
from typing import Any

import pytest

from attnrx.nouns import effort as efforts
from attnrx.nouns.effort import Effort, PlanSettings, final_rounds
from attnrx.support.errors import UnknownName
from attnrx.vit.outputs import KINDS

# MACs per image, at 224 pixels where no size is named; a decoder adds a fifth or more.
MACS = {
    "ViT-Tiny": 1.26e9,
    "ViT-S": 4.6e9,
    "ViT-B": 1.76e10,
    "ViT-L": 6.2e10,
    "ViT-S, decoder": 8e9,
    "ViT-B, decoder": 2.2e10,
    "ViT-L, decoder": 1e11,
    "ViT-L, decoder, 384 pixels": 3e11,
}
SEARCHES = {
    # trials, variations, finalists, rounds, whole rounds, attempts
    "quick": (10, 3, 3, 5, 4, 4),
    "normal": (32, 8, 4, 5, 12, 3),
    "thorough": (48, 8, 6, 7, 28, 4),
}
REPAIRS = {"quick": (100, 2, 3.5e12), "normal": (300, 4, 1e14), "thorough": (500, 4, 4e14)}
# Images to read: to fit, to predict. Images used: to diagnose, to plan, to verify; for sensitivities, of a trial. The
# stride of layers; images of a batch; bfloat16; the share of the images that maps are planned and fitted on; epochs of
# distillation; steps of the fits of a decoder.
TABLE: dict[tuple[str, str, str], tuple[Any, ...]] = {
    ("quick", "ViT-Tiny", "logits"): (256, 96, 128, 192, 4762, 32, 96, 2, 32, False, None, 0, 60, 200),
    ("quick", "ViT-S", "logits"): (256, 96, 64, 96, 1304, 16, 48, 2, 16, True, None, 0, 60, 200),
    ("quick", "ViT-B", "logits"): (256, 96, 64, 96, 341, 16, 48, 2, 16, True, None, 0, 27, 91),
    ("quick", "ViT-B", "embedding"): (256, 96, 64, 96, 341, 16, 48, 2, 16, True, None, 0, 27, 91),
    ("quick", "ViT-L", "logits"): (256, 96, 32, 96, 256, 16, 48, 4, 16, True, None, 0, 8, 26),
    ("quick", "ViT-S, decoder", "map"): (128, 48, 32, 48, 94, 8, 24, 2, 8, True, 1.0, 0, 60, 200),
    ("quick", "ViT-B, decoder", "map"): (128, 48, 11, 17, 64, 3, 9, 2, 8, True, (4 / 11) ** 0.5, 0, 22, 73),
    ("quick", "ViT-L, decoder", "map"): (128, 48, 1, 2, 64, 1, 1, 4, 8, True, 0.08**0.5, 0, 5, 16),
    ("quick", "ViT-L, decoder, 384 pixels", "map"): (128, 48, 1, 1, 64, 1, 1, 4, 8, True, (8 / 300) ** 0.5, 0, 2, 5),
    ("normal", "ViT-Tiny", "logits"): (1024, 96, 128, 512, 10_000, 64, 96, 1, 32, False, None, 2, 60, 200),
    ("normal", "ViT-S", "logits"): (1024, 96, 128, 512, 10_000, 64, 96, 1, 32, False, None, 2, 60, 200),
    ("normal", "ViT-L", "logits"): (1024, 96, 128, 512, 10_000, 64, 96, 1, 32, False, None, 0, 8, 26),
    ("normal", "ViT-S, decoder", "map"): (512, 48, 64, 128, 10_000, 16, 24, 1, 16, False, None, 0, 60, 200),
    ("thorough", "ViT-Tiny", "logits"): (3072, 96, 128, 1024, 10_000, 96, 128, 1, 32, False, None, 2, 60, 200),
    ("thorough", "ViT-L", "logits"): (3072, 96, 128, 1024, 10_000, 96, 128, 1, 32, False, None, 2, 8, 26),
    ("thorough", "ViT-S, decoder", "map"): (1536, 48, 64, 256, 10_000, 24, 32, 1, 24, False, None, 2, 60, 200),
}


def test_all_numbers_of_a_call_follow_from_effort_size_and_outputs() -> None:
    for (name, model, kind), expected in TABLE.items():
        found = Effort.of(name, KINDS[kind], MACS[model])
        settings = found.settings
        numbers = (
            *(found.fitted_images, found.predicted_images, found.diagnosed_images, settings.num_images),
            *(found.verified_images, settings.sensitivity_images, settings.trial_images, settings.layer_stride),
            *(settings.batch_size, settings.bfloat16, found.image_share, found.distill_epochs),
            *(fit.steps for fit in found.decoder_fits),
        )
        assert numbers == expected, (name, model, kind)
        search = (settings.trials, settings.variations, settings.finalists, settings.rounds, settings.whole_rounds)
        assert (*search, settings.attempts) == SEARCHES[name] and found.repair == REPAIRS[name]
        assert [fit.images for fit in found.decoder_fits] == [64, 128]


@pytest.mark.parametrize("kind", ["logits", "map"])
@pytest.mark.parametrize("name", ["quick", "normal", "thorough"])
def test_the_images_to_read_do_not_depend_on_the_size(name: str, kind: str) -> None:
    before, after = (Effort.of(name, KINDS[kind], macs) for macs in (None, 1e11))
    read = [(found.fitted_images, found.predicted_images) for found in (before, after)]
    assert read[0] == read[1] and before.verified_images == 10_000 >= after.verified_images


def test_the_table_of_the_module_has_these_numbers() -> None:
    rows = [re.split(r"\s{2,}", line.strip()) for line in str(efforts.__doc__).splitlines() if line.startswith("    ")]
    for name, model, *stated in rows[1:]:
        found = Effort.of(name, KINDS["map" if "decoder" in model else "logits"], MACS[model])
        images = found.diagnosed_images, found.settings.num_images, found.fitted_images, found.predicted_images
        last = found.verified_images, found.settings.sensitivity_images, found.settings.trials
        assert found.repair is not None
        numbers = [*images, *last, found.repair.steps, *([found.distill_epochs] if found.distill_epochs else [])]
        assert stated == [f"{number:,}" for number in numbers], (name, model)
    assert len(rows) == 10


def test_a_smaller_decoder_takes_time_of_the_search_and_the_repair() -> None:
    quick, normal = (Effort.of(name, KINDS["map"], 8e9).with_smaller_decoder() for name in ("quick", "normal"))
    assert (quick.settings.trials, quick.repair) == (5, None)
    assert normal.settings.trials == 16 and normal.repair is not None


def test_long_passes_have_fewer_final_rounds() -> None:
    rounds = {(32, 1e8): 32, (1, 1e8): 256, (4, 1e8): 64, (32, 1.26e9): 6, (32, 1.76e10): 3, (1, 6.2e10): 6}
    assert {case: final_rounds(*case) for case in rounds} == rounds
    of_files = {**rounds, (32, 1.26e9): 32, (1, 6.2e10): 256}  # their rounds end when they are precise
    assert {case: final_rounds(*case, of_files=True) for case in rounds} == of_files


def test_quick_plans_are_timed_on_a_part_of_the_batch() -> None:
    cases: dict[tuple[float, str | None, int], tuple[int, int, int]] = {
        (1.26e9, None, 32): (8, 5, 4),  # of a ViT-Tiny eight images of the batch
        (1.26e9, None, 2): (2, 20, 16),  # of a small batch more rounds
        (1.76e10, None, 32): (4, 5, 4),
        (1.26e9, "onnx", 64): (32, 5, 4),  # files do not run in chunks
    }
    for (macs, to, batch), expected in cases.items():
        timed = PlanSettings.preset("quick", batch=batch, to=to).while_planning(macs)
        assert (timed.batch, timed.rounds, timed.whole_rounds) == expected
    normal = PlanSettings.preset("normal")
    assert normal.while_planning(1e9) is normal


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(UnknownName, match="effort 'slow'"):
        Effort.of("slow", KINDS["logits"], inf)
