"""``python -m dcformer.publish``."""

from .folder import main

if __name__ == "__main__":
    raise SystemExit(main())
