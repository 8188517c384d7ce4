"""The image processor with and without torchvision, the pipeline, and folders of images."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import REPOSITORY
from transformers import AutoImageProcessor, pipeline
from transformers.utils import is_torchvision_available

from dcformer import DCViTImageProcessor, vision
from dcformer.errors import DCFormerError, MissingExtraError
from dcformer.vision import DCViTImageProcessorPil, read_image_folder

Image = pytest.importorskip("PIL.Image", reason="images need Pillow (extra `vision`)")


def photograph(width=300, height=400, mode="RGB"):
    """A smooth picture, so that ways of resizing differ little."""
    y, x = np.mgrid[:height, :width]
    channels = [127 + 120 * np.sin(x / 40), 127 + 120 * np.cos(y / 50), 127 + 120 * np.sin((x + y) / 60)]
    return Image.fromarray(np.stack(channels, -1).astype(np.uint8)).convert(mode)


@pytest.mark.parametrize("processor_class", [DCViTImageProcessorPil, DCViTImageProcessor])
def test_steps_are_the_forks(processor_class):
    image = photograph()
    pixels = processor_class()(image, return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, 224, 224) and pixels.dtype == torch.float32
    # shorter side 256, the middle, -1 to 1, with Pillow alone
    small = image.resize((256, 341), Image.Resampling.BILINEAR)
    left, top = (256 - 224) // 2, (341 - 224) // 2
    cropped = np.asarray(small.crop((left, top, left + 224, top + 224)), dtype=np.float64)
    expected = torch.from_numpy(cropped / 127.5 - 1).permute(2, 0, 1).float()
    # Pillow rounds to 1/255 between its two passes, and torchvision rounds otherwise: two steps of a value
    assert (pixels[0] - expected).abs().max() <= 2 * 2 / 255
    assert pixels.min() >= -1 and pixels.max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_every_kind_of_image_becomes_rgb(mode):
    pixels = DCViTImageProcessor()(photograph(mode=mode), return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, 224, 224) and pixels.std() > 0.1


def test_processor_is_found_by_the_auto_class(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    DCViTImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert stored["image_processor_type"] == "DCViTImageProcessor"
    expected = {"pil": DCViTImageProcessorPil, "torchvision": DCViTImageProcessor}
    default = "torchvision" if is_torchvision_available() else "pil"
    assert type(AutoImageProcessor.from_pretrained(tmp_path)) is expected[default]
    pil = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert type(pil) is DCViTImageProcessorPil
    pil.save_pretrained(tmp_path / "again")  # without a word about the library that prepared it
    again = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert again["image_processor_type"] == "DCViTImageProcessor"
    assert pil(photograph(), return_tensors="pt").pixel_values.shape == (1, 3, 16, 16)


def test_an_auto_class_that_refuses_everything_stays_as_it_is(monkeypatch):
    # without Pillow, and without torchvision before Transformers 5.21, with which GPUs may come
    asked = []

    def refuse(*args, **kwargs):
        asked.append(args)
        raise ImportError("AutoImageProcessor requires the Torchvision library")

    monkeypatch.setattr(AutoImageProcessor, "register", refuse)
    vision.register()
    assert asked == [(vision.DCViTConfig,)]


def test_pipeline(make_model, tmp_path, caplog):
    model = make_model(id2label={i: f"kind {i}" for i in range(5)})
    model.save_pretrained(tmp_path)
    processor = DCViTImageProcessor(size={"height": 16, "width": 16}, do_center_crop=False)
    processor.save_pretrained(tmp_path)
    classify = pipeline("image-classification", model=str(tmp_path))
    image = photograph()
    found = classify(image, top_k=2)
    scores = model(**processor(image, return_tensors="pt")).logits[0].softmax(-1)
    assert [entry["label"] for entry in found] == [f"kind {i}" for i in scores.topk(2).indices]
    assert [entry["score"] for entry in found] == pytest.approx(scores.topk(2).values.tolist(), rel=1e-4)


def test_import_without_pillow_and_torchvision():
    """Importing the package needs neither; preparing an image says what is missing."""
    program = (
        "import sys\n"
        "sys.modules['PIL'] = sys.modules['torchvision'] = None\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name in ('PIL', 'torchvision') else find(name, *a)\n"
        "import dcformer\n"
        "try:\n"
        "    dcformer.DCViTImageProcessor()\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    environment = {"PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    expected = 'DCViTImageProcessor needs PIL, which is not installed: pip install "dcformer[vision]"\n'
    assert done.stdout == expected, done.stderr[-2000:]


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(2):
            photograph(20, 30).save(tmp_path / name / f"{i}.png")
    (tmp_path / "notes.txt").write_text("not a class")
    (tmp_path / "cat" / ".hidden").write_text("passed over")
    return tmp_path


def test_images_of_a_folder(folder):
    found = read_image_folder(folder)
    assert found.classes == ["cat", "dog"] and found.labels == [0, 0, 1, 1] and not found.unreadable
    assert [path.relative_to(folder).as_posix() for path in found.files] == [
        "cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png",
    ]  # fmt: skip


def test_unreadable_images_stop_or_are_skipped(folder):
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dog" / "text.jpg").write_text("no image")
    with pytest.raises(DCFormerError) as error:
        read_image_folder(folder)
    assert "2 of 6 files" in str(error.value) and 'unreadable="skip"' in str(error.value)
    assert "cut.png" in str(error.value) and "text.jpg" in str(error.value)
    found = read_image_folder(folder, unreadable="skip")
    assert sorted(path.name for path in found.unreadable) == ["cut.png", "text.jpg"]
    assert len(found.files) == len(found.labels) == 4


def test_folders_that_are_none(folder, tmp_path, monkeypatch):
    with pytest.raises(DCFormerError, match="is not a folder"):
        read_image_folder(folder / "absent")
    with pytest.raises(DCFormerError, match="has no images that can be read"):
        read_image_folder(folder / "cat")  # images, and no folders of classes
    with pytest.raises(DCFormerError, match="unreadable='ignore' is unknown: expected 'stop' or 'skip'"):
        read_image_folder(folder, unreadable="ignore")
    monkeypatch.setattr("dcformer.errors.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'needs PIL, which is not installed: pip install "dcformer\[vision\]"'):
        read_image_folder(folder)
