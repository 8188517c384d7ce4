"""Fine-tunes a DCFormer on texts or conversations: all parameters, or LoRA adapters with --use_peft.

    python examples/finetune.py --config examples/configs/finetune_synthetic.yaml --output_dir runs/finetune
    python examples/finetune.py --model_name_or_path FOLDER --data chats.jsonl --assistant_only_loss --output_dir OUT

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
        from dcformer.training import prepare_finetuning, run_program
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
    return run_program(prepare_finetuning, arguments)


if __name__ == "__main__":
    main()
