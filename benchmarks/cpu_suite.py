"""Times prefill, decoding and training on this machine's CPU, beside Llama of the same sizes.

    python benchmarks/cpu_suite.py                                  # everything, a quarter of an hour on two cores
    python benchmarks/cpu_suite.py --shapes 405m-layers --lengths 2048     # only what the goals are about
    python benchmarks/cpu_suite.py --smoke                          # tiny shapes: does the script run at all
    python benchmarks/cpu_suite.py --markdown                       # tables of the last run, nothing is measured

Every measurement, one of (shape, tokens, section, implementation), is a process of its own, one after the other, so
that no measurement inherits memory or warm caches from another. Before anything of a shape is timed, another process
compares "dcformer_chunked" with "eager" (outputs, a decoding step and all gradients); on a mismatch the shape's
DCFormer measurements are refused and the script exits with status 1. Goals met or missed are reported, no more.
"""

import argparse
import gc
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# torch, transformers and dcformer are imported by the worker processes only. Linux starts a child's peak memory at what
# its parent holds, so the parent has to stay small.

REPOSITORY = Path(__file__).resolve().parent.parent
OUTPUT = REPOSITORY / "benchmarks" / "results" / "cpu_suite.json"
SMOKE_OUTPUT = REPOSITORY / "runs" / "cpu_suite_smoke.json"
SEED = 0
MIB = 1 << 20

# Shape -> preset and what is changed of it (layer types alternate, local first, as in the full models). In so few
# layers the output projection weighs more than in a full model and hides them: "405m-layers" has a small one.
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "405m-layers": ("dcformer-405m", {"num_hidden_layers": 4, "vocab_size": 1024}),
    "405m": ("dcformer-405m", {"num_hidden_layers": 4}),
    "2.8b": ("dcformer-2.8b", {"num_hidden_layers": 2}),
}
SMOKE_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 16,
}
IMPLEMENTATIONS = ("llama", "dcformer_chunked", "eager")
SECTIONS = {
    "prefill": "Forward pass over the prompt, batch 1, with a new DynamicCache, logits of the last token, no gradients",
    "decode": "One step with the cache as `generate` does it: one token, the mask and cache one longer, greedy choice",
    "training": "Forward pass with labels over all tokens, backward pass, gradients freed; no optimizer step",
    "compile": "First training step of a model of 2 layers under torch.compile(fullgraph=True): the compiler's time",
}
COMPILED = ("llama", "dcformer_chunked")
WARM_UP_TOKENS = 512  # at most; the warm-up repeats the task on the first tokens only
WARM_UP_STEPS = 3
CHECK_TOKENS = 300  # longer than the window, more than two blocks of queries, the last one ragged


@dataclass(frozen=True)
class Goal:
    """A bound on ours over Llama at T = 2048. `authors`: their PyTorch code, same measure, at the 405M shape."""

    section: str
    measure: str
    bound: float
    authors: float | None = None
    shape: str = "405m-layers"
    tokens: int = 2048


GOALS = (
    Goal("prefill", "median_s", 1.12),
    Goal("decode", "median_s", 1.06),
    Goal("training", "median_s", 1.15),
    Goal("compile", "median_s", 2.0),
    Goal("prefill", "median_s", 1.8, 18.0, "405m"),
    Goal("decode", "median_s", 1.25, 1.9, "405m"),
    Goal("training", "median_s", 1.8, 2.6, "405m"),
    Goal("training", "peak_mib", 1.4, 3.9, "405m"),
)


@dataclass(frozen=True)
class Job:
    """What one worker process does. `section` is one of SECTIONS, or "check"."""

    section: str
    shape: str
    tokens: int
    implementation: str
    repeats: int
    decode_steps: int
    seconds: float
    threads: int
    memory_limit: int | None

    def coordinates(self) -> dict[str, Any]:
        """What tells results apart."""
        return {name: getattr(self, name) for name in ("section", "shape", "tokens", "implementation")}

    def __str__(self) -> str:
        return f"{self.section} {self.shape} T={self.tokens} {self.implementation}"


# --- In the worker ----------------------------------------------------------------------------------------------------


