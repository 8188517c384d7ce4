"""What a worker of `study.as_trained` does in a test: on its own, so that workers need not import what tests do."""

import time


def train_or_fail(settings: dict, folder: str) -> dict:
    """The first fails at once, others take a moment."""
    if settings["number"] == 0:
        raise RuntimeError("the first")
    time.sleep(1)
    return settings
