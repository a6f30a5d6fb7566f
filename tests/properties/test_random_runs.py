"""Documents of random valid calls fulfil their schemas, and their numbers agree with one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.json_documents import LOG, NCCL
from tests.properties.random_runs import call_of, faults_of

#: Runs with the slow tests, and how many of them are in the quick suite; one test holds so many.
RUNS, QUICK, BATCH = 2000, 60, 20


def _batches() -> list[object]:
    slow = (pytest.mark.slow,)
    return [pytest.param(first, marks=slow if first >= QUICK else ()) for first in range(0, RUNS, BATCH)]


@pytest.mark.slow
@pytest.mark.parametrize("first", _batches())
def test_random_runs(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nccl.log").write_text(NCCL)
    (tmp_path / "train.log").write_text("\n".join(LOG.format(n=number) for number in range(1, 13)) + "\n")
    calls = [call_of(0, number) for number in range(first, first + BATCH)]
    answers = {" ".join(call): faults_of(call) for call in calls}
    assert {call: faults for call, (_, faults) in answers.items() if faults} == {}
    assert sum(code in ("0", "1") for code, _ in answers.values()) >= BATCH / 3
