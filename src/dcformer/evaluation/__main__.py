"""``python -m dcformer.evaluation``: the same as ``dcformer-eval``."""

import sys

from dcformer_commands.eval import main

if __name__ == "__main__":
    sys.exit(main())
