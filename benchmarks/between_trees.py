"""Chunked attention of two source trees in turn: whether a change made it faster, whatever else the machine does.

    git worktree add ../before COMMIT
    python benchmarks/between_trees.py ../before/src src

A process for each tree makes the same calls, one at a time and in alternating order: one global layer at the shape of
DCFormer-405M, batch 1, float32. Printed are the median and the shortest of each, and their ratios.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HEADS, HEAD_DIM, HIDDEN = 16, 64, 1024
KINDS = {
    "forward": "no gradients",
    "training": "forward and backward",
    "decoding": "one query",
    "plain forward": "without composition",
    "plain training": "without composition",
}


def serve(tokens: int, threads: int) -> None:
    """Reads kinds of calls from standard input, and prints the seconds that each took."""
    import torch

    from dcformer import DCFormerConfig
    from dcformer.chunked_dcformer import chunked_attention
    from dcformer.compose_dcformer import DCFormerCompose, stages

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1}
    generators = DCFormerCompose(DCFormerConfig(vocab_size=16, **sizes))
    torch.nn.init.normal_(generators.qkw, std=0.02)
    module = torch.nn.Module()
    module.is_causal = True
    hidden = torch.randn(1, tokens, HIDDEN)
    states = [torch.randn(1, HEADS, tokens, HEAD_DIM, requires_grad=True) for _ in range(3)]
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
            output, _ = chunked_attention(module, query, key, value, None, HEAD_DIM**-0.5, pre=pre, post=post)
            if is_training:
                output.sum().backward()
            print(time.perf_counter() - start, flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, help="two folders that hold `dcformer`, the older one first")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=12, help="calls of each kind and tree (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        return serve(options.tokens, options.threads)
    if len(options.trees) != 2 or not all((tree / "dcformer").is_dir() for tree in options.trees):
        parser.error(f"{[str(tree) for tree in options.trees]}: expected two folders that hold `dcformer`")
    command = [sys.executable, __file__, "--serve", f"--tokens={options.tokens}", f"--threads={options.threads}"]
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
