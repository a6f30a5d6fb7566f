"""The power with which device and host add up where the host waits for counts of tokens, fitted to whole steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from paleo.calibrate.fit import MeasuredRows
from paleo.calibrate.software import (
    fit_waiting_exponent,
    leave_one_source_out,
    moe_waiting_steps,
    predict_with_waiting_exponent,
)
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.specs.software import load_software
from paleo.tables.base import residual_errors
from paleo.tables.kinds._transformers import TransformerStepTable
from paleo.units import MILLISECOND

#: The power of the made-up steps.
POWER = 1.9


def steps(power: float) -> pd.DataFrame:
    """Steps of small mixtures by two sources, as hosts and devices of that power would take them."""
    rows = [
        {
            "source": source, "model": f"mixture-{layers}", "system": "dgx-h100", "device": "h100-sxm5-80gb",
            "layers": layers, "hidden": 2048, "heads": 16, "ffn_hidden": 1024, "gated_mlp": 1, "vocab": 32000,
            "n_experts": 32, "top_k": 4, "seq_len": 2048, "n_gpus": 8, "dp": 8, "ep": 8, "tp": 1, "pp": 1,
            "dtype": "bf16", "micro_batch": micro, "global_batch": 16 * micro, "recompute": "none",
            "software": "megatron-core",
        }
        for source, layers in (("first", 4), ("second", 6)) for micro in (2, 8)
    ]  # fmt: skip
    profile = load_software("megatron-core").with_fields({"host.waiting_exponent": power})
    table = TransformerStepTable()
    for row in rows:
        row["iteration_ms"] = table.predict_row(row, profile).value / MILLISECOND
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures") / "steps.csv"
    steps(POWER).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def rows(table: Path) -> list[MeasuredRows]:
    return moe_waiting_steps([str(table)])


@pytest.mark.slow
def test_a_fit_finds_the_power_that_made_the_steps(rows: list[MeasuredRows]) -> None:
    result = fit_waiting_exponent(rows)
    assert result.parameters["megatron-core"].exponent == pytest.approx(POWER, rel=0.03)
    assert (result.rows_fitted, result.rows_held_out) == (4, 0)


@pytest.mark.slow
def test_sources_are_tested_with_what_the_others_give(rows: list[MeasuredRows]) -> None:
    tests = leave_one_source_out(rows)
    assert [(test.source, test.errors.rows) for test in tests] == [("first", 2), ("second", 2)]
    assert [test.exponent for test in tests] == pytest.approx([POWER, POWER], rel=0.05)
    assert max(test.errors.mape for test in tests) < 0.01
    with pytest.raises(SpecError, match="no source is left when first, second are left out"):
        leave_one_source_out(rows, ["second"])


@pytest.mark.slow
def test_steps_whose_hosts_run_ahead_say_nothing_of_it(table: Path, tmp_path: Path) -> None:
    """Those of dense networks, and of experts that the host need not count."""
    frame = pd.read_csv(table).drop_duplicates("source")
    frame.loc[frame["source"] == "first", "expert_dispatch"] = "hybridep"
    frame.to_csv(tmp_path / "half.csv", index=False)
    (waiting,) = moe_waiting_steps([str(tmp_path / "half.csv")])
    assert set(waiting.frame["source"]) == {"second"}
    frame["expert_dispatch"] = "hybridep"
    frame.to_csv(tmp_path / "none.csv", index=False)
    with pytest.raises(SpecError, match="in no step of these tables does the host wait"):
        moe_waiting_steps([str(tmp_path / "none.csv")])


def bias(rows: list[MeasuredRows], power: float) -> float:
    return residual_errors(*predict_with_waiting_exponent(rows, power)).bias


@pytest.mark.slow
def test_a_lower_power_is_a_longer_step(rows: list[MeasuredRows]) -> None:
    assert bias(rows, 1.0) > bias(rows, POWER) > bias(rows, 8.0)


def three_sources(table: Path, folder: Path) -> str:
    """The table, and steps of a source whose hosts take turns with their devices."""
    frame = pd.read_csv(table)
    other = frame[frame["source"] == "second"].assign(source="third")
    other["iteration_ms"] *= 1.2
    pd.concat([frame, other]).to_csv(folder / "three.csv", index=False)
    return str(folder / "three.csv")


@pytest.mark.slow
def test_the_command_writes_the_profiles_and_tests_sources_that_are_held_out(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["calibrate", "--fit", three_sources(table, tmp_path), "--only", "waiting", "--hold-out", "third"]
    assert run([*command, "-o", str(tmp_path / "mine.yaml")]) == 0
    said = capsys.readouterr()
    assert "[1/2] three.csv (6 rows)" in said.err and "[2/2] power of 4 steps" in said.err
    assert "host.waiting_power: 1.91 by 4 steps" in said.out and "on the 6 steps left out: " in said.out
    (line,) = (line for line in said.out.splitlines() if "held out" in line)
    assert "third" in line and "1.9" in line
    before, after = load_software("megatron-core"), load_software(tmp_path / "mine.yaml")
    assert after.host.waiting_exponent == pytest.approx(POWER, rel=0.03)
    assert after.host.forward == pytest.approx(before.host.forward) and after.parallelism == before.parallelism
    assert after.fit is not None and (after.fit.rows_fitted, after.fit.rows_held_out) == (4, 6)
    assert not after.is_fitted_for("Hopper")  # its host times are those that they were


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--only", "waiting"), "nothing says where to write"),
        (("--only", "waiting", "--only", "fabric", "-o", "w.yaml"), "not with --only fabric"),
        (("--only", "waiting", "--free", "contention", "-o", "w.yaml"), "not with --free contention"),
        (("--only", "waiting", "--hold-out", "frist", "-o", "w.yaml"), "--hold-out frist: no step of that source"),
        (("--only", "intervals", "--hold-out", "first", "-o", "w.yaml"), "from --only waiting, from no other fit"),
    ],
)
def test_bad_options_of_a_fit_of_waiting_hosts(
    table: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], said: str
) -> None:
    assert run(["calibrate", "--fit", str(table), *more]) == 2
    assert said in capsys.readouterr().err


def test_tables_without_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of watts is not answered by the fit of watts."""
    power = Path(__file__).parents[1] / "fuzz" / "samples" / "power.csv"
    assert run(["calibrate", "--fit", str(power), "--only", "waiting", "-o", "w.yaml"]) == 2
    assert "a table of kind power has no steps that --only waiting fits hosts to" in capsys.readouterr().err
