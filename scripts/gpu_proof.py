"""All that one visit to a GPU has to run, the most telling first, within a time limit.

    python scripts/gpu_proof.py --out gpu_proof.json --minutes 25
    python scripts/gpu_proof.py --out gpu_proof.json --dry

After each step its result is in the file, and a page of Markdown next to it. A run that was cut off
goes on where it stopped when it is started again; `--again STEP` runs a step once more. A step that
fails does not stop the others; the exit status is 1 where one failed. `--dry` proves on a machine
without a GPU that every command starts and that its numbers are read: tests are only collected, and
models, batches and tiles are tiny.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

ROOT: Final = Path(__file__).resolve().parent.parent
_TAIL: Final = 4000
"""Characters of a step's output that are kept."""
_END_S: Final = 10.0
"""Between asking a step to end and ending it."""
_LEAST_S: Final = 20.0
"""With less time left no step begins."""

_OPS: Final = ("paged_attention", "moe", "moe_int4", "quantized_linear", "rms_norm", "silu_mul")
"""Whose times are measured."""

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A command, and how to read the file that it writes."""

    name: str
    command: list[str]
    limit_s: float
    read: Callable[[Path], Numbers]
    extra: dict[str, str] = field(default_factory=dict)
    """Variables of its environment."""


@dataclass
class Result:
    """The result of a step."""

    name: str
    status: str
    """passed, failed, or timed out."""
    seconds: float
    numbers: Numbers
    tail: str
    """The end of its output; empty when it passed."""


def read_tests(path: Path) -> Numbers:
    """Counts and failures of a JUnit file."""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = []
    for case in suite.iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            message = (problem.get("message") or "").splitlines()
            failed.append(f"{case.get('name')}: {message[0] if message else ''}")
    return {**counts, "failed": failed}


def read_json(path: Path) -> Numbers:
    """Read the numbers that the command wrote."""
    found: Numbers = json.loads(path.read_text("utf-8"))
    return found


def steps(file: Path, dry: bool) -> list[Step]:
    """In the order of their worth; `file` is where each writes its result."""
    python = [sys.executable, "-m"]

    def tests(name: str, paths: Sequence[str], limit_s: float, *more: str) -> Step:
        # pytest-benchmark, where it is installed, warns of xdist, and here a warning is an error
        command = [*python, "pytest", "-q", "-m", "gpu", "-p", "no:benchmark"]
        command += [f"--junitxml={file}", *more]
        if dry:
            command += ["--collect-only"]
        # nothing is written where tests are only collected
        read = (lambda _path: {}) if dry else read_tests
        return Step(name, [*command, *paths], limit_s, read)

    def bars(model: str, limit_s: float, *names: str) -> Step:
        command = [*python, "benchmarks.gpu_bars", "--out", str(file), "--bars", *names]
        return Step(f"bars {model}", [*command, *(["--tiny"] if dry else [])], limit_s, read_json)

    engine = "tests/engine/test_cuda_on_gpu.py"
    general = "tests/engine/test_general_on_gpu.py"
    features = ["tests/engine/test_features_on_gpu.py", "tests/engine/test_quantized_on_gpu.py"]
    # most of the time is compilation
    in_parallel = ["-n", "8"] if find_spec("xdist") and not dry else []
    return [
        tests("engine", [engine], 300, *in_parallel, "-k", "not memory"),
        tests("general kind", [general], 420, *in_parallel),
        tests("features", features, 300, *in_parallel),
        tests("memory", [engine], 120, "-k", "memory"),  # alone, as it takes all that is free
        bars("0.6B", 300, "nano", "idle"),
        tests("kernels", ["tests/kernels/test_gpu.py"], 360, *in_parallel),
        bars("8B", 360, "decode", "prefill"),
        bars("8B in INT4", 240, "int4"),
        _ops(python, file, dry),
        _tuner(python, file, dry),
    ]


def _ops(python: list[str], file: Path, dry: bool) -> Step:
    command = [*python, "benchmarks.bench_ops", "--out", str(file)]
    if dry:
        command += ["--ops", *_OPS, "--batches", "q1", "--seconds", "0.01"]
        command += ["--dtype", "float32", "--threads", "1"]
    else:
        command += ["--device", "cuda", "--model", "llama-3.1-8b"]
        command += ["--ops", *_OPS]
        command += ["--batches", "q1s1k", "64q1s1k", "32q1s8k", "q8k", "q512_8q1s1k"]
    return Step("ops", command, 300, read_json)


def _tuner(python: list[str], file: Path, dry: bool) -> Step:
    command = [*python, "tokenmesh.kernels.moe.tune", "--out", str(file)]
    if dry:
        sizes = {"experts": 2, "top-k": 1, "hidden": 16, "inner": 16}
        command += ["--interpreted", "--most", "1"]
    else:
        sizes = {"experts": 128, "top-k": 8, "hidden": 2048, "inner": 768}
        command += ["--most", "6"]
    command += [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    extra = {"TRITON_INTERPRET": "1"} if dry else {}
    return Step("moe tiles", command, 330, read_json, extra)


def run(step: Step, file: Path, limit_s: float) -> Result:
    """Run a step in a process group of its own, which is ended when its time is over."""
    file.unlink(missing_ok=True)
    began_s = time.monotonic()
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_paths()), **step.extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = "passed" if process.returncode == 0 else "failed"
    except subprocess.TimeoutExpired:
        output, status = _end(process), "timed out"
    numbers: Numbers = {}
    try:
        numbers = step.read(file)
    except (OSError, ValueError, StopIteration, ElementTree.ParseError) as error:
        if status == "passed":
            status, output = "failed", f"{output}\nits result cannot be read: {error}"
    tail = "" if status == "passed" else output[-_TAIL:]
    return Result(step.name, status, round(time.monotonic() - began_s, 1), numbers, tail)


def _paths() -> list[str]:
    """Where Python looks for modules first: here, then where the caller says."""
    return [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]


def _end(process: "subprocess.Popen[str]") -> str:
    """End the whole group of a process; return what it had written."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            return process.communicate(timeout=_END_S)[0]
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
    return ""


