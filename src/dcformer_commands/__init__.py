"""The command lines. Each reads its arguments before it imports `dcformer`, and with it PyTorch.

This package is separate because importing `dcformer` takes seconds: `--help` and wrong usage are answered at once.
"""
