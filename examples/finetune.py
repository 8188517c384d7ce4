"""Fine-tunes a DCFormer on texts or conversations: all weights, or LoRA adapters with --use_peft.

    python examples/finetune.py --config examples/configs/finetune_synthetic.yaml --output_dir runs/finetune
    python examples/finetune.py --model_name_or_path FOLDER --data chats.jsonl --assistant_only_loss --output_dir OUT

Arguments come from the command line, a YAML file, or both; --help lists them, docs/training.md explains them.
"""

import sys

import dcformer  # noqa: F401  # registers the model types


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Runs it; wrong input ends the program with a message before any training starts."""
    try:
        from dcformer.training import prepare_finetuning, train

        trainer, checkpoint = prepare_finetuning(arguments)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    return train(trainer, checkpoint)


if __name__ == "__main__":
    main()