def build_model(job: Job, **sizes: Any) -> Any:
    """The causal language model of a job, randomly initialized, float32."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    import dcformer

    if job.shape == "smoke":
        config = dcformer.DCFormerConfig(**(SMOKE_SIZES | sizes))
    else:
        preset, changes = SHAPES[job.shape]
        config = dcformer.DCFormerConfig.from_preset(preset, **(changes | sizes))
    attention = job.implementation
    if job.implementation == "llama":
        attention = "sdpa"
        config = LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def make_tokens(model: Any, length: int) -> Any:
    """Random token ids [1, T], the same for every implementation of a shape."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator)


def prefill(model: Any, ids: Any) -> Any:
    """Processes a prompt; returns the output with its cache."""
    import torch

    with torch.no_grad():
        return model(ids, use_cache=True, logits_to_keep=1)


def training_step(model: Any, ids: Any) -> None:
    """Forward and backward pass. Checks nothing but that the loss is finite."""
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the loss is {loss.item()}")
    model.zero_grad(set_to_none=True)


class Decoder:
    """Greedy decoding behind a prompt, a step at a time, with the inputs that `generate` passes to the model."""

    def __init__(self, model: Any, ids: Any):
        import torch

        self.model = model
        output = prefill(model, ids)
        self.cache = output.past_key_values
        self.token = output.logits[:, -1].argmax(-1, keepdim=True)
        self.mask = torch.ones_like(ids)

    def step(self) -> None:
        """Appends one token to the cache and chooses the next."""
        import torch

        with torch.no_grad():
            position = torch.tensor([[self.mask.shape[1]]])
            self.mask = torch.cat([self.mask, self.mask.new_ones(1, 1)], dim=1)
            output = self.model(
                self.token,
                attention_mask=self.mask,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.token = output.logits[:, -1].argmax(-1, keepdim=True)


def time_repeats(call: Callable[[], Any], repeats: int, seconds: float) -> list[float]:
    """Durations of up to `repeats` calls; after two of them no new one begins once `seconds` are spent."""
    samples: list[float] = []
    while len(samples) < repeats and (len(samples) < 2 or sum(samples) < seconds):
        gc.collect()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return samples


def peak_mib() -> float:
    """Peak resident memory of this process since its start or the last `forget_peak`, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def forget_peak() -> bool:
    """Sets the peak back to what is resident now. False where the system cannot: the peak then includes the set-up."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def measure(job: Job) -> dict[str, Any]:
    """Times one job and takes its peak memory, the warm-up's included, the set-up's (model, cached prompt) not."""
    model = build_model(job, **({"num_hidden_layers": 2} if job.section == "compile" else {}))
    ids = make_tokens(model, job.tokens)
    if job.section == "compile":
        import torch

        task = warm_up_task = partial(training_step, torch.compile(model.train(), fullgraph=True), ids)
        warm_ups, repeats = 0, 1
    elif job.section == "decode":
        model.eval()
        decoder = Decoder(model, ids)
        task = warm_up_task = decoder.step
        warm_ups, repeats = WARM_UP_STEPS, job.decode_steps
    else:
        model.train(job.section == "training")
        call = training_step if job.section == "training" else prefill
        task, warm_up_task = partial(call, model, ids), partial(call, model, ids[:, :WARM_UP_TOKENS])
        warm_ups, repeats = 1, job.repeats
    peak_is_reset = forget_peak()
    baseline = peak_mib()
    for _ in range(warm_ups):
        warm_up_task()
    samples = time_repeats(task, repeats, job.seconds)
    peak = peak_mib()
    if job.section == "decode":
        length, expected = decoder.cache.get_seq_length(), job.tokens + warm_ups + len(samples)
        if length != expected:
            raise RuntimeError(f"the cache holds {length} tokens after decoding, expected {expected}")
    quarters = statistics.quantiles(samples if len(samples) > 1 else samples * 2, n=4, method="inclusive")
    return {
        "status": "ok",
        "parameters": model.num_parameters(),
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "q25_s": quarters[0],
        "q75_s": quarters[2],
        "max_s": max(samples),
        "baseline_mib": baseline,
        "peak_mib": peak,
        "increase_mib": peak - baseline,
        "peak_without_setup": peak_is_reset,
        "samples_s": samples,
    }


def outputs_of(model: Any, ids: Any) -> dict[str, Any]:
    """All that the check compares: logits, those of a decoding step behind a cached prompt, and every gradient."""
    import torch

    model.eval()
    with torch.no_grad():
        found = {"logits": model(ids).logits}
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        found["decoding logits"] = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits
    model(ids, labels=ids, use_cache=False).loss.backward()
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {name: tensor.double() for name, tensor in found.items()}


def check(job: Job) -> dict[str, Any]:
    """Compares "dcformer_chunked" with "eager" at a shape: one local and one global layer, and a small vocabulary.

    The yardstick is eager in float64. Chunked in float32 may be twice as far from it as eager in float32 is, in the
    Euclidean norm of each tensor, plus a rounding band of 4 units in the last place of that tensor's norm.
    """
    import torch

    model = build_model(job, num_hidden_layers=2, vocab_size=512)
    ids = make_tokens(model, CHECK_TOKENS)
    eager = outputs_of(model, ids)
    model.set_attn_implementation("dcformer_chunked")
    chunked = outputs_of(model, ids)
    model.set_attn_implementation("eager")
    exact = outputs_of(model.double(), ids)
    if not exact.keys() == eager.keys() == chunked.keys():
        return {"status": "failed", "detail": "different parameters have gradients"}
    shares = {}
    for name, truth in exact.items():
        allowed = 2 * (eager[name] - truth).norm() + 4 * torch.finfo(torch.float32).eps * truth.norm()
        error = (chunked[name] - truth).norm()
        shares[name] = float(error / allowed) if allowed > 0 else (0.0 if error == 0 else math.inf)
    worst = max(shares, key=lambda name: math.inf if math.isnan(shares[name]) else shares[name])
    detail = f"{len(shares)} tensors; the worst, {worst}, is at {shares[worst]:.2f} of the error allowed"
    return {"status": "ok" if shares[worst] <= 1 else "failed", "detail": detail}


def work(job: Job) -> dict[str, Any]:
    """Runs one job in this process."""
    if job.memory_limit is not None and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (job.memory_limit, job.memory_limit))
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(job.threads)
    try:
        return check(job) if job.section == "check" else measure(job)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        limit = "there is" if job.memory_limit is None else f"the limit of {job.memory_limit / MIB:.0f} MiB"
        return {"status": "out of memory", "detail": f"needs more than {limit}"}


