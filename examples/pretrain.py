"""Trains a DCFormer of a published shape from scratch on texts or conversations.

    python examples/pretrain.py --config examples/configs/pretrain_tiny.yaml --output_dir runs/pretrain
    python examples/pretrain.py --preset dcformer-405m --tokenizer FOLDER --data NAME --streaming --max_steps 1000 \
        --output_dir OUT

Arguments come from the command line, a YAML file, or both; --help lists them, docs/training.md explains them.
"""

import sys

import dcformer  # noqa: F401  # registers the model types


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs it; wrong input ends the program with a message before any training starts."""
    try:
        from dcformer.training import prepare_pretraining, train

        trainer, checkpoint = prepare_pretraining(arguments)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    return train(trainer, checkpoint)


if __name__ == "__main__":
    main()
