"""The command lines: each reads its arguments first, and imports `dcformer`, and with it PyTorch, when they are right.

A package beside `dcformer`, whose import alone takes seconds: `--help` and wrong usage are answered at once.
"""
