"""Times the conversions between checkpoint formats on a generated checkpoint, and takes their peak memory.

    python benchmarks/conversion.py                                       # 1.1 GB in float32, a few minutes
    python benchmarks/conversion.py --dtype bfloat16 --layers 24          # another checkpoint
    python benchmarks/conversion.py --smoke                               # a tiny one: does the script run at all
    python benchmarks/conversion.py --markdown                            # table of the last run, nothing is measured

The checkpoint holds random values, which hardly compress. It is written as a model folder and as the authors' PyTorch
folder; the model folder is converted to every other format, and all of them back. Every conversion is a process of its
own, one after the other. What comes back must be equal to the model folder's file, byte by byte; a conversion for which
that fails is reported as failed, and the script exits with status 1. Whether memory stays within its bound is reported,
no more.
"""

import argparse
import filecmp
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cpu_suite import REPOSITORY, describe_machine, describe_versions, table, write_json
from tqdm import tqdm

# torch, transformers and dcformer are imported by the worker processes only. Linux starts a child's peak memory at what
# its parent holds, so the parent has to stay small.

OUTPUT = REPOSITORY / "benchmarks" / "results" / "conversion.json"
SMOKE_OUTPUT = REPOSITORY / "runs" / "conversion_smoke.json"
SEED = 0
MB = 10**6
BOUND_TENSORS, BOUND_MB = 3, 500  # the peak may be that many times the largest stored tensor, and that much more
SMOKE_SIZES = {"layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "heads": 4}

# Format -> its name, and the options with which a model folder is converted to it; None: generated, not converted.
FORMATS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "maxtext": ("MaxText", {"format": "maxtext"}),
    "maxtext-ocdbt": ("MaxText (OCDBT)", {"format": "maxtext", "ocdbt": True}),
    "pax": ("Pax", {"format": "pax"}),
    "hub": ("authors' .bin", None),
}


# --- In the worker ----------------------------------------------------------------------------------------------------


def peak_mb() -> float:
    """Peak resident memory of this process in MB, with the pages of mapped files that it touched."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MB if sys.platform == "darwin" else peak * 1024 / MB


def generate(options: dict[str, Any], folder: str) -> dict[str, Any]:
    """Writes `native` and `hub`, the same random model in two formats."""
    import torch

    from dcformer import DCFormerConfig
    from dcformer.conversion.output import SafetensorsWriter
    from dcformer.formats import FORMATS
    from dcformer.formats.base import native_shapes

    dtype = getattr(torch, options["dtype"])
    config = DCFormerConfig(
        vocab_size=options["vocab_size"],
        hidden_size=options["hidden_size"],
        intermediate_size=options["intermediate_size"],
        num_hidden_layers=options["layers"],
        num_attention_heads=options["heads"],
        architectures=["DCFormerForCausalLM"],
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(SEED)
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
        for name, shape in native_shapes(config).items()
    }
    native, hub = Path(folder, "native"), Path(folder, "hub")
    for place in (native, hub):
        place.mkdir()
        config.save_pretrained(place)
    writer = SafetensorsWriter(native, {name: (t.shape, t.dtype) for name, t in tensors.items()}, "1000GB")
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    fused = [f"layers.{i}.attention.wqkv.weight" for i in range(config.num_hidden_layers)]  # as published
    parts = FORMATS["hub"].parts(config, present=fused)
    stored = {part.name: part.join([tensors[name] for name in part.natives()], config, dtype) for part in parts}
    torch.save(stored, hub / "pytorch_model.bin")
    return {
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "nbytes": sum(tensor.nbytes for tensor in tensors.values()),
    }


def convert(source: str, output: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """Converts to a model folder, or with options to a JAX checkpoint."""
    import tensorstore  # noqa: F401  # imported before the clock starts and the baseline is taken

    from dcformer import conversion

    if options is None:
        is_folder = Path(source, "config.json").is_file() and Path(source, "pytorch_model.bin").is_file()
        function = conversion.convert_hub_to_safetensors if is_folder else conversion.convert_jax_to_safetensors
    else:
        function = conversion.convert_safetensors_to_jax
        if options["format"] == "maxtext":
            import jax  # noqa: F401
            import orbax.checkpoint  # noqa: F401
    imports = peak_mb()
    start, start_cpu = time.perf_counter(), time.process_time()
    report = function(source, output, progress=False, **(options or {}))
    seconds, cpu_seconds, peak = time.perf_counter() - start, time.process_time() - start_cpu, peak_mb()
    infos = [info for place in (source, output) for info in conversion.open_checkpoint(place).source.infos.values()]
    return {
        "nbytes": report.nbytes,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "imports_mb": imports,
        "peak_mb": peak,
        "largest_mb": max(info.nbytes for info in infos) / MB,
    }


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Runs one job in this process."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(job.pop("threads"))
    return {"generate": generate, "convert": convert}[job.pop("task")](**job)


# --- In the parent ----------------------------------------------------------------------------------------------------


def run_worker(job: dict[str, Any]) -> dict[str, Any]:
    """Starts a process for a job and returns its result; never raises for a failed job."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        return {"status": "failed", "detail": f"exit status {process.returncode}: {last}"}
    return {"status": "ok"} | json.loads(process.stdout.splitlines()[-1])


