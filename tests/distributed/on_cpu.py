"""Runs a script with FSDP or DeepSpeed on CPUs: `accelerate launch --config_file ... on_cpu.py SCRIPT ARGUMENTS`.

accelerate 1.15 takes their settings into account only where each process has an accelerator. Here it is told that each
has, of processes on CPUs that talk over gloo; all else is accelerate's, DeepSpeed's and PyTorch's own. DeepSpeed has an
accelerator of that kind, `DS_ACCELERATOR=cpu`.
"""

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

initialize = PartialState.__init__


def on_cpu(self, cpu=False, **kwargs):
    initialize(self, True, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU:
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        self.distributed_type = DistributedType.DEEPSPEED if deepspeed else DistributedType.MULTI_GPU


if __name__ == "__main__":
    PartialState.__init__ = on_cpu
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
