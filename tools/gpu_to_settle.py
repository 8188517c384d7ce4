"""What only a GPU can settle about the kernels, as a table: each risk of their design, its limit and the way out.

`settle` judges every row from what `gpu_first_run.py` has measured, its JSON, and chooses among the ways out of a row
that fails: the one that was measured to help most, otherwise the first that was not measured. Importing this needs no
torch; kernels' bounds come from `kernel_roofline.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

Content = dict[str, Any]  # of the JSON file
SIZE, TOKENS = "6.9b", 2048  # what section "kernels" profiles: one sequence
_GLOBAL = f"kernels {SIZE} attention, global"
COMPOSITION = ("lse_kernel", "compose_kernel", "back_1_kernel", "back_0_kernel")
PRODUCTS = ("scores_kernel", "values_kernel", "keys_kernel")
# Most instructions of one warp per query, key and head in the inner loop, and whether it may spill; sm_90, 32 heads.
COMPILED = {"lse": (0.55, False), "compose": (0.80, False), "back_1": (1.80, True), "back_0": (1.55, True)}
_HELPS = 1.02  # times as fast: less is noise
_SEARCH = "make gpu-first-run ARGS='--resume --sections tune'"


class NotMeasured(Exception):  # noqa: N818 - not an error
    """A figure that a row needs is not there; says which, and why."""


@dataclass(frozen=True)
class Measured:
    """What a row was found to be: at most its limit, or not. `evidence` says it in words."""

    value: float
    evidence: str


@dataclass(frozen=True)
class Fallback:
    """A way out.

    Attributes:
        what: is done instead.
        setting: the command or the entry that applies it; "" where it takes a change of code.
        gain: times as fast as now, as measured; None for what no section measures.
    """

    what: str
    setting: str = ""
    gain: Callable[[Content], float] | None = None


@dataclass(frozen=True)
class Row:
    """A risk.

    Attributes:
        risk: what may be wrong.
        how: what is measured, and by which section.
        limit: up to which it is met.
        measure: finds it in the JSON file.
        fallbacks: ways out, the first to be tried first.
    """

    risk: str
    how: str
    limit: float
    measure: Callable[[Content], Measured]
    fallbacks: tuple[Fallback, ...] = field(default=())


# --- figures ----------------------------------------------------------------------------------------------------------


def section(content: Content, name: str) -> dict[str, Any]:
    """A section's part of the file.

    Raises:
        NotMeasured: when it has not been run.
    """
    part = content["sections"].get(name)
    if part is None:
        raise NotMeasured(f"section {name} has not been run")
    return part


def cell(content: Content, section_name: str, name: str) -> dict[str, Any]:
    """A cell of a section of `gpu_suite.py`.

    Raises:
        NotMeasured: when it is not there, or its figures do not count.
    """
    part = section(content, section_name)
    for found in part.get("cells", ()):
        if found["name"] == name:
            if found["status"] != "ok":
                raise NotMeasured(": ".join(filter(None, (name, found["status"], found.get("detail")))))
            return found
    raise NotMeasured(f"section {section_name} ({part['status']}) has no {name!r}")


def device_figures(content: Content) -> tuple[Any, str]:
    """The roofline's device and what is known of it: the assumed figures of a known one, otherwise what was measured.

    Raises:
        NotMeasured: when it is neither known nor measured.
    """
    import kernel_roofline

    name = content["about"]["device"]
    is_90 = content["about"].get("capability", "9.0") == "9.0"
    issued = "" if is_90 else ", with the instructions that were counted for sm_90"
    for known, gpu in kernel_roofline.DEVICES.items():
        if known in name:
            return gpu, f"bounds at the assumed rates of an {known}{issued}"
    rates = cell(content, "kernels", "kernels rates")
    if missing := [key for key in ("memory_bytes_per_s", "cache_bytes_per_s", "flops_per_s") if key not in rates]:
        raise NotMeasured(f"no figures of {name!r} are known, and {', '.join(missing)} could not be measured")
    gpu = kernel_roofline.device(
        name, content["about"].get("multiprocessors", 132), tensor=rates["flops_per_s"],
        l2=rates["cache_bytes_per_s"], hbm=rates["memory_bytes_per_s"],
    )  # fmt: skip
    return gpu, f"bounds at the rates measured here, at 1.7 GHz{issued}"


def kernel_times(content: Content, name: str = _GLOBAL) -> dict[str, float]:
    """Microseconds of each of our kernels in a forward and a backward pass of attention, all launches together."""
    found: dict[str, float] = {}
    for kernel in cell(content, "kernels", name)["kernels"]:
        if function := re.match(r"\w*?_kernel", kernel["kernel"]):  # Triton may add to the name
            found[function[0]] = found.get(function[0], 0.0) + kernel["us"]
    return found


def bounds(content: Content, tokens: int = TOKENS, window: int | None = None) -> dict[str, dict[str, float]]:
    """What each of our kernels needs by the roofline: microseconds by resource, and "bound"."""
    import kernel_roofline

    gpu, _ = device_figures(content)
    times = kernel_roofline.function_times(kernel_roofline.SHAPES[SIZE.upper()], tokens, window, gpu)
    return {name: {k: 1e6 * seconds for k, seconds in needed.items()} for name, needed in times.items()}


def ratios(content: Content, names: tuple[str, ...] | None = None) -> dict[str, float]:
    """Time over bound of our kernels, by name.

    Raises:
        NotMeasured: when one of `names` is missing in the profile.
    """
    times, needed = kernel_times(content), bounds(content)
    if missing := [name for name in names or () if name not in times]:
        raise NotMeasured(f"{', '.join(missing)} not among the kernels that the profiler saw in {_GLOBAL!r}")
    return {name: times[name] / needed[name]["bound"] for name in names or needed if name in times}


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name.removesuffix('_kernel')} {value:.2f}" for name, value in values.items())


# --- rows -------------------------------------------------------------------------------------------------------------


def _over_bounds(content: Content, *, names: tuple[str, ...]) -> Measured:
    """The largest ratio of some kernels."""
    found = ratios(content, names)
    return Measured(max(found.values()), f"{_listed(found)} times the bound")


def _all_late(content: Content) -> Measured:
    """The smallest ratio of all kernels, and what the device's memory did."""
    found = ratios(content, COMPOSITION + PRODUCTS)
    gpu, _ = device_figures(content)
    evidence = f"between {min(found.values()):.2f} and {max(found.values()):.2f} times the bound"
    try:
        rate = cell(content, "kernels", "kernels rates").get("memory_bytes_per_s")
    except NotMeasured:
        rate = None
    if rate is not None:
        evidence += f"; a copy moves {rate / 1e12:.2f} TB/s, {gpu.hbm / 1e12:.2f} assumed"
    return Measured(min(found.values()), evidence)