def round_trip(name: str, folder: Path, threads: int) -> dict[str, dict[str, Any]]:
    """Converts the model folder to a format and back, once.

    Returns:
        direction -> result.
    """
    title, options = FORMATS[name]
    native, there, back = folder / "native", folder / name, folder / "back"
    results = {}
    if options is not None:
        job = {"task": "convert", "threads": threads, "source": str(native), "output": str(there), "options": options}
        results[f"safetensors -> {title}"] = run_worker(job)
    if all(result["status"] == "ok" for result in results.values()):
        job = {"task": "convert", "threads": threads, "source": str(there), "output": str(back), "options": None}
        result = run_worker(job)
        files = [place / "model.safetensors" for place in (native, back)]
        if result["status"] == "ok" and not filecmp.cmp(*files, shallow=False):
            result = {"status": "failed", "detail": "what came back differs from the model folder"}
        results[f"{title} -> safetensors"] = result
    shutil.rmtree(back, ignore_errors=True)
    if options is not None:
        shutil.rmtree(there, ignore_errors=True)
    return results


def summarize(direction: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The repeats of a direction as one result: rates of all, the largest peak and the bound."""
    failed = next((run for run in runs if run["status"] != "ok"), None)
    if failed is not None:
        return {"direction": direction, **failed}
    rates = [run["nbytes"] / MB / run["seconds"] for run in runs]
    bound = BOUND_TENSORS * runs[0]["largest_mb"] + BOUND_MB
    peak = max(run["peak_mb"] for run in runs)
    return {
        "direction": direction,
        "status": "ok",
        "nbytes": runs[0]["nbytes"],
        "median_mb_per_s": statistics.median(rates),
        "min_mb_per_s": min(rates),
        "max_mb_per_s": max(rates),
        "median_cpu_s": statistics.median(run["cpu_seconds"] for run in runs),
        "peak_mb": peak,
        "increase_mb": max(run["peak_mb"] - run["imports_mb"] for run in runs),
        "largest_mb": runs[0]["largest_mb"],
        "bound_mb": bound,
        "within_bound": peak <= bound,
        "runs": [{name: run[name] for name in ("seconds", "cpu_seconds", "imports_mb", "peak_mb")} for run in runs],
    }


def run_benchmark(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything, writing the file after each format, and returns its content."""
    names = ("layers", "hidden_size", "intermediate_size", "vocab_size", "heads", "dtype")
    options = {name: getattr(arguments, name) for name in names}
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(
            "safetensors", "tensorstore", "jax", "orbax-checkpoint", script="benchmarks/conversion.py"
        ),
        "options": options
        | {name: getattr(arguments, name) for name in ("formats", "repeats", "threads")}
        | {"seed": SEED},
        "load_average_before": os.getloadavg()[0],
        "results": [],
    }
    with tempfile.TemporaryDirectory(prefix="dcformer-conversion-", dir=arguments.folder) as folder:
        job = {"task": "generate", "threads": arguments.threads, "options": options, "folder": folder}
        content["checkpoint"] = run_worker(job)
        write_json(arguments.output, content)
        if content["checkpoint"]["status"] != "ok":
            return content
        with tqdm(arguments.formats, unit="format", disable=None) as bar:
            for name in bar:
                bar.set_description(name)
                trips = [round_trip(name, Path(folder), arguments.threads) for _ in range(arguments.repeats)]
                for direction in trips[0]:
                    runs = [trip.get(direction, {"status": "failed", "detail": "not reached"}) for trip in trips]
                    content["results"].append(summarize(direction, runs))
                write_json(arguments.output, content)
    return content


