"""``python -m tests.fuzz``: hostile inputs by the thousand; any answer is fine but a traceback, a hang or a flood.

Every input must end within 10 s and 1 GB with exit code 0, 1 or 2 and no warning of numpy's; code 2 with one line that
starts ``error: ``, codes 0 and 1 with JSON that parses where --json was asked for, and in which no promised number is
null. A kind is drawn the more often the less one of its inputs costs, so that each gets about the same time. As many
processes as there are cores work side by side; what comes out does not depend on how many they are. The number of an
input that fails is printed: ``python -m tests.fuzz --seed S --first N --inputs 1`` does it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import tests.fuzz.onnx_inputs
import tests.fuzz.options  # noqa: F401
from paleo.cli import run_command_line as run
from paleo.report.json_schemas import json_schema
from tests.fuzz.doors import called
from tests.fuzz.inputs import COSTS, KINDS
from tests.json_documents import violations

#: Seconds of computation, seconds on a clock (a busy machine takes longer), bytes.
LIMIT_S, PATIENCE_S, LIMIT_BYTES = 10.0, 60.0, 1024**3
#: What a process holds once everything is loaded, at least: an input may add the rest of the limit.
LOADED_BYTES = 256 * 1024**2
#: Inputs that a process takes at once.
CHUNK = 100


class HangError(BaseException):
    """An input took too long."""


@dataclass(frozen=True)
class Answer:
    """What came of one input; ``fault`` is empty where nothing is wrong with it."""

    number: int
    kind: str
    code: int | None
    seconds: float
    fault: str
    call: list[str]


@dataclass(frozen=True)
class Settings:
    """When to stop, as `time.time` says it, and a folder for the inputs that fail."""

    until: float
    keep: Path | None


Answers = tuple[list[Answer], float, float]


def drawn(seed: int, number: int, kinds: Sequence[str]) -> str:
    """The kind of an input: the chance of each is the inverse of what its inputs cost."""
    return random.Random(f"{seed}/{number}/kind").choices(kinds, [1 / COSTS[kind] for kind in kinds])[0]


def answer(seed: int, number: int, kinds: Sequence[str], folder: Path) -> Answer:
    """Make an input in an empty folder, give it to the command line and judge the answer."""
    rng = random.Random(f"{seed}/{number}")
    name = drawn(seed, number, kinds)
    call = KINDS[name](rng, folder)
    out, err, code, start = io.StringIO(), io.StringIO(), None, time.process_time()
    peak, held = _peak_bytes(), _held_bytes()
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = called(call) if name == "python" else run(call)
        fault = _fault(code, out.getvalue(), err.getvalue(), "--json" in call)
    except HangError as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "paleo" in each.filename.split("/")]
        fault = f"hang at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "hang"
    except BaseException as error:
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "paleo" in frame.filename.split("/")]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        fault = f"escaped at {where}: {type(error).__name__}: {str(error)[:100]}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return Answer(number, name, code, time.process_time() - start, fault or _flood(peak, held), call)


def _fault(code: int, out: str, err: str, as_json: bool) -> str:
    lines = [line for line in err.splitlines() if not line.startswith("warning: ")]
    errors = [line for line in lines if line.startswith("error: ")]
    if code == 3 or code not in (0, 1, 2):
        return errors[0][:160] if errors else f"exit code {code}"
    if code == 2 and (len(errors) != 1 or lines[-1] != errors[0] or "Traceback" in err):
        return f"exit code 2 with {len(errors)} errors in {len(lines)} lines: {err[:120]!r}"
    if as_json and code in (0, 1) and not errors:
        return _json_fault(out)
    return ""


def _json_fault(out: str) -> str:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} in JSON")

    try:
        document = json.loads(out, parse_constant=refuse)
    except ValueError as error:
        return f"stdout is no JSON: {error}"
    return next(_nulls(document), "")


def _nulls(document: object) -> Iterator[str]:
    """Numbers that a document's schema promises and that came out as null: they were not finite."""
    command = str(document.get("schema", "")).partition(".")[2].partition("/")[0] if isinstance(document, dict) else ""
    for text in violations(document, json_schema(command)) if command else ():
        if "is null" in text:
            yield f"a null in JSON: {text}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _held_bytes() -> int:
    """Memory that this process holds now: a process of many tests may have held more than the limit before."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * resource.getpagesize() if pages.exists() else 0


def _flood(peak: int, held: int) -> str:
    """Say that an input raised the peak of its process, and by more than one input may add to what was held."""
    most = _peak_bytes()
    added = most - max(held, LOADED_BYTES) if most > peak else 0
    return f"{added / 1024**3:.1f} GB of memory" if added > LIMIT_BYTES - LOADED_BYTES else ""


def _hang(number: int, frame: object) -> None:
    raise HangError


def prepared() -> None:
    """Make a process ready: alarms, a limit of memory, numpy's warnings as errors, what is slow to load."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", RuntimeWarning)
    signal.signal(signal.SIGALRM, _hang)
    signal.signal(signal.SIGPROF, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (6 * LIMIT_BYTES, resource.RLIM_INFINITY))
    with contextlib.suppress(ImportError):  # no input's fault
        importlib.import_module("transformers.models.auto.configuration_auto")


