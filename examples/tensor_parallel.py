"""Generates with a model whose layers are split over several devices (tensor parallelism), one process per device.

    torchrun --nproc_per_node 2 examples/tensor_parallel.py --model FOLDER --prompt "Once upon a time"

Every process generates the same tokens; the first one prints them. `compose_groups` and `num_key_value_heads` of the
model must be multiples of the number of processes (docs/scale_out.md).
"""

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import dcformer  # noqa: F401  # registers the model types
from dcformer.errors import DCFormerError, refused
from dcformer.loading import LOADING_ERRORS


def generate(model: str, prompt: str, max_new_tokens: int) -> str:
    """Continues a text, greedily.

    Args:
        model: folder of a checkpoint with a tokenizer, or its name on the Hub.
        prompt: the text.
        max_new_tokens: the most tokens to generate.

    Returns:
        What follows the prompt.

    Raises:
        DCFormerError: when the model or tokenizer cannot be loaded, or heads cannot be split over the processes.
    """
    with refused(*LOADING_ERRORS):
        tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", distributed_config=DistributedConfig(tp_plan="auto")
        )
    batch = tokenizer(prompt, return_tensors="pt").to(loaded.device)
    with torch.no_grad():
        tokens = loaded.generate(**batch, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: the arguments; the process's when not given.

    Returns:
        0, or 1 when the model cannot be loaded or split, or without torchrun. Wrong usage exits with 2.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint with tokenizer, or its name on the Hub")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max_new_tokens", type=int, default=32, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        print("error: one process splits nothing: start this by torchrun --nproc_per_node 2 ...", file=sys.stderr)
        return 1
    try:
        text = generate(options.model, options.prompt, options.max_new_tokens)
    except DCFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if dist.get_rank() == 0:
        print(text)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
