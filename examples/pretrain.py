"""Trains a DCFormer of a published size from scratch on texts or conversations.

    python examples/pretrain.py --config examples/configs/pretrain_tiny.yaml --output_dir runs/pretrain
    python examples/pretrain.py --preset dcformer-405m --tokenizer FOLDER --data NAME --streaming --max_steps 1000 \
        --output_dir OUT

Arguments come from the command line, a YAML file, or both; --help lists them, docs/training.md explains them.
"""

import sys

import dcformer  # noqa: F401  # registers the model types
from dcformer.errors import MissingExtraError


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Checks, trains, evaluates and saves.

    Args:
        arguments: the command line, `sys.argv[1:]` when None.

    Returns:
        what `dcformer.training.train` returns: the loss and, with held-out rows, their accuracy before and after.

    Raises:
        SystemExit: on invalid input, with a line that gives the reason, before training starts.
    """
    try:
        from dcformer.training import prepare_pretraining, run_program
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    return run_program(prepare_pretraining, arguments)


if __name__ == "__main__":
    main()