def _waits_for_cache(content: Content) -> Measured:
    """Time of `compose` and `weights`, one function, over what they would need if second-level cache cost nothing."""
    ratios(content, ("compose_kernel",))  # there is one
    time, needed = kernel_times(content)["compose_kernel"], bounds(content)["compose_kernel"]
    other = max(value for name, value in needed.items() if name not in ("bound", "L2"))
    return Measured(time / other, f"{time:.0f} us; {needed['L2']:.0f} us for the cache, {other:.0f} us for all else")


def _tails(content: Content) -> Measured:
    """How much further from its bounds a short sequence is than one of twice its length."""
    short, over = TOKENS // 2, {}
    for tokens, name in ((short, f"{_GLOBAL}, T = {short}"), (TOKENS, _GLOBAL)):
        times, needed = kernel_times(content, name), bounds(content, tokens)
        ours = {function: time for function, time in times.items() if function in needed}
        if not ours:
            raise NotMeasured(f"none of our kernels in the profile {name!r}")
        over[tokens] = sum(ours.values()) / sum(needed[function]["bound"] for function in ours)
    words = " and ".join(f"{value:.2f} at T = {tokens}" for tokens, value in over.items())
    return Measured(over[short] / over[TOKENS], f"all kernels over their bounds: {words}")


def _clamped(content: Content) -> Measured:
    """Scores that were cut off in tests."""
    part = section(content, "tests")
    scores = part.get("scores")
    if not scores or not scores["counted"]:
        raise NotMeasured(f"section tests ({part['status']}) counted no scores: {part.get('detail', '')}".rstrip(": "))
    share = scores["largest"] / scores["limit"]
    evidence = (
        f"{scores['clamped']} of {scores['counted']:.3g} scores in 16 bits; the largest is {share:.2%} of the limit"
    )
    return Measured(float(scores["clamped"]), evidence)


def _compiled(content: Content) -> Measured:
    """The largest share of the limits of `COMPILED` that a kernel takes under the Triton that is installed."""
    part = section(content, "report")
    lines = {
        line["kernel"]: line
        for line in part.get("kernels", ())
        if line["arch"] == 90 and line["shape"] == SIZE and not line["odd"]
    }
    if missing := [name for name in COMPILED if name not in lines]:
        raise NotMeasured(f"section report ({part['status']}) has no {', '.join(missing)}")
    shares, words = {}, []
    for name, (most, may_spill) in COMPILED.items():
        line = lines[name]
        spilled = 0 if may_spill else line["stack"]
        shares[name] = 1.0 + spilled if spilled else line["instructions"] / most
        words.append(f"{name} {line['instructions']} instructions, stack {line['stack']}")
    return Measured(max(shares.values()), f"Triton {content['about']['triton']}, sm_90: {'; '.join(words)}")


def _gain(content: Content, *, section_name: str, name: str) -> float:
    """Times as fast, as a cell of `gpu_suite.py` has it."""
    return cell(content, section_name, name)["faster"]


