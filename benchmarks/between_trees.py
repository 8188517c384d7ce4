"""Chunked attention of two source trees in turn: whether a change made it faster, whatever else the machine does.

    git worktree add ../before COMMIT
    python benchmarks/between_trees.py ../before/src src
    python benchmarks/between_trees.py ../before/src src --threads 1 --batch 16 --tokens 128 --heads 12 --head-dim 4

A process for each tree makes the same calls, one at a time and in alternating order: one layer in float32, by default
global, at the shape of DCFormer-405M. Printed are the median and the shortest of each, and their ratios.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

KINDS = {
    "forward": "no gradients",
    "training": "forward and backward",
    "decoding": "one query",
    "plain forward": "without composition",
    "plain training": "without composition",
}


def serve(shape: argparse.Namespace) -> None:
    """Reads kinds of calls from standard input, and prints the seconds that each took."""
    import torch

    from dcformer import DCFormerConfig
    from dcformer.chunked_dcformer import chunked_attention
    from dcformer.compose_dcformer import DCFormerCompose, stages

    torch.set_num_threads(shape.threads)
    torch.manual_seed(0)
    width = shape.heads * shape.head_dim
    sizes = {"hidden_size": width, "num_attention_heads": shape.heads, "num_hidden_layers": 1}
    generators = DCFormerCompose(DCFormerConfig(vocab_size=16, **sizes))
    torch.nn.init.normal_(generators.qkw, std=0.02)
    module = torch.nn.Module()
    module.is_causal = True
    hidden = torch.randn(shape.batch, shape.tokens, width)
    of_states = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    states = [torch.randn(of_states, requires_grad=True) for _ in range(3)]
    for line in sys.stdin:
        kind = line.strip()
        is_training = kind.endswith("training")
        with torch.set_grad_enabled(is_training):
            pre, post = (None, None) if kind.startswith("plain") else stages(generators, generators(hidden))
            query, key, value = states
            if kind == "decoding":
                query = query[:, :, -1:]
                for stage in (pre, post):
                    stage.query.packed = stage.query.packed[..., -1:]
            start = time.perf_counter()
            composed = {"pre": pre, "post": post, "sliding_window": shape.window}
            output, _ = chunked_attention(module, query, key, value, None, shape.head_dim**-0.5, **composed)
            if is_training:
                output.sum().backward()
            print(time.perf_counter() - start, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two folders that hold `dcformer`, the older one first")
    shape = {"batch": 1, "tokens": 2048, "heads": 16, "head-dim": 64, "window": None, "threads": 2}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default or 'all keys'}")
    parser.add_argument("--repeats", type=int, default=12, help="calls of each kind and tree (default: %(default)s)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options)
    if len(options.trees) != 2 or not all((tree / "dcformer").is_dir() for tree in options.trees):
        parser.error(f"{[str(tree) for tree in options.trees]}: expected two folders that hold `dcformer`")
    command = [sys.executable, __file__, "--serve", *(sys.argv[1:] if arguments is None else arguments)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    paths = [os.environ | {"PYTHONPATH": str(tree.resolve())} for tree in options.trees]
    workers = [subprocess.Popen(command, env=environment, **pipes) for environment in paths]

    def ask(worker: subprocess.Popen, kind: str) -> float:
        worker.stdin.write(f"{kind}\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    for kind, meaning in KINDS.items():
        for worker in workers:
            ask(worker, kind)  # warm
        found: list[list[float]] = [[], []]
        for i in range(options.repeats):
            for place in (0, 1) if i % 2 else (1, 0):
                found[place].append(ask(workers[place], kind))
        of_both = [(statistics.median(seconds), min(seconds)) for seconds in found]
        shown = "; ".join(f"median {median * 1e3:.2f} ms, shortest {least * 1e3:.2f} ms" for median, least in of_both)
        ratios = " and ".join(f"{new / old:.2f}" for old, new in zip(*of_both, strict=True))
        print(f"{kind} ({meaning}): {shown}; new / old {ratios}", flush=True)
    for worker in workers:
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
