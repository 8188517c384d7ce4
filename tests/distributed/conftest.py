"""Starts scripts on two processes that talk over gloo, on CPUs."""

import os
import subprocess
import sys

import pytest
from helpers import REPOSITORY


@pytest.fixture(scope="session")
def start():
    """(arguments of Python) -> its output; fails the test where it does not end well."""

    def run(*arguments, timeout=240):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"DS_ACCELERATOR": "cpu"}
        words = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            words, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return done.stdout + done.stderr

    return run