def report(content: dict[str, Any]) -> str:
    """The table as Markdown, with what it was measured on."""
    machine, versions, options, checkpoint = (content[k] for k in ("machine", "versions", "options", "checkpoint"))
    if checkpoint["status"] != "ok":
        return f"The checkpoint could not be generated ({checkpoint['detail']})."
    commit = (versions["dcformer_commit"] or "unknown")[:12] + " with changes" * versions[
        "dcformer_changed_since_commit"
    ]
    libraries = ", ".join(
        f"{name} {versions[name]}"
        for name in ("torch", "transformers", "safetensors", "tensorstore", "jax", "orbax-checkpoint")
    )
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {options['threads']} threads; "
        f"Python {versions['python']}, {libraries}; dcformer {commit}; {content['date']}; load average before: "
        f"{content['load_average_before']:.2f}.",
        "",
        f"A model of {options['layers']} layers, hidden size {options['hidden_size']}, MLP width "
        f"{options['intermediate_size']}, vocabulary {options['vocab_size']}: {checkpoint['parameters'] / 1e6:.0f} "
        f"million parameters, {checkpoint['nbytes'] / MB:.0f} MB of random {options['dtype']}.",
        "",
    ]
    rows = []
    for result in content["results"]:
        if result["status"] != "ok":
            rows.append([result["direction"], result["status"], *["-"] * 7])
            continue
        rows.append(
            [
                result["direction"],
                f"{result['median_mb_per_s']:.0f}",
                f"{result['min_mb_per_s']:.0f} - {result['max_mb_per_s']:.0f}",
                f"{result['median_cpu_s']:.1f}",
                f"{result['peak_mb']:.0f}",
                f"{result['increase_mb']:.0f}",
                f"{result['largest_mb']:.0f}",
                f"{result['bound_mb']:.0f}",
                "yes" if result["within_bound"] else "NO",
            ]
        )
    header = ["direction", "MB/s", "min - max", "CPU s", "peak MB", "over imports", "largest tensor", "bound", "within"]
    lines += [
        *table(header, rows),
        "",
        f"MB/s: median of {options['repeats']} runs in fresh processes, without imports; no file is forced to disk. "
        "CPU s: median of the processor time, which says less about what else ran on the machine. "
        "Peak MB: the largest of all runs, of all resident memory, mapped files too. Over imports: less what importing "
        "the libraries took. Largest tensor: of those stored on either side, in MB. Bound: "
        f"{BOUND_TENSORS} times that and {BOUND_MB} MB.",
    ]
    for result in content["results"]:
        if result["status"] != "ok":
            lines.append(f"{result['direction']}: {result['status']} ({result['detail']}).")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=2816)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of torch; TensorStore uses all cores")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to make a temporary folder of four times the checkpoint; default: the system's",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write; default benchmarks/results/conversion.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model; writes runs/conversion_smoke.json")
    parser.add_argument("--markdown", nargs="?", type=Path, const=OUTPUT, metavar="JSON", help="print a file's table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        vars(arguments).update(SMOKE_SIZES, repeats=1)
    arguments.output = arguments.output or (SMOKE_OUTPUT if arguments.smoke else OUTPUT)
    return arguments


def main() -> int:
    """Runs the command line; 1 when a conversion failed."""
    arguments = parse_arguments()
    if arguments.worker:
        print(json.dumps(work(json.loads(arguments.worker))))
        return 0
    if arguments.markdown:
        print(report(json.loads(arguments.markdown.read_text())))
        return 0
    content = run_benchmark(arguments)
    print(report(content))
    return int(any(entry["status"] != "ok" for entry in [content["checkpoint"], *content["results"]]))


if __name__ == "__main__":
    sys.exit(main())
