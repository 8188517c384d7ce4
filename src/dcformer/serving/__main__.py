"""``python -m dcformer.serving``: the same as ``dcformer-serve``."""

from dcformer_commands.serve import main

if __name__ == "__main__":
    raise SystemExit(main())