# --- In the parent ----------------------------------------------------------------------------------------------------


def run_worker(job: Job) -> dict[str, Any]:
    """Starts a process for a job and returns its result with the job's coordinates; never raises for a failed job."""
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(asdict(job))]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # or the compiler remembers the run before
    start = time.perf_counter()
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        result = {"status": "failed", "detail": f"exit status {process.returncode}: {last}"}
    else:
        result = json.loads(process.stdout.splitlines()[-1])
    return job.coordinates() | result | {"process_s": time.perf_counter() - start}


def memory_limit(gib: float | None) -> int | None:
    """Bytes that a worker may hold: as asked for, else what is free now less 1 GiB; None where that cannot be told."""
    if gib is not None:
        return int(gib * 1024 * MIB)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free_kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return (free_kib - (1 << 20)) * 1024


def describe_machine() -> dict[str, Any]:
    """Processor and memory, without names of hosts or users."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / MIB
    return {"processor": processor, "cores": os.cpu_count(), "memory_gib": round(memory / 1024, 1)}


def describe_versions(*libraries: str, script: str = "benchmarks/cpu_suite.py") -> dict[str, Any]:
    """Python, the libraries that matter here, and the commit measured."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(("git", *arguments), cwd=REPOSITORY, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        **{library: version(library) for library in libraries},
        "system": f"{platform.system()} {platform.machine()}",
        "dcformer_commit": git("rev-parse", "HEAD"),
        "dcformer_changed_since_commit": bool(git("status", "--porcelain", "--", "src", script)),
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, path)


