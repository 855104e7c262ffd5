"""Every recipe of SemanIR trains from end to end on a tiny slice, and several degradations are measured one by one."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from PIL import Image, ImageOps
from skimage import data

from hf_ext.errors import DataError, UsageError
from hf_ext.metrics.psnr import psnr
from hf_ext.semanir import SemanIRConfig, SemanIRForImageRestoration, SemanIRImageProcessor
from hf_ext.tasks.restoration import SemanIRTask
from hf_ext.training import TrainingArguments, build_task, evaluate_checkpoint, train
from tests.kit.recipes import read_short
from tests.kit.refusals import refused

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "semanir"
COLUMNAR = {"embed_dim": 8, "depths": [1], "num_heads": [1], "window_size": 4, "top_k": 8, "train_top_k": [4, 8]}
U_SHAPED = {**COLUMNAR, "depths": [1, 1], "num_heads": [1, 1], "refinement_depth": 0}
# Recipe: its tiny model, whether its data are pairs, and the first metrics that it reports.
SLICES = {
    **{f"super_resolution_x{scale}": (COLUMNAR, False, ["psnr", "ssim"]) for scale in (2, 3, 4)},
    **dict.fromkeys(("denoise_gray", "denoise_color", "demosaick"), (U_SHAPED, False, ["psnr", "ssim"])),
    **dict.fromkeys(("denoise_blind", "all_in_one"), (U_SHAPED, False, ["psnr", "ssim", "psnr_gaussian_noise_15"])),
    "jpeg_gray": (U_SHAPED, False, ["psnr", "ssim", "psnr_b"]),
    "jpeg_color": (U_SHAPED, False, ["psnr", "ssim", "psnr_jpeg_10", "ssim_jpeg_10", "psnr_b_jpeg_10"]),
    **dict.fromkeys(("deblur", "weather"), (U_SHAPED, True, ["psnr", "ssim"])),
}


def photo(height=37, width=42, top=60):
    return Image.fromarray(data.astronaut()[top : top + height, 180 : 180 + width])


def write_slice(folder: Path, paired: bool) -> Path:
    """A photograph for training and evaluation; of pairs the first is its negative."""
    for name in ("lq", "hq") if paired else ("images",):
        (folder / name).mkdir(parents=True)
        (ImageOps.invert(photo()) if name == "lq" else photo()).save(folder / name / "photo.png")
    return folder


def arguments_of(name: str, folder: Path, source: Path, model: dict, *more: str) -> TrainingArguments:
    words = [*(f"--model.{key}={value}" for key, value in model.items()), "--task.patch_size=8", "--warmup_steps=0"]
    return read_short(RECIPES / f"{name}.yaml", folder, source, *words, "--max_steps=1", *more)


@pytest.mark.parametrize("name", SLICES)
def test_a_recipe_trains_from_end_to_end(name, tmp_path):
    model, paired, first = SLICES[name]
    arguments = arguments_of(name, tmp_path / "run", write_slice(tmp_path / "data", paired), model)
    task = build_task(arguments)
    # Published grey JPEG is measured on MATLAB's Y.
    assert task.gray_from == ("matlab_y" if name == "jpeg_gray" else "luma")
    metrics, snapshot = train(task, arguments), tmp_path / "run" / "snapshot"
    assert list(metrics)[: len(first)] == first and list(metrics) == list(task.metric_names)
    assert all(np.isfinite(value) for value in metrics.values())
    channel, border = ("GRAY" if "gray" in name else "RGB"), 0
    if name.startswith("super"):
        channel, border = "Y", int(name[-1])
    assert task.metric_names["psnr"].startswith(f"PSNR ({channel}, border {border}, dB)")
    results = json.loads((snapshot / "eval.json").read_text())["results"]
    assert {result["metric"]: result["value"] for result in results} == metrics
    model = SemanIRForImageRestoration.from_pretrained(snapshot).eval()
    assert SemanIRImageProcessor.from_pretrained(snapshot).do_convert_rgb == (task.config.num_channels == 3)
    names = ("lq", "hq") if paired else ("images",)
    example = {name.removesuffix("s"): Image.open(tmp_path / "data" / name / "photo.png") for name in names}
    with torch.no_grad():
        assert task.summarize(task.evaluate_batch(model, [example], [0])) == pytest.approx(metrics, rel=1e-4)
    config = model.config
    assert (config.scale, config.num_channels) == (task.config.scale, task.config.num_channels)
    # Input, output and target side by side, one row for each degradation.
    with Image.open(tmp_path / "run" / "samples" / "step-1.png") as picture:
        height, width = (side // config.scale * config.scale for side in (37, 42))
        assert picture.size == (3 * width, (height + 4) * len(task.evaluated))


# peft still asks for the name that transformers deprecates.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("checkpointing", ["false", "true"])
def test_an_adapter_for_a_new_degradation_is_trained_and_evaluated(tmp_path, checkpointing):
    source = write_slice(tmp_path / "data", False)
    base = tmp_path / "base"
    SemanIRForImageRestoration(SemanIRConfig(**COLUMNAR)).save_pretrained(base)
    options = {"init_from": base, "max_steps": 2, "learning_rate": 0.1, "activation_checkpointing": checkpointing}
    words = [f"--{name}={value}" for name, value in options.items()]
    arguments = arguments_of("lora", tmp_path / "run", source, {}, *words)
    metrics = train(build_task(arguments), arguments)
    assert list(metrics) == ["psnr", "ssim", "psnr_b"]
    adapter = tmp_path / "run" / "snapshot"
    assert (adapter / "adapter_model.safetensors").exists() and not (adapter / "model.safetensors").exists()
    evaluation = [f"--data.eval.path={source}"]
    measured = evaluate_checkpoint(str(adapter), RECIPES / "lora.yaml", evaluation)["results"]
    assert {row["metric"]: row["value"] for row in measured} == pytest.approx(metrics, rel=1e-6)
    of_base = evaluate_checkpoint(str(base), RECIPES / "lora.yaml", evaluation)["results"]
    assert of_base[0]["value"] != measured[0]["value"]
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with refused(DataError, "names", "model"):
        evaluate_checkpoint(str(adapter), RECIPES / "lora.yaml", evaluation)
    assert peft.PeftConfig.from_pretrained(adapter).peft_type == "LORA"


MIXED = [{"kind": "gaussian_noise", "sigma": 25, "weight": 3}, {"kind": "jpeg", "quality": 10}]


class Unchanged(SemanIRForImageRestoration):
    """A model that gives back what it gets, and notes with how many keys."""

    def __init__(self):
        super().__init__(SemanIRConfig(embed_dim=8, depths=[1], num_heads=[1], window_size=4, top_k=2))
        self.top_k = []

    def forward(self, pixel_values, top_k):
        self.top_k.append(top_k)
        return type("Output", (), {"reconstruction": pixel_values})


def test_several_degradations_are_drawn_by_weight_and_measured_one_by_one():
    task = SemanIRTask(MIXED, patch_size=8, top_k=5)
    example = {"image": photo()}
    noisy = 0
    for seed in range(60):
        sample = task.training_sample(example, np.random.default_rng(seed))
        # Noise is not rounded to 8 bits, a decoded JPEG is.
        levels = sample["pixel_values"] * 255
        noisy += not torch.allclose(levels, levels.round(), atol=1e-3)
    assert 35 <= noisy <= 55
    model = Unchanged()
    rows = task.evaluate_batch(model, [example, {"image": photo(top=150)}], [0, 1])
    metrics = task.summarize(rows)
    names = ["psnr_gaussian_noise_25", "ssim_gaussian_noise_25", "psnr_jpeg_10", "ssim_jpeg_10", "psnr_b_jpeg_10"]
    assert list(metrics) == list(task.metric_names) == ["psnr", "ssim", *names]
    assert metrics["psnr"] == pytest.approx((metrics["psnr_gaussian_noise_25"] + metrics["psnr_jpeg_10"]) / 2)
    assert task.metric_names["psnr_jpeg_10"] == "PSNR (RGB, border 0, dB), JPEG quality 10"
    assert model.top_k == [5] * 4
    # Alone it has the same noise and the same score.
    alone = SemanIRTask({"kind": "gaussian_noise", "sigma": 25}, patch_size=8)
    degraded, clean = alone.degraded_example(example, 0)
    assert psnr(degraded, clean, channel="rgb", data_range=1.0) == rows[0]["psnr_gaussian_noise_25"]
    titles = ["Gaussian noise σ 25", "JPEG quality 10"]
    assert task.describe() == {"degradation": titles, "evaluation": titles, "top_k": 5}
    assert alone.describe() == dict.fromkeys(("degradation", "evaluation"), titles[:1])


def test_pairs_and_other_degradations_share_the_clean_image():
    task = SemanIRTask([{"kind": "paired"}, {"kind": "jpeg", "quality": 90}], patch_size=8)
    lq, hq = np.zeros((12, 12, 3), np.uint8), np.full((12, 12, 3), 200, np.uint8)
    example = {"lq": Image.fromarray(lq), "hq": Image.fromarray(hq)}
    samples = [task.training_sample(example, np.random.default_rng(seed)) for seed in range(12)]
    inputs = {round(float(sample["pixel_values"].mean()) * 255) for sample in samples}
    assert inputs == {0, 200} and all(torch.all(sample["labels"] * 255 > 199) for sample in samples)


MIXED_SCALES = [{"kind": "bicubic"}, {"kind": "jpeg", "quality": 10}]
PAIRS = {"kind": "paired"}


@pytest.mark.parametrize(
    ("fields", "model", "facts"),
    [
        ({"degradation": {"kind": "bicubic"}}, {}, ["model.num_channels", "scale 2", "scale 1"]),
        ({"degradation": {"kind": "mosaic"}}, {}, ["model.num_channels", "num_channels_out", "scale 2"]),
        ({"degradation": MIXED_SCALES}, {"scale": 2}, ["scale 1", "num_channels", "scale 2"]),
        ({"degradation": PAIRS, "made_pictures": 0.5}, {}, ["task"]),
        ({"permute_channels": True}, {"num_channels": 1}, ["task"]),
        ({"gray_from": "matlab_y"}, {}, ["gray_from", "matlab_y"]),
    ],
)
def test_models_must_fit_the_task(fields, model, facts):
    with refused(UsageError, *facts):
        SemanIRTask(**fields).build_model({**COLUMNAR, **model}, None)