def answers_of(numbers: Iterable[int], seed: int, kinds: Sequence[str], place: Path, given: Settings) -> Answers:
    """Answers of some inputs, the processor's seconds that they took, and the process's peak of memory."""
    start, done = time.process_time(), []
    for number in numbers:
        if time.time() > given.until:
            break
        folder = place / str(os.getpid())  # one for all: what a file meant before must not matter
        folder.mkdir()
        os.chdir(folder)
        done.append(answer(seed, number, kinds, folder))
        os.chdir(place)
        if done[-1].fault and given.keep:
            shutil.copytree(folder, given.keep / f"{seed}-{number}", dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return done, time.process_time() - start, peak


def main() -> int:
    """Run the inputs; 1 where one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes side by side")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time, too")
    parser.add_argument("--kinds", default=",".join(sorted(KINDS)))
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that fail")
    given = parser.parse_args()
    place, kinds, last = Path(tempfile.mkdtemp(prefix="fuzz")), given.kinds.split(","), given.first + given.inputs
    settings = Settings(time.time() + given.seconds, given.keep and given.keep.absolute())
    answers, used, peaks, start = list[Answer](), 0.0, [0.0], time.perf_counter()
    with ProcessPoolExecutor(given.jobs, initializer=prepared) as pool:
        parts = {
            pool.submit(answers_of, range(at, min(at + CHUNK, last)), given.seed, kinds, place, settings): at
            for at in range(given.first, last, CHUNK)
        }
        for part in as_completed(parts):
            try:
                done, seconds, peak = part.result()
            except BrokenProcessPool:
                done, seconds, peak = [Answer(parts[part], "?", None, 0.0, "a process died, here or nearby", [])], 0, 0
            answers, used = answers + done, used + seconds
            peaks.append(peak)
            sys.stdout.writelines(f"{one.number}: {one.fault}\n" for one in done if one.fault)
            sys.stdout.flush()
    shutil.rmtree(place, ignore_errors=True)
    wall = time.perf_counter() - start
    failed = _report(sorted(answers, key=lambda one: one.number), given.seed)
    total = f"{len(answers)} inputs in {wall:.0f} s, {used:.0f} s of processor time in {given.jobs} processes"
    sys.stdout.write(f"{total}, {max(peaks):.2f} GB at most: {failed} failed\n")
    return 1 if failed else 0


def _report(answers: Sequence[Answer], seed: int) -> int:
    """Print what came of each kind, and each fault once; how many inputs failed."""
    write = sys.stdout.write
    for kind in sorted({one.kind for one in answers}):
        of = [one for one in answers if one.kind == kind]
        codes = dict(sorted(collections.Counter(str(one.code) for one in of).items()))
        took = [one.seconds for one in of]
        write(
            f"{kind:12} {len(of):6} inputs, exit codes {codes}, {1e3 * sum(took) / len(of):.1f} ms each, "
            f"slowest {max(took):.1f} s\n"
        )
    faults: dict[str, list[Answer]] = {}
    for one in answers:
        if one.fault:
            faults.setdefault(re.sub(r"'[^']*'|\d{3,}", "…", one.fault), []).append(one)
    for of in sorted(faults.values(), key=len, reverse=True):
        call = " ".join(of[0].call)[:200]
        write(f"{len(of)} x {of[0].fault}\n    --seed {seed} --first {of[0].number} --inputs 1: paleo {call}\n")
    return sum(map(len, faults.values()))


if __name__ == "__main__":
    sys.exit(main())