def machine() -> Numbers:
    """Describe the machine on which it runs."""
    import torch

    found: Numbers = {"python": platform.python_version(), "torch": torch.__version__}
    for module in ("triton", "transformers"):
        try:
            found[module] = __import__(module).__version__
        except ImportError:
            found[module] = "not installed"
    has_gpu = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if has_gpu else "none"
    return found


def page(state: dict[str, Any]) -> str:
    """The same as Markdown."""
    about = ", ".join(f"{key} {value}" for key, value in state["machine"].items())
    lines = ["# Proof on a GPU", "", about, "", "| step | result | seconds | numbers |"]
    lines.append("|---|---|---|---|")
    for each in state["results"]:
        numbers = "; ".join(_shown(each["numbers"]))
        lines.append(f"| {each['name']} | {each['status']} | {each['seconds']} | {numbers} |")
    for each in state["results"]:
        if each["tail"]:
            lines += ["", f"## {each['name']}", "", "```", each["tail"].strip(), "```"]
    return "\n".join(lines) + "\n"


def _shown(numbers: Numbers) -> list[str]:
    """The few of a step's numbers that a table has room for."""
    shown = [f"{numbers[key]} {key}" for key in ("tests", "failures", "errors") if key in numbers]
    for bar in numbers.get("bars", []):
        bound = f"at least {bar['least']:g}" if bar["least"] is not None else ""
        bound = f"at most {bar['most']:g}" if bar["most"] is not None else bound
        shown.append(f"{bar['name']}: {bar['measured']:.4g} {bar['unit']} ({bound})")
    shown += [
        f"{line['op']} {line['batch']}: {line['us']} us, {line['share']} of the limit, "
        f"torch {line['torch_us']} us"
        for line in numbers.get("lines", [])
    ]
    return shown


def save(state: dict[str, Any], out: Path) -> None:
    """Both files; never half of one."""
    for path, text in (
        (out, json.dumps(state, indent=2) + "\n"),
        (out.with_suffix(".md"), page(state)),
    ):
        part = path.with_name(path.name + ".part")
        part.write_text(text, "utf-8")
        part.replace(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    parser.add_argument("--minutes", type=float, default=25.0, help="of this run")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="+", help="steps to run, by name")
    parser.add_argument("--again", nargs="+", default=[], help="steps to run once more")
    options = parser.parse_args(arguments)
    known = {step.name for step in steps(options.out, options.dry)}
    for name in (*(options.only or ()), *options.again):
        if name not in known:
            parser.error(f"no step is named {name!r}; they are {', '.join(sorted(known))}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is not done yet; 1 where a step failed or did not come to its turn."""
    options = parse(arguments)
    out: Path = options.out.resolve()
    file = out.with_name(out.name + ".step")
    state: dict[str, Any] = {"machine": machine(), "is_dry": options.dry, "results": []}
    if out.exists():
        before = json.loads(out.read_text("utf-8"))
        kept = [each for each in before["results"] if each["name"] not in options.again]
        state["results"] = kept if before["is_dry"] == options.dry else []
    end_s = time.monotonic() + 60 * options.minutes
    todo = [
        step for step in steps(file, options.dry) if not options.only or step.name in options.only
    ]
    done = {each["name"] for each in state["results"]}
    for step in todo:
        left_s = end_s - time.monotonic()
        if step.name in done or left_s < _LEAST_S:
            continue
        print(f"{step.name} ...", flush=True)
        result = run(step, file, min(step.limit_s, left_s))
        print(f"{step.name}: {result.status} after {result.seconds} s", flush=True)
        if result.status == "timed out" and step.limit_s > left_s:
            continue  # cut off by the whole run's limit: the next run tries it again
        state["results"].append(asdict(result))
        save(state, out)
    file.unlink(missing_ok=True)
    passed = {each["name"] for each in state["results"] if each["status"] == "passed"}
    return 0 if all(step.name in passed for step in todo) else 1


if __name__ == "__main__":
    sys.exit(main())
