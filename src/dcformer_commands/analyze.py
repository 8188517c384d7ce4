"""The command line `dcformer-analyze`."""

import argparse
from collections.abc import Sequence

from . import ends_quietly

_ABOUT = "What a model's composed heads do on a text, or an image: figures, a page, metrics (docs/analysis.md)."
# As `dcformer.analysis` has them; a test compares them.
_FORMS = ("stack", "stack_right", "sum", "head")
_THEMES = ("light", "dark")


@ends_quietly
def main(arguments: Sequence[str] | None = None) -> int:
    """Analyses a model.

    Args:
        arguments: of the command line; the process's when not given.

    Returns:
        0, or 1 on input that cannot be analyzed: then it prints one line, the reason. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(prog="dcformer-analyze", description=_ABOUT)
    parser.add_argument("model", metavar="MODEL", help="model folder, or name on the Hub")
    parser.add_argument("--text", help=r"what the model reads; \n stands for a new line")
    parser.add_argument("--target", help='one token, such as " food": its logit at the end of the text is explained')
    parser.add_argument("--image", help="for models of images: the file")
    parser.add_argument(
        "--output", metavar="FOLDER", help="new folder: figures, report.html, metrics.json, heads.html up to 256 tokens"
    )
    parser.add_argument("--layer", type=int, help="whose entry is shown; default: where heads contribute most")
    parser.add_argument("--query", type=int, default=-1, help="position of the query shown (default: the last)")
    parser.add_argument("--key", type=int, help="position of the key shown; default: where composition changes most")
    parser.add_argument("--theme", choices=_THEMES, default=_THEMES[0], help="of the figures (default: %(default)s)")
    parser.add_argument("--compare", metavar="MODEL", help="another model, whose heads' diversity is shown beside")
    parser.add_argument("--form", choices=_FORMS, default=_FORMS[0], help="of diversity (default: %(default)s)")
    parser.add_argument(
        "--diversity",
        action="store_true",
        help="print diversity only, from the folder's safetensors, one layer at a time; the model is not built",
    )
    options = parser.parse_args(arguments)
    if options.diversity:
        others = ("text", "target", "image", "output", "layer", "key")
        if given := [f"--{name}" for name in others if getattr(options, name) is not None]:
            parser.error(f"--diversity prints, and looks at weights only: leave out {', '.join(given)}")
    elif (options.text is None) == (options.image is None):
        parser.error("give --text or --image, or --diversity")
    elif options.output is None:
        parser.error("--output is required, a new folder")

    from dcformer.analysis.cli import run

    return run(options)


if __name__ == "__main__":
    raise SystemExit(main())
