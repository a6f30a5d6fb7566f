"""The fuzzer itself: its good inputs are good, the same number gives the same input, and a few hundred find nothing."""

from __future__ import annotations

import copy
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from paleo.cli import run_command_line as run
from tests.fuzz import __main__ as driver
from tests.fuzz import inputs
from tests.fuzz.__main__ import Answer, Settings, _fault, _flood, _hang, answer, answers_of, drawn
from tests.fuzz.inputs import COSTS, KINDS
from tests.fuzz.mutations import HOSTILE, mutated


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    before = {number: signal.signal(number, _hang) for number in (signal.SIGALRM, signal.SIGPROF)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


#: Kinds whose inputs are spoilt by other functions than those that the test replaces.
OTHERWISE = {"job", "launch", "log", "onnx", "options", "python", "requests", "run"}


@pytest.mark.parametrize("kind", sorted({*KINDS} - OTHERWISE))
def test_what_is_spoilt_was_good(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inputs, "mutated", lambda data, rng: data)
    monkeypatch.setattr(inputs, "_spoil_cell", lambda rows, rng: None)
    rng = random.Random(0)
    monkeypatch.setattr(rng, "random", lambda: 0.5)
    assert run(KINDS[kind](rng, tmp_path)) == 0


def test_spoiling_leaves_the_list_of_hostile_values_as_it_was() -> None:
    before, rng = copy.deepcopy(HOSTILE), random.Random(0)
    for _ in range(2000):
        mutated({"a": [{"b": 1}, [2, "3 GB"]], "c": {"d": [4.0]}}, rng)
    assert before == HOSTILE


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_some_inputs_of_each_kind(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "onnx":
        pytest.importorskip("onnx")
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        given = answer(0, number, [kind], folder)
        assert given.fault == "", f"{given.call}: {given.fault}"
        (again := folder / "again").mkdir()
        assert [word.replace("/again", "") for word in KINDS[kind](random.Random(f"0/{number}"), again)] == given.call


@pytest.mark.parametrize(
    ("peak", "held", "now", "fault"),
    [
        (0.3, 0.3, 1.1, "0.8 GB of memory"),
        (0.3, 0.3, 0.9, ""),
        (1.2, 0.9, 1.2, ""),  # tests before it had held as much
        (1.2, 0.9, 1.3, ""),  # it added 0.4 GB
        (1.2, 0.9, 1.8, "0.9 GB of memory"),
        (0.0, 0.0, 0.9, ""),
    ],
)
def test_memory_is_what_an_input_adds(
    peak: float, held: float, now: float, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    giga = 1024**3
    monkeypatch.setattr(driver, "_peak_bytes", lambda: int(now * giga))
    assert _flood(int(peak * giga), int(held * giga)) == fault


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, "{}", "", ""),
        (0, '{"a": NaN}', "", "NaN in JSON"),
        (0, '{"schema": "paleo.scale/1", "points": null}', "", "a null in JSON: document.points"),
        (2, "", "error: x\n", ""),
        (2, "", "error: x\nerror: y\n", "2 errors"),
        (2, "", "Traceback\n", "0 errors"),
        (3, "", "error: an error in paleo itself\n", "an error in paleo"),
        (139, "", "", "exit code 139"),
    ],
)
def test_answers_that_are_judged(code: int, out: str, err: str, fault: str) -> None:
    judged = _fault(code, out, err, as_json=True)
    assert (fault in judged) if fault else judged == ""


def test_each_kind_is_drawn_as_often_as_it_is_cheap() -> None:
    kinds = sorted(KINDS)
    found = Counter(drawn(0, number, kinds) for number in range(20_000))
    every = sum(1 / cost for cost in COSTS.values())
    assert {kind: found[kind] for kind in kinds} == {
        kind: pytest.approx(20_000 / COSTS[kind] / every, rel=0.3, abs=20) for kind in kinds
    }


def test_answers_do_not_depend_on_what_a_process_did_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def after(numbers: range) -> list[Answer]:
        place = tmp_path / str(numbers.start)
        place.mkdir()
        answers, _, _ = answers_of(numbers, 3, ["run", "link", "jobs"], place, Settings(float("inf"), None))
        return answers

    monkeypatch.chdir(tmp_path)
    together, alone = after(range(20)), after(range(12, 20))
    assert [(one.number, one.kind, one.code, one.fault) for one in together[12:]] == [
        (one.number, one.kind, one.code, one.fault) for one in alone
    ]
