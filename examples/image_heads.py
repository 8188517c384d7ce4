"""Where the heads of a DCViT look on an image, before and after composition: a digit, in one picture.

    python examples/image_heads.py --output digit.png      # trains a small model on the digits first, about a minute

The model is the one of examples/digits.py with all of composition; the digits are scikit-learn's, 8x8 pixels, in
patches of 2x2. The query is the patch with the most ink.
"""

import argparse
from pathlib import Path

import torch
from digits import BATCH_SIZE, LEARNING_RATE, STEPS, load_digits, make_model, optimizer_of
from tqdm import tqdm
from transformers import set_seed

from dcformer.analysis import plots, trace
from dcformer.errors import MissingExtraError


def train(images: torch.Tensor, labels: torch.Tensor, steps: int, seed: int):
    """A DCViT that knows the digits, with eager attention."""
    set_seed(seed)
    model = make_model("dcvit", images, labels)
    model.set_attn_implementation("eager")
    optimizer = optimizer_of(model, LEARNING_RATE)
    for _ in tqdm(range(steps), desc="training"):
        batch = torch.randint(len(labels), (BATCH_SIZE,))
        model(pixel_values=images[batch], labels=labels[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main(arguments: list[str] | None = None) -> float:
    """Writes the picture; returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digit", type=int, default=3, help="which digit is shown (default: %(default)s)")
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--output", type=Path, default=Path("digit.png"))
    options = parser.parse_args(arguments)
    if not options.output.resolve().parent.is_dir():
        parser.error(f"--output {options.output}: there is no folder {options.output.resolve().parent}")
    if options.steps < 1 or options.digit not in range(10):
        parser.error(f"--steps {options.steps} --digit {options.digit}: expected at least one step, and a digit")
    try:
        (images, labels), (test_images, test_labels) = load_digits()
    except MissingExtraError as error:
        parser.error(str(error))
    model = train(images, labels, options.steps, options.seed)
    with torch.no_grad():
        right = (model(pixel_values=test_images).logits.argmax(-1) == test_labels).float().mean().item()
    image = test_images[test_labels == options.digit][:1]  # [1, 1, 8, 8]
    run = trace(model, image)
    ink = torch.nn.functional.avg_pool2d(image, image.shape[-1] // run.grid[1]).flatten(1)  # [1, patches]
    figure = plots.attention_over_image(
        run, image[0, 0], options.layer, int(ink.argmax()) + run.length - ink.shape[1], theme=options.theme
    )
    figure.savefig(options.output, dpi=100)
    print(f"{right:.1%} of {len(test_labels)} test images right; wrote {options.output}")
    return right


if __name__ == "__main__":
    main()
