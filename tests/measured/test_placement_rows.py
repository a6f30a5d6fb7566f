"""Measured steps of 64 GPUs on slow networks, ranks scheduled and at random. No constant is fitted to them: computation
is predicted, rates are stated, and what a stage waits for follows from how its software sends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.tables.cells import read_table
from paleo.tables.kinds._placement import PairNetwork, PlacementTable, RailTable
from paleo.tables.validation import FileReport, validate_file, validate_frame


@pytest.fixture(scope="module")
def report(shared: Path) -> FileReport:
    """A third of the rows: all networks and depths at one batch, which is what takes the time."""
    frame = read_table(shared / "measurements" / "placement.csv")
    return validate_frame("placement", frame[frame["global_batch"] == 2048], PlacementTable())


@pytest.fixture(scope="module")
def ratios(report: FileReport) -> pd.DataFrame:
    """Steps at random over scheduled ones (Megatron: packed), measured and predicted, by configuration."""
    frame = report.frame.assign(predicted=report.predictions.values, measured=report.measured)
    keys = ["network", "software", "pp", "layers", "global_batch"]
    steps = frame.groupby([*keys, "order"], as_index=False)[["measured", "predicted"]].mean()
    drawn, laid = (steps[(steps["order"] == "random") == is_random] for is_random in (True, False))
    both = drawn.merge(laid, on=keys, suffixes=("_random", ""))
    assert len(both) == 12
    return pd.DataFrame({
        "network": both["network"],
        "measured": both["measured_random"] / both["measured"],
        "predicted": both["predicted_random"] / both["predicted"],
    })  # fmt: skip


@pytest.mark.shared
def test_every_row_is_predicted(report: FileReport) -> None:
    assert report.unsupported_reasons == {}
    assert np.abs(report.predictions.values / report.measured - 1.0).mean() <= 0.13


@pytest.mark.shared
def test_the_cost_of_random_placement(ratios: pd.DataFrame) -> None:
    error = np.abs(ratios["predicted"] / ratios["measured"] - 1.0)
    assert error.mean() <= 0.12
    assert error.groupby(ratios["network"]).mean().max() <= 0.15
    guess = np.abs(ratios["measured"].mean() / ratios["measured"] - 1.0)
    assert error.mean() < 0.7 * guess.mean()  # better than one ratio for all


@pytest.mark.shared
def test_rows_without_their_networks_say_so(shared: Path, tmp_path: Path) -> None:
    frame = read_table(shared / "measurements" / "placement.csv").head(2)
    frame.attrs["path"] = str(tmp_path / "placement.csv")
    (reason,) = validate_frame("alone", frame, PlacementTable()).unsupported_reasons
    assert "placement_networks.csv beside the table" in reason


def test_flows_of_a_group_share_its_link() -> None:
    """Two ranks that send out of their group of two at once get half of its link each; inside it nothing is shared."""
    described = {"ranks_a": 4, "ranks_b": 4, "first_rank_a": 0, "first_rank_b": 0, "shared_by_group": 1}
    general = {"group_a": "any", "group_b": "any other", "pair_bytes_per_s": 1e8, **described}
    nodes = [
        {"group_a": node, "group_b": node, "first_rank_a": first, "first_rank_b": first, "ranks_a": 2, "ranks_b": 2,
         "pair_bytes_per_s": 1e9, "shared_by_group": 0}
        for node, first in (("n0", 0), ("n1", 2))
    ]  # fmt: skip
    network = PairNetwork.from_rows(pd.DataFrame([general, *nodes]))
    apart = network.transfer_times(np.array([0, 1, 0]), np.array([2, 3, 1]), 1460.0)
    assert apart.tolist() == pytest.approx([1538.0 / 0.5e8, 1538.0 / 0.5e8, 1460.0 / 1e9])


@pytest.mark.shared
def test_networks_are_no_measurements(shared: Path) -> None:
    with pytest.raises(SpecError, match="rows of a table of kind 'placement'"):
        validate_file(shared / "measurements" / "placement_networks.csv")


@pytest.mark.shared
def test_messages_between_like_and_unlike_rails(shared: Path) -> None:
    """Nothing is fitted to them: sends have the share of a NIC that nccl-tests' have on InfiniBand, exchanges that of
    the other fabric that libraries reach by libfabric. Unlike rails get less than half of what like ones get."""
    report = validate_frame("rails", read_table(shared / "measurements" / "rails.csv"), RailTable())
    errors = report.errors()
    assert report.unsupported_reasons == {} and errors.mape is not None and errors.mape <= 0.12
    like = (report.frame["peers"] == "rail-aligned").to_numpy()
    assert report.predictions.values[~like].mean() < 0.6 * report.predictions.values[like].mean()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peers": "crossrail"}, "cross-rail"),
        ({"ranks_per_node": 4}, "whole nodes of 8"),
        ({"system": "l40s-pcie-8gpu"}, "no network between nodes"),
        ({"message_bytes": ""}, "message_bytes is not stated"),
    ],
)
def test_rows_of_rails_say_what_is_wrong(changes: dict[str, object], says: str) -> None:
    row = {
        "system": "aws-p5.48xlarge", "ranks": 16, "ranks_per_node": 8, "peers": "cross-rail", "message_bytes": 2**20,
        "bytes_per_s_per_gpu": 1.9e10, "device": "h100-sxm5-80gb",
    }  # fmt: skip
    (reason,) = validate_frame("rails", pd.DataFrame([{**row, **changes}]), RailTable()).unsupported_reasons
    assert says in reason
