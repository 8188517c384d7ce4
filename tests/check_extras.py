"""Installs the package with each extra alone, in an environment of its own, and runs what the extra is for.

    make test-extras                      # all of them; needs a package index, takes minutes
    make test-extras ARGS="base jax"      # some

The wheel is built from the source distribution, and the commands run in a folder with what the documentation tells to
have beside it: the checkpoint and the examples. `base` is the package without extras; it also compares what
`import dcformer` takes with what Transformers' own Llama and the same Auto classes take. Not a test of pytest's: it
downloads.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CHECKPOINT = "checkpoints/dcformer-synthetic"
VOCABULARY = json.loads((REPOSITORY / CHECKPOINT / "config.json").read_text())["vocab_size"]
LIBRARY = """
from transformers import (AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification, AutoModelForTokenClassification)
from transformers.models.llama import modeling_llama
"""
GENERATE = """
import torch, dcformer
torch.manual_seed(0)
config = dcformer.DCFormerConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, sliding_window=8, max_position_embeddings=64)
model = dcformer.DCFormerForCausalLM(config).eval()
out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, min_new_tokens=5, do_sample=False)
assert out.shape == (1, 8), out.shape
print("generated", out[0, 3:].tolist())
"""
# The command, and what its output must hold; a leading "!" means that it must fail, in one line.
PIP_HINT = 'pip install "dcformer[{}]"'
COMMANDS: dict[str, list[tuple[str, str]]] = {
    "base": [
        (f"python -c '{GENERATE}'", "generated"),
        ("dcformer-plan --preset dcformer-405m", "| **total**"),
        (f"dcformer-convert verify {CHECKPOINT} {CHECKPOINT}", "0 different"),
        (f"!dcformer-convert safetensors-to-jax --model {CHECKPOINT} --output j --format pax", PIP_HINT.format("jax")),
        ("!dcformer-eval --tasks dcformer_synthetic_heldout", PIP_HINT.format("eval")),
        ("!dcformer-serve " + CHECKPOINT, "dcformer[serve]"),
        (f"!dcformer-analyze {CHECKPOINT} --text a --output analyzed", PIP_HINT.format("analysis")),
        (f"dcformer-analyze {CHECKPOINT} --diversity", "| qk |"),
        ("!python examples/finetune.py", PIP_HINT.format("train")),
        ("!python examples/demo.py", PIP_HINT.format("synthetic")),
        ("!python examples/digits.py --steps 2 --output digits", PIP_HINT.format("vision")),
        ("python -m dcformer.synthetic --output rows.jsonl --contexts-per-task 1", "Wrote 74 train contexts"),
        ("python -m dcformer.cache_report dcformer-405m", "dcformer-405m"),
        (f"python -m dcformer.publish {CHECKPOINT} hub --remote_code", "README.md"),
    ],
    "kernels": [
        (f"TRITON_INTERPRET=1 dcformer-selfcheck --model {CHECKPOINT} --device cpu --dtype float32", "passed"),
    ],
    "jax": [
        (f"dcformer-convert safetensors-to-jax --model {CHECKPOINT} --output jax --format maxtext", "(maxtext)"),
        (f"dcformer-convert safetensors-to-jax --model {CHECKPOINT} --output pax --format pax", "(pax)"),
        ("dcformer-convert jax-to-safetensors --checkpoint jax --output back", "(native)"),
        (f"dcformer-convert verify {CHECKPOINT} back", "0 different"),
    ],
    "synthetic": [("python examples/demo.py --questions-per-task 1 --show 1", "accuracy: ")],
    "eval": [
        (f"dcformer-eval --model hf --model_args pretrained={CHECKPOINT},backend=causal --limit 8 --batch_size 8 "
         "--tasks dcformer_synthetic_heldout", "dcformer_synthetic_heldout"),
    ],
    "train": [
        ("python examples/finetune.py --config examples/configs/finetune_synthetic.yaml --max_steps 2 --use_cpu "
         "--output_dir tuned", "wrote tuned"),
        ("python examples/finetune.py --config examples/configs/finetune_synthetic.yaml --max_steps 2 --use_cpu "
         "--use_peft --output_dir lora", "wrote lora"),
    ],
    "deepspeed": [  # training with it needs the extra `train` as well
        ("DS_ACCELERATOR=cpu python -c 'import dcformer, deepspeed; print(\"version\", deepspeed.__version__)'",
         "version"),
        ("!python examples/pretrain.py --config examples/configs/pretrain_tiny.yaml --output_dir pretrained",
         PIP_HINT.format("train")),
    ],
    "quantize": [
        (f"""python -c 'import dcformer; from transformers import AutoModelForCausalLM, BitsAndBytesConfig
model = AutoModelForCausalLM.from_pretrained("{CHECKPOINT}", quantization_config=BitsAndBytesConfig(load_in_8bit=True))
import torch
print("logits", tuple(model(torch.tensor([[5, 6, 7]])).logits.shape))'""", f"logits (1, 3, {VOCABULARY})"),
    ],
    "serve": [("serve", "")],
    "vision": [
        ("python examples/digits.py --steps 2 --seeds 0 --output digits", "wrote table.md and digits.svg"),
    ],
    "analysis": [
        (f"dcformer-analyze {CHECKPOINT} --text 'Peter owns the desk.' --target desk --output analyzed", "report.html"),
        ("mkdir -p study && cp docs/study/results.json study/ && python examples/study.py --report --output study",
         "wrote tables.md and study.png"),
    ],
}  # fmt: skip


