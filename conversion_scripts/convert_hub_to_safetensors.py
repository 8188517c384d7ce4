"""Converts a folder as the authors publish it to native names and safetensors.

Run with --help for the options; the same as `dcformer-convert hub-to-safetensors`.
"""

import sys

from dcformer_commands.convert import main

if __name__ == "__main__":
    sys.exit(main(command="hub-to-safetensors"))