def read_json(path: Path, keys: set[str]) -> dict[str, Any]:
    """What a run has written.

    Raises:
        ValueError: where nothing can be read, or it is not such a run, which has these keys.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"no run can be read there, {error}") from error
    if not (isinstance(content, dict) and keys <= content.keys()):
        raise ValueError(f"expected the JSON of an earlier run, with {', '.join(sorted(keys))}")
    return content


def plan_jobs(arguments: argparse.Namespace) -> list[Job]:
    """Checks of a shape first, then its measurements; those that are compared with each other run side by side."""
    jobs, limit = [], memory_limit(arguments.memory_limit)
    for shape in arguments.shapes:
        cells = [("check", CHECK_TOKENS, "eager")] if set(arguments.implementations) != {"llama"} else []
        cells += [
            (section, tokens, implementation)
            for tokens in arguments.lengths
            for section in arguments.sections
            for implementation in arguments.implementations
            if section != "compile" or implementation in COMPILED
        ]
        for section, tokens, implementation in cells:
            jobs.append(
                Job(
                    section,
                    shape,
                    tokens,
                    implementation,
                    repeats=arguments.repeats or (5 if tokens <= 512 else 3),
                    decode_steps=arguments.decode_steps,
                    seconds=arguments.seconds,
                    threads=arguments.threads,
                    memory_limit=limit,
                )
            )
    return jobs


def run_suite(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs all jobs, writing the file after each, and returns its content."""
    jobs = plan_jobs(arguments)
    limit = jobs[0].memory_limit
    content: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "options": {
            name: getattr(arguments, name)
            for name in ("sections", "shapes", "lengths", "implementations", "repeats", "decode_steps", "seconds")
        }
        | {"threads": arguments.threads, "dtype": "float32", "seed": SEED}
        | {"memory_limit_mib": None if limit is None else limit // MIB},
        "load_average_before": os.getloadavg()[0],
        "checks": [],
        "results": [],
    }
    unsound: set[str] = set()
    from tqdm import tqdm  # what a GPU's first run takes from here needs none

    with tqdm(jobs, unit="job", disable=None) as bar:
        for job in bar:
            bar.set_description(str(job))
            if job.implementation != "llama" and job.shape in unsound:
                result = job.coordinates() | {"status": "refused", "detail": "the check of this shape did not pass"}
            else:
                result = run_worker(job)
            content["checks" if job.section == "check" else "results"].append(result)
            if job.section == "check" and result["status"] != "ok":
                unsound.add(job.shape)
            write_json(arguments.output, content)
            took = f"median {seconds_text(result['median_s'])}" if "median_s" in result else result["detail"]
            bar.write(f"{job}: {result['status']}, {took}", file=sys.stderr)
    return content


# --- Tables -----------------------------------------------------------------------------------------------------------