def run(command: str, work: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, shell=True, cwd=work, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def check(command: str, expected: str, work: Path, environment: dict[str, str]) -> str | None:
    """What is wrong with the command's outcome, or None."""
    if command == "serve":
        return check_server(work, environment)
    fails = command.startswith("!")
    done = run(command.removeprefix("!"), work, environment)
    one_line = not fails or "Traceback" not in done.stdout
    if (done.returncode != 0) == fails and one_line and expected in done.stdout:
        return None
    return f"exit status {done.returncode}, expected {expected!r}:\n{done.stdout[-3000:]}"


def check_server(work: Path, environment: dict[str, str]) -> str | None:
    """Starts the server, asks whether it is well, stops it."""
    with open(work / "server.log", "w") as log:
        command = ["dcformer-serve", CHECKPOINT, "--host", "127.0.0.1", "--port", "8765"]
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    with urllib.request.urlopen("http://127.0.0.1:8765/health", timeout=5) as answer:
                        return None if answer.status == 200 else f"status {answer.status}"
                except OSError:
                    time.sleep(0.5)
        finally:
            process.terminate()
            process.wait()
    return f"no server:\n{(work / 'server.log').read_text()[-3000:]}"


def import_times(environment: dict[str, str], rounds: int = 9) -> None:
    """Prints how long imports take, each in a new process, in turns, so that the machine's load meets both alike.

    Beside wall-clock time the processor's, which other programs on the machine change less.
    """
    programs = {"transformers' Llama and the Auto classes": LIBRARY, "dcformer": "import dcformer"}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(rounds + 1):  # the first round fills the system's caches
        for name, program in programs.items():
            wall, before = time.perf_counter(), os.times()
            subprocess.run([environment["VENV_PYTHON"], "-c", program], env=environment, check=True)
            after = os.times()
            processor = after.children_user + after.children_system - before.children_user - before.children_system
            taken[name].append((time.perf_counter() - wall, processor))
    for kind, number in (("wall-clock", 0), ("processor", 1)):
        times = {name: [pair[number] for pair in pairs[1:]] for name, pairs in taken.items()}
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(f"  import {name}: best {min(seconds):.2f} s, median {median:.2f} s of {rounds}, {kind}")
        theirs, ours = (min(seconds) for seconds in times.values())
        print(f"  difference of the best: {ours - theirs:+.2f} s, {kind}")


def build_wheel(output: Path) -> Path:
    """The wheel, built from the source distribution, which is built from a copy of the repository."""
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(REPOSITORY, output / "source", ignore=ignored)
    for kind, folder in (("sdist", output / "source"), ("wheel", output / "unpacked")):
        code = f"import setuptools.build_meta as b; b.build_{kind}({str(output)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        if kind == "sdist":
            (sdist,) = output.glob("*.tar.gz")
            shutil.unpack_archive(sdist, output / "all")
            (output / "unpacked").symlink_to(next((output / "all").iterdir()))
    (wheel,) = output.glob("*.whl")
    return wheel


def check_extra(extra: str, wheel: Path, folder: Path) -> bool:
    """Whether the extra's environment installs and its commands do what they should."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    binaries = folder / "venv" / "bin"
    wanted = f"dcformer @ {wheel.as_uri()}" if extra == "base" else f"dcformer[{extra}] @ {wheel.as_uri()}"
    install = [binaries / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", REPOSITORY / "constraints.txt", wanted], check=True)
    packages = len(list(folder.glob("venv/lib/python*/site-packages/*.dist-info")))
    print(f"{extra}: installed {packages} packages in {time.perf_counter() - started:.0f} s", flush=True)

    work = folder / "work"
    work.mkdir()
    for name in ("checkpoints", "examples", "docs"):
        shutil.copytree(REPOSITORY / name, work / name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "VENV_PYTHON": str(binaries / "python")}
    passed = True
    for command, expected in COMMANDS[extra]:
        wrong = check(command, expected, work, environment)
        passed = passed and wrong is None
        shown = " ".join(command.split())[:100]
        print(f"  {'ok  ' if wrong is None else 'FAIL'} {shown}" + (f"\n{wrong}" if wrong else ""), flush=True)
    if extra == "base":
        import_times(environment)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"any of {', '.join(COMMANDS)} (default: all)")
    extras = parser.parse_args().extras or list(COMMANDS)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if missing := project["optional-dependencies"].keys() - COMMANDS.keys() - {"dev"}:
        parser.error(f"COMMANDS lacks extras of pyproject.toml: {', '.join(sorted(missing))}")
    if unknown := set(extras) - COMMANDS.keys():
        parser.error(f"no commands for {', '.join(sorted(unknown))}: expected any of {', '.join(COMMANDS)}")
    failed = []
    with tempfile.TemporaryDirectory() as build:
        wheel = build_wheel(Path(build))
        for extra in extras:
            with tempfile.TemporaryDirectory() as folder:
                if not check_extra(extra, wheel, Path(folder)):
                    failed.append(extra)
    print("all passed" if not failed else f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
