"""Converts a model folder to a MaxText or Pax checkpoint.

Run with --help for the options; the same as `dcformer-convert safetensors-to-jax`.
"""

import sys

from dcformer_commands.convert import main

if __name__ == "__main__":
    sys.exit(main(command="safetensors-to-jax"))
