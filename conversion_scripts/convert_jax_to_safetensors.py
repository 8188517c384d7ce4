"""Converts a MaxText or Pax checkpoint to a folder that from_pretrained loads.

Run with --help for the options; the same as `dcformer-convert jax-to-safetensors`.
"""

import sys

from dcformer_commands.convert import main

if __name__ == "__main__":
    sys.exit(main(command="jax-to-safetensors"))
