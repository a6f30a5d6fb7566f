"""Parameters of links fitted to whole steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate.fit import split_by_configuration
from paleo.calibrate.links import (
    LINK_PARAMETERS,
    MAX_LOG_STANDARD_DEVIATION,
    WHOLE_STEP_STACK,
    LinkParameters,
    configuration_labels,
    fit_links,
    link_entries,
    link_jobs,
    link_log_standard_deviations,
    system_calibration,
)  # fmt: skip
from paleo.cli import run_command_line as run
from paleo.predict import predict
from paleo.pricing.communication import COLLECTIVE_CALIBRATION_FAMILIES, collective_parameters
from paleo.pricing.families import convolution_family
from paleo.pricing.kernels import KernelFamilyPredictor
from paleo.specs.calibration import load_calibration
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.tables.kinds._transformers import TransformerStepTable
from paleo.units import MICROSECOND, MILLISECOND

#: What the links of the made-up machines reach; the catalog has 0.778 and 8 us inside a node, 0.9 and 4 us between.
INSIDE = {"inside_share": 0.55, "inside_latency": 20 * MICROSECOND}
BETWEEN = {"between_share": 0.4, "between_latency": 25 * MICROSECOND}
SIZES = ((2, 512), (4, 1024), (2, 2048), (2, 4096))


def made_with(truth: Mapping[str, float], system: str, splits: Sequence[tuple[int, int]]) -> pd.DataFrame:
    """Steps of networks split over (tp, dp) ranks, on a system whose links reach what ``truth`` says."""
    rows = [
        {
            "source": "made up", "model": f"gpt-{layers}-{hidden}", "system": system, "device": "a100-sxm4-80gb",
            "layers": layers, "hidden": hidden, "heads": 16, "vocab": 50304, "seq_len": seq, "n_gpus": tp * dp,
            "tp": tp, "pp": 1, "dp": dp, "dtype": "fp16", "micro_batch": 1, "global_batch": dp, "recompute": "none",
            "sharding": "zero1", "software": "cuda-graph",
        }
        for tp, dp in splits for layers, hidden in SIZES for seq in (256, 2048)
    ]  # fmt: skip
    known = load_system(system)
    before = {family: collective_parameters(known, family) for family in COLLECTIVE_CALIBRATION_FAMILIES}
    start = {name: getattr(before[one.family].parameters, one.field_name) for name, one in LINK_PARAMETERS.items()}
    made = system_calibration(known, link_entries(before, LinkParameters(**(start | truth)), list(truth)))
    table = TransformerStepTable(made)
    for row in rows:
        row["iteration_ms"] = table.predict_row(row).value / MILLISECOND
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("links") / "inside.csv"
    made_with(INSIDE, "dgx-a100-80gb", [(2, 1), (8, 1)]).to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def fitted(inside: Path) -> Path:
    """The calibration file that the command writes."""
    out = inside.parent / "fitted.yaml"
    words = ["--only", "dgx-a100-80gb", "--free", ",".join(INSIDE), "-o", str(out)]
    assert run(["calibrate", "--fit", str(inside), *words]) == 0
    return out


def test_a_fit_finds_the_links_of_a_node(fitted: Path) -> None:
    (entry,) = load_calibration(str(fitted)).entries
    assert (entry.family, entry.stack) == ("collective.nccl", WHOLE_STEP_STACK)
    before = collective_parameters(load_system("dgx-a100-80gb"), "collective.nccl").parameters
    share, latency = INSIDE["inside_share"] / before.simple_fraction, INSIDE["inside_latency"] / before.launch_time
    for name, factor in (
        ("simple_fraction", share),
        ("ll_fraction", share),
        ("launch_time", latency),
        ("ll_hop_time", latency),
    ):
        assert entry.parameters[name] == pytest.approx(getattr(before, name) * factor, rel=0.02), name
    assert set(entry.uncertainty) == {"simple_fraction", "launch_time"} and max(entry.uncertainty.values()) < 0.1
    assert entry.residual is not None and entry.residual.mape < 0.01
    assert entry.rows_fitted + entry.rows_held_out == 16 and entry.residual.rows == entry.rows_held_out


def test_what_was_written_prices_runs(inside: Path, fitted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps that the made-up machine takes come out, by `validate` and by `estimate`, and nothing else changes."""
    errors = {}
    for one in ("auto", str(fitted)):
        capsys.readouterr()
        assert run(["validate", str(inside), "--json", "--calibration", one]) == 0
        errors[one] = json.loads(capsys.readouterr().out)["files"][0]["overall"]["mape"]
    assert errors["auto"] > 0.1 and errors[str(fitted)] < 0.01
    network, machine = load_model("gpt2"), load_system("dgx-a100-80gb")
    options = Run(gpus=8, batch=1, strategy="tp=4,dp=2")
    usual = predict(network, machine, options)
    slower = predict(network, machine, options.model_copy(update={"calibration": str(fitted)}))
    assert slower.breakdown.communication_total > 1.2 * usual.breakdown.communication_total
    assert slower.breakdown.compute == usual.breakdown.compute