def seconds_text(seconds: float) -> str:
    """Three digits, in ms below a second."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns; the first two columns to the left, numbers to the right."""
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]
    rule = ["-" * width if i < 2 else "-" * (width - 1) + ":" for i, width in enumerate(widths)]
    aligned = [
        [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in [header, rule, *rows]
    ]
    return [f"| {' | '.join(row)} |" for row in aligned]


def find(content: dict[str, Any], **coordinates: Any) -> dict[str, Any] | None:
    """The successful result at the given section, shape, tokens and implementation, or None."""
    for result in content["results"]:
        if result["status"] == "ok" and all(result[name] == value for name, value in coordinates.items()):
            return result
    return None


def section_table(content: dict[str, Any], section: str) -> list[str]:
    """The table of one section, with ratios to Llama of the same shape and length."""
    header = [
        "shape, T",
        "implementation",
        "median",
        "×Llama",
        "min",
        "25-75%",
        "n",
        "peak MiB",
        "×Llama",
        "increase MiB",
    ]
    rows = []
    for result in (r for r in content["results"] if r["section"] == section):
        coordinates = {name: result[name] for name in ("section", "shape", "tokens")}
        row = [f"{result['shape']}, {result['tokens']}", result["implementation"]]
        if result["status"] != "ok":
            rows.append([*row, result["status"], *["-"] * 7])
            continue
        llama = find(content, **coordinates, implementation="llama")
        ratios = [f"{result[m] / llama[m]:.2f}" if llama else "-" for m in ("median_s", "peak_mib")]
        quartiles = f"{seconds_text(result['q25_s'])} - {seconds_text(result['q75_s'])}"
        row += [seconds_text(result["median_s"]), ratios[0], seconds_text(result["min_s"]), quartiles]
        row += [str(len(result["samples_s"])), f"{result['peak_mib']:.0f}", ratios[1], f"{result['increase_mib']:.0f}"]
        rows.append(row)
    return table(header, rows) if rows else ["not measured"]


def goal_table(content: dict[str, Any]) -> list[str]:
    """What was aimed for and what was reached: ours over Llama."""
    rows = []
    for goal in GOALS:
        place = {"section": goal.section, "shape": goal.shape, "tokens": goal.tokens}
        ours, llama = (find(content, **place, implementation=name) for name in ("dcformer_chunked", "llama"))
        measure_name = "peak memory" if goal.measure == "peak_mib" else "time"
        authors = "-" if goal.authors is None else f"{goal.authors}x"
        ratio = ours[goal.measure] / llama[goal.measure] if ours and llama else None
        verdict = "not measured" if ratio is None else "met" if ratio <= goal.bound else "missed"
        reached = "-" if ratio is None else f"{ratio:.2f}x"
        rows.append([f"{goal.shape}, {goal.section}", measure_name, f"{goal.bound}x", reached, verdict, authors])
    return table(["T = 2048", "", "goal", "reached", "", "authors' PyTorch code"], rows)


def report(content: dict[str, Any]) -> str:
    """All tables as Markdown, each with what it measures, and what it was measured on."""
    machine, versions, options = content["machine"], content["versions"], content["options"]
    commit = (versions["dcformer_commit"] or "unknown")[:12] + " with changes" * versions[
        "dcformer_changed_since_commit"
    ]
    lines = [
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {options['threads']} threads, "
        f"float32; Python {versions['python']}, torch {versions['torch']}, transformers {versions['transformers']}; "
        f"dcformer {commit}; {content['date']}; load average before: {content['load_average_before']:.2f}.",
        "",
    ]
    for section in (name for name in SECTIONS if name in options["sections"]):
        lines += [f"### {section.capitalize()}", "", f"{SECTIONS[section]}.", ""]
        lines += [*section_table(content, section), ""]
    lines += ["### Goals", "", "dcformer_chunked over Llama, medians and absolute peaks.", "", *goal_table(content), ""]
    lines += [f"Check {c['shape']}: {c['status']} ({c['detail']})." for c in content["checks"]]
    for result in (r for r in content["results"] if r["status"] != "ok"):
        coordinates = f"{result['section']} {result['shape']} T={result['tokens']} {result['implementation']}"
        lines.append(f"{coordinates}: {result['status']} ({result['detail']}).")
    return "\n".join(lines).rstrip()


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048], help="tokens of prompt or text")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--repeats", type=int, help="prefills and training steps timed; default 5 to T = 512, then 3")
    parser.add_argument("--decode-steps", type=int, default=30, help="decoding steps timed")
    parser.add_argument(
        "--seconds", type=float, default=30, help="no repeat but the first two begins after this much timed work"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--memory-limit", type=float, metavar="GIB", help="of a worker; default: free memory less 1 GiB"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write; default benchmarks/results/cpu_suite.json")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape instead; writes runs/cpu_suite_smoke.json")
    parser.add_argument("--markdown", nargs="?", type=Path, const=OUTPUT, metavar="JSON", help="print tables of a file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.shapes, arguments.lengths = ["smoke"], [32, 64]
    arguments.output = arguments.output or (SMOKE_OUTPUT if arguments.smoke else OUTPUT)
    return arguments


def main() -> int:
    """Runs the command line; 1 when a check or a measurement failed."""
    arguments = parse_arguments()
    if arguments.worker:
        print(json.dumps(work(Job(**json.loads(arguments.worker)))))
        return 0
    if arguments.markdown:
        print(report(json.loads(arguments.markdown.read_text())))
        return 0
    content = run_suite(arguments)
    print(report(content))
    return int(any(entry["status"] in ("failed", "refused") for entry in content["checks"] + content["results"]))


if __name__ == "__main__":
    sys.exit(main())