_TILES = Fallback(
    "tiles that a search on this device finds, other numbers of stages and of queries among them",
    f"DCFORMER_AUTOTUNE=1, which reads and writes tiles.json in DCFORMER_CACHE; `{_SEARCH}` searches",
    partial(_gain, section_name="tune", name=f"tune {SIZE} global"),
)
_CHUNKS = Fallback(
    "chunks of queries whose maps stay in second-level cache",
    "composed_attention(..., chunk_bytes=...); for models `_LEAST_BYTES` in kernels/problem.py",
    partial(_gain, section_name="kernels", name=f"kernels {SIZE} chunks"),
)
TO_SETTLE = (
    Row(
        "8 warps per multiprocessor, 12 in `lse`, hide too little of what they wait for",
        "`lse` and `compose` with `weights`, time over bound (kernels)",
        1.4,
        partial(_over_bounds, names=("lse_kernel", "compose_kernel")),
        (
            _TILES,
            Fallback("two keys a turn in `compose`, or loads by TMA descriptors"),
        ),
    ),
    Row(
        "spills of `back_1` and `back_0` cost more than counted",
        "`back_1` and `back_0`, time over bound (kernels)",
        1.5,
        partial(_over_bounds, names=("back_1_kernel", "back_0_kernel")),
        (_TILES,),
    ),
    Row(
        "cache or memory are slower than assumed",
        "the kernel nearest to its bound, time over bound (kernels): above the limit all are late",
        1.2,
        _all_late,
        (
            _CHUNKS,
            Fallback("products of gradients of queries and keys back to back for a group of heads"),
        ),
    ),
    Row(
        "matrices of the key side come from second-level cache too slowly",
        "`compose` with `weights`, time over their bound without that cache (kernels)",
        1.5,  # with it, 1.1 of the bound is 1.42
        _waits_for_cache,
        (_TILES, Fallback("128 queries and 8 warps where `choose` in kernels/tuning.py has 64")),
    ),
    Row(
        "products reach less than the library's",
        "`scores`, `values`, `keys`, time over bound (kernels)",
        1.3,
        partial(_over_bounds, names=PRODUCTS),
        (_TILES, Fallback("torch.bmm per chunk of 512 queries with corners filled with zeros: 18% more area")),
    ),
    Row(
        "few programs: one short sequence",
        "distance from bounds at T = 1024 over that at T = 2048 (kernels)",
        1.25,
        _tails,
        (Fallback("fewer keys per program: other numbers in `BESIDES` of kernels/launch.py"),),
    ),
    Row(
        "scores in float16 overflow",
        "scores beyond ±60000 in tests, which are cut off (tests)",
        0.0,
        _clamped,
        (
            Fallback(
                "maps in float32, which the kernels take by themselves once scores are large; in another "
                "implementation none are cut off",
                'attn_implementation="dcformer_chunked"',
            ),
        ),
    ),
    Row(
        "another Triton lays code out differently",
        "instructions per query, key and head over what was counted on, no stack in `lse` and `compose` (report)",
        1.0,
        _compiled,
        (Fallback("the Triton that the limits are from", 'pip install "triton==3.7.1"'),),
    ),
)


def choose(row: Row, content: Content) -> str:
    """The way out of a row that fails, in words: what was measured to help most, else the first not measured."""
    measured: list[tuple[float, Fallback]] = []
    others, tried = [], []
    for fallback in row.fallbacks:
        try:
            if fallback.gain is None:
                raise NotMeasured
            gain = fallback.gain(content)
        except NotMeasured:
            others.append(fallback)
            continue
        if gain >= _HELPS:
            measured.append((gain, fallback))
        else:
            tried.append(f"{fallback.what} did not help ({gain:.2f} times as fast)")
    if measured:
        gain, fallback = max(measured, key=lambda pair: pair[0])
        chosen = f"{fallback.what}: {gain:.2f} times as fast here"
    elif others:
        fallback = others[0]
        chosen = f"{fallback.what} (not measured)"
    else:
        return f"none is left: {'; '.join(tried)}"
    applied = f"apply with {fallback.setting}" if fallback.setting else "takes a change of code"
    return "; ".join([f"{chosen}; {applied}", *tried])


def settle(content: Content, rows: tuple[Row, ...] = TO_SETTLE) -> list[dict[str, Any]]:
    """Every row's verdict.

    Args:
        content: what `gpu_first_run.py` has written.
        rows: the table.

    Returns:
        a dictionary per row: `risk`, `how`, `limit`, `value` (None where it was not measured), `verdict` ("met",
        "failed" or "not measured"), `evidence` or the reason why there is none, and `fallback`, for rows that failed.
    """
    out = []
    for row in rows:
        line: dict[str, Any] = {"risk": row.risk, "how": row.how, "limit": row.limit, "value": None, "fallback": None}
        try:
            found = row.measure(content)
        except NotMeasured as reason:
            out.append(line | {"verdict": "not measured", "evidence": str(reason)})
            continue
        except Exception as error:  # figures that nobody foresaw must not cost the other rows their verdicts
            out.append(line | {"verdict": "not measured", "evidence": f"{type(error).__name__}: {error}"})
            continue
        is_met = found.value <= row.limit  # not so for NaN
        line |= {"value": found.value, "verdict": "met" if is_met else "failed", "evidence": found.evidence}
        out.append(line | {"fallback": None if is_met else choose(row, content)})
    return out
