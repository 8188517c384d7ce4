"""Images for DCViT: its image processor, and folders of images with a folder for each class.

Needs Pillow (extra `vision`) when used, and torchvision only where its transforms are preferred.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.utils import is_torchvision_available

from ..errors import DCFormerError, require_extra


class _Preparation:
    """The fork's evaluation: shorter side 256, the 224 pixels in the middle, values from -1 to 1."""

    resample = 2  # `PIL.Image.Resampling.BILINEAR`, which cannot be named where Pillow is missing
    image_mean = [0.5, 0.5, 0.5]
    image_std = [0.5, 0.5, 0.5]
    size = {"shortest_edge": 256}
    crop_size = {"height": 224, "width": 224}
    default_to_square = False
    do_convert_rgb = True
    do_resize = True
    do_center_crop = True
    do_rescale = True
    do_normalize = True

    def __init__(self, **kwargs: Any):
        require_extra("vision", type(self).__name__, "PIL")
        super().__init__(**kwargs)


class DCViTImageProcessorPil(_Preparation, PilBackend):
    """Image processor with Pillow and NumPy."""


class DCViTImageProcessor(_Preparation, TorchvisionBackend if is_torchvision_available() else PilBackend):  # type: ignore[misc]  # one of two bases
    """Image processor with torchvision, where that is installed; otherwise with Pillow and NumPy.

    Images become `pixel_values` [B, 3, 224, 224]: RGB, the shorter side resized to 256 (bilinear), the middle cut out,
    values in [-1, 1]. All steps can be changed or switched off, as in Transformers' processors.
    """


@dataclass
class ImageFolder:
    """Images of a folder that has a folder for each class.

    Attributes:
        classes: names of the folders, sorted.
        files: paths of the images that can be read, sorted within a class.
        labels: of each file, its class as an index of `classes`.
        unreadable: paths of the files that are not images, or are broken.
    """

    classes: list[str]
    files: list[Path] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)


def read_image_folder(folder: str | Path, unreadable: str = "stop") -> ImageFolder:
    """Finds the images in `folder/<class>/`, and decodes each of them once to see whether it can be read.

    Args:
        folder: has a folder for each class, and nothing else that counts; hidden files are passed over.
        unreadable: "stop" to refuse a folder in which a file cannot be read, "skip" to leave such files out.

    Returns:
        `ImageFolder`; no image is kept in memory.

    Raises:
        DCFormerError: on another value of `unreadable`; a folder without images; files that cannot be read, whose
            number and first names it gives.
        MissingExtraError: without Pillow.
    """
    if unreadable not in ("stop", "skip"):
        raise DCFormerError(f"unreadable={unreadable!r} is unknown: expected 'stop' or 'skip'.")
    require_extra("vision", "reading images", "PIL")
    from PIL import Image, UnidentifiedImageError

    root = Path(folder)
    if not root.is_dir():
        raise DCFormerError(f"{root} is not a folder: expected one with a folder of images for each class.")
    found = ImageFolder(sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")))
    candidates = [
        (label, path)
        for label, name in enumerate(found.classes)
        for path in sorted((root / name).iterdir())
        if path.is_file() and not path.name.startswith(".")
    ]
    for label, path in tqdm(candidates, desc=f"reading {root.name}", unit=" images", delay=1):
        try:
            with Image.open(path) as image:
                image.load()
        except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError):
            found.unreadable.append(path)
        else:
            found.files.append(path)
            found.labels.append(label)
    if found.unreadable and unreadable == "stop":
        named = ", ".join(str(path) for path in found.unreadable[:5])
        more = f" and {len(found.unreadable) - 5} more" if len(found.unreadable) > 5 else ""
        raise DCFormerError(
            f"{len(found.unreadable)} of {len(candidates)} files in {root} cannot be read as images: {named}{more}. "
            'Delete or repair them, or leave them out with unreadable="skip".'
        )
    if not found.files:
        raise DCFormerError(f"{root} has no images that can be read: expected {root}/<class>/<image>.")
    return found


__all__ = ["DCViTImageProcessor", "DCViTImageProcessorPil", "ImageFolder", "read_image_folder"]