def test_a_calibration_of_another_system_leaves_rows_alone(fitted: Path) -> None:
    rows = made_with({}, "selene", [(8, 1)]).head(1).to_dict("records")
    assert TransformerStepTable(load_calibration(str(fitted))).predict_row(
        rows[0]
    ) == TransformerStepTable().predict_row(rows[0])


def test_a_fit_finds_the_links_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "between.csv"
    made_with(BETWEEN, "selene", [(1, 64), (1, 256)]).to_csv(path, index=False)
    (job,) = link_jobs([path], ["selene"], tuple(BETWEEN))
    made = fit_links(job, "2026-01-01", tuple(BETWEEN))
    for name, value in BETWEEN.items():
        assert getattr(made.parameters, name) == pytest.approx(value, rel=0.02), name
    assert made.reduces_error and made.errors_before.mape > 0.2 and made.errors_after.mape < 0.01
    (entry,) = made.entries
    assert entry.parameters["fabric_fraction"] == pytest.approx(0.4, rel=0.02)
    assert entry.parameters["simple_hop_time"] / entry.parameters["ll_fabric_hop_time"] == pytest.approx(2.0, rel=0.001)


def test_rows_of_one_node_say_nothing_of_the_links_between(
    inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "dgx-a100-80gb", "--free", "inside_share,between_share", "--output-dir", str(tmp_path)]
    assert run(["calibrate", "--fit", str(inside), *words]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "between_share: no fitted step gets 0.5% longer when it is 4 times worse" in said
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_all_alike_do_not_tell_share_from_latency(tmp_path: Path) -> None:
    path, alike = tmp_path / "alike.csv", made_with(INSIDE, "dgx-a100-80gb", [(8, 1)])
    alike = alike[(alike.hidden == 4096) & (alike.seq_len == 2048)]
    pd.concat([alike.assign(micro_batch=1, model=str(index)) for index in range(12)]).to_csv(path, index=False)
    (job,) = link_jobs([path], ["dgx-a100-80gb"], tuple(INSIDE))
    both, alone = (
        link_log_standard_deviations(job, job.start_parameters, names) for names in (tuple(INSIDE), ["inside_share"])
    )
    assert min(both.values()) > MAX_LOG_STANDARD_DEVIATION and both["inside_share"] > 100 * alone["inside_share"]


def test_a_fit_that_helps_no_other_row_is_not_written(
    inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps of a slow machine where they are fitted, of the catalog's where they are tested."""
    table = TransformerStepTable()
    frame = pd.read_csv(inside)
    held = split_by_configuration(frame.assign(configuration=configuration_labels(frame)), ["configuration"]) > 0
    usual = [table.predict_row(row).value / MILLISECOND for row in frame.to_dict("records")]
    path = tmp_path / "mixed.csv"
    frame.assign(iteration_ms=np.where(held, usual, frame["iteration_ms"])).to_csv(path, index=False)
    words = ["--only", "dgx-a100-80gb", "--free", "inside_share", "--output-dir", str(tmp_path)]
    assert run(["calibrate", "--fit", str(path), *words]) == 1
    assert "not written" in capsys.readouterr().out and list(tmp_path.glob("*.yaml")) == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--only", "fabric", "--free", "inside_shar"], "no such number of a system's links; nearest: 'inside_share'"),
        (["--only", "selene"], "no row of several devices of 'selene'"),
        (["--only", "fabric", "--only", "cuda-graph"], "links and software are fitted one after the other"),
        (["--only", "./none.yaml"], "none.yaml"),
        (["--only", "fabrik"], "no row of the profile 'fabrik'"),
    ],
)
def test_bad_requests_say_what_is_expected(
    inside: Path, more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--fit", str(inside), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_too_few_steps_are_refused(inside: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.csv"
    pd.read_csv(inside).head(5).to_csv(few, index=False)
    words = ["--only", "fabric", "--free", "inside_share", "--output-dir", str(tmp_path)]
    assert run(["calibrate", "--fit", str(few), *words]) == 2
    assert "5 steps that depend on a link, too few" in capsys.readouterr().err and list(tmp_path.glob("*.yaml")) == []


def test_links_of_a_users_file_leave_kernels_of_old_libraries_alone(fitted: Path) -> None:
    device, profile = load_system("dgx-1-v100").device, load_software("caffe").with_fields({"convolutions.cudnn": 5.0})
    families = [
        convolution_family(KernelFamilyPredictor(device, "fp32", profile, own))
        for own in (None, load_calibration(str(fitted)), load_calibration("v100-pcie-32gb"))
    ]
    assert families == ["conv.vector-cudnn5", "conv.vector-cudnn5", "conv.vector"]
