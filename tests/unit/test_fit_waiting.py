"""The power with which device and host add up where the host waits for counts of tokens, fitted to whole steps."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from paleo.calibrate.fit import Rows
from paleo.calibrate.waiting import errors, fitted, left_out, waiting_rows
from paleo.errors import SpecError
from paleo.specs.software import load_software
from paleo.units import MILLISECOND
from paleo.validate.steps.transformers import TransformerSteps

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
    profile = load_software("megatron-core").changed({"host.waiting_power": power})
    table = TransformerSteps()
    for row in rows:
        row["iteration_ms"] = table.step(row, profile).value / MILLISECOND
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures") / "steps.csv"
    steps(POWER).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def rows(table: Path) -> list[Rows]:
    return waiting_rows(str(table))


def test_a_fit_finds_the_power_that_made_the_steps(rows: list[Rows]) -> None:
    result = fitted(rows)
    assert result.parameters["megatron-core"].power == pytest.approx(POWER, rel=0.03)
    assert (result.rows_fitted, result.rows_held_out) == (4, 0)


def test_sources_are_tested_with_what_the_others_give(rows: list[Rows]) -> None:
    lines = left_out(rows)
    assert list(lines["source"]) == ["first", "second"] and list(lines["rows"]) == [2, 2]
    assert lines["power"].to_list() == pytest.approx([POWER, POWER], rel=0.05) and lines["mape"].max() < 0.01


def test_steps_whose_hosts_run_ahead_say_nothing_of_it(table: Path, tmp_path: Path) -> None:
    """Those of dense networks, and of experts that the host need not count."""
    frame = pd.read_csv(table).drop_duplicates("source")
    frame.loc[frame["source"] == "first", "expert_dispatch"] = "hybridep"
    frame.to_csv(tmp_path / "half.csv", index=False)
    (waiting,) = waiting_rows(str(tmp_path / "half.csv"))
    assert set(waiting.frame["source"]) == {"second"}
    frame["expert_dispatch"] = "hybridep"
    frame.to_csv(tmp_path / "none.csv", index=False)
    with pytest.raises(SpecError, match="in no step of this table does the host wait"):
        waiting_rows(str(tmp_path / "none.csv"))


def test_a_lower_power_is_a_longer_step(rows: list[Rows]) -> None:
    assert errors(rows, 1.0).bias > errors(rows, POWER).bias > errors(rows, 8.0).bias
