"""``paleo validate``: kinds by header, errors by hand, reasons for what is left out, and look-up with inheritance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.pricing.calibration_lookup import (
    HOST_PARAMETERS,
    UNMEASURED_INTERVAL_FACTORS,
    SourcedParameters,
    find_calibrated_parameters,
    inherited_entry,
)
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import SUSTAINED_ENERGY_FAMILY, PowerParameters, SustainedEnergyParameters
from paleo.specs.calibration import load_calibration, load_inheritance, parameters_from_mapping
from paleo.specs.catalog import entry_names
from paleo.step.interval import IntervalParameters
from paleo.tables.cells import factorize_text_column, map_text_columns
from paleo.tables.kernels import KERNEL_TABLES
from paleo.tables.run_tables import find_table_kind
from paleo.tables.validation import (
    ErrorSummary,
    explain_prediction_error,
    summarise_errors,
    validate_file,
    validate_frame,
    with_predictions,
)
from paleo.tables.validation_report import json_document, prediction_plot


def products(**columns: object) -> pd.DataFrame:
    """A few bf16 products on H100 as aiconfigurator times them."""
    data = {"source": "aiconfigurator", "device": "h100-sxm5-80gb", "dtype": "bf16", "library": "TensorRT-LLM"}
    sizes = {"m": [64, 512, 4096], "n": [64, 512, 4096], "k": [64, 512, 4096], "batch": 1, "time_us": [3.0, 5.0, 220.0]}
    return pd.DataFrame({**data, **sizes, **columns})


# --- the errors themselves -----------------------------------------------------------------------------------------


def test_errors_by_hand() -> None:
    predicted, measured = np.array([1.1, 1.8, 3.0]), np.array([1.0, 2.0, 4.0])
    found = summarise_errors(predicted, measured, 0.9 * predicted, 1.2 * predicted, np.array([2.0, 2.0, 2.0]))
    assert found.rows == 3
    assert found.median_ape == pytest.approx(0.1)
    assert found.mape == pytest.approx((0.1 + 0.1 + 0.25) / 3)
    assert found.bias == pytest.approx(np.log(1.1 * 0.9 * 0.75) / 3)
    assert found.total_error == pytest.approx(5.9 / 7.0 - 1.0)
    assert found.coverage == pytest.approx(2 / 3)  # 1.0 in [0.99, 1.32], 2.0 in [1.62, 2.16], 4.0 not in [2.7, 3.6]
    assert found.baseline_mape == pytest.approx((1.0 + 0.0 + 0.5) / 3)


def test_no_rows_have_no_errors() -> None:
    nothing = np.zeros(0)
    assert summarise_errors(nothing, nothing, nothing, nothing, nothing) == ErrorSummary(0, *(None,) * 7)


def test_baseline_is_one_best_constant_for_each_device() -> None:
    report = validate_frame("t", products(), find_table_kind(products().columns))
    ideal, efficiency = report.predictions.baseline, report.roofline_efficiency_by_device["h100-sxm5-80gb"]
    trials = [np.mean(np.abs(ideal / e / report.measured - 1)) for e in np.linspace(0.01, 1.0, 400)]
    assert np.mean(np.abs(report.baseline / report.measured - 1)) <= min(trials) + 1e-9
    assert ideal[2] == pytest.approx(2 * 4096**3 / (4096 * 132 * 1.98e9), rel=0.01)  # matrix units at the boost clock
    assert report.baseline == pytest.approx(ideal / efficiency)


# --- rows that cannot be modelled ----------------------------------------------------------------------------------


def test_each_row_is_predicted_or_explained() -> None:
    frame = products(
        device=["h100-sxm5-80gb", "h100-sxm5-80", "p100-pcie-16gb"], m=["64", "x", "4096"], time_us=[3.0, 5.0, 220.0]
    )
    frame = pd.concat([frame, products(time_us=[0.0, np.nan, 220.0], m=[64, -3, 4096]), products().iloc[:0]])
    report = validate_frame("t", frame, find_table_kind(frame.columns))
    assert report.predicted_row_mask.tolist() == [True, False, False, False, False, True]
    reasons = report.predictions.failure_reasons
    assert reasons[[1, 4]].tolist() == [f"m {cell!r} is not a whole number from 0 to 9e+15" for cell in ("x", "-3")]
    assert "p100-pcie-16gb has no peak for dtype 'bf16'" in reasons[2]
    assert reasons[3] == "time_us '0.0' is not a number from 1e-06 to 1e+18 us"
    assert sum(report.unsupported_reasons.values()) == 4


def test_unknown_device_names_the_nearest() -> None:
    report = validate_frame("t", products(device="h100-sxm5-80"), find_table_kind(products().columns))
    assert not report.predicted_row_mask.any() and "h100-sxm5-80gb" in report.predictions.failure_reasons[0]
    assert report.errors().rows == 0


def test_devices_are_found_by_what_cuda_calls_them() -> None:
    report = validate_frame("t", products(device="NVIDIA H100 80GB HBM3"), find_table_kind(products().columns))
    assert set(report.errors_by_group(report.predictions.device_names)) == {"h100-sxm5-80gb"}


def test_further_columns_and_their_order_do_not_matter() -> None:
    plain, more = products(), products(colour="red")[["colour", *reversed(products().columns)]]
    one, other = (
        validate_frame("t", frame, find_table_kind(frame.columns)).predictions.values for frame in (plain, more)
    )
    assert one == pytest.approx(other, rel=1e-12)


def test_unknown_header_says_what_is_missing() -> None:
    with pytest.raises(SpecError, match="the nearest, 'gemm', also needs 'k'"):
        find_table_kind(products().drop(columns="k").columns)


@pytest.mark.parametrize(
    ("measured", "predicted", "ideal", "spread", "origin", "word"),
    [
        (1.0, 3.0, 2.0, 0.0, "measured", "datasheet"),
        (3.0, 9.0, 2.0, 0.5, "measured", "differ by 50%"),
        (3.0, 9.0, 2.0, 0.0, "inherited (Hopper)", "inherited"),
        (50.0, 90.0, 2.0, 0.0, "measured", "fixed costs"),
        (3.0, 9.0, 2.0, 0.0, "measured", "choice of kernel"),
    ],
)
def test_misses_are_explained(
    measured: float, predicted: float, ideal: float, spread: float, origin: str, word: str
) -> None:
    assert word in explain_prediction_error(measured, predicted, ideal, spread, origin)


# --- any device, any stack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "device",
    ["gh200-96gb", "rtx-pro-6000-blackwell", "b300", "l40", "titan-rtx", "a10", "p4", "m40", "titan-xp", "mi300x"],
)
@pytest.mark.parametrize("source", ["aiconfigurator", "vidur", "neusight", "deepbench", "elsewhere"])
def test_devices_without_measurements_inherit(device: str, source: str) -> None:
    frame = products(device=device, source=source, dtype="fp32")
    out = find_table_kind(frame.columns).predict(frame)
    assert (out.failure_reasons == "").all()
    assert (out.low <= out.values).all() and (out.values <= out.high).all() and (out.values >= out.baseline).all()
    assert all(str(origin).startswith("inherited") for origin in out.parameter_origins)


def every_family() -> dict[str, type]:
    """The parameters of each family of kernels, of boards, and of the intervals of steps."""
    kernels = {
        family: kind for _, table in KERNEL_TABLES.items() for family, kind in table.parameters_by_family.items()
    }
    return {
        **kernels,
        "power": PowerParameters,
        "interval": IntervalParameters,
        SUSTAINED_ENERGY_FAMILY: SustainedEnergyParameters,
    }


def test_every_rule_resolves_and_fits_its_family() -> None:
    families = every_family()
    inheritance = load_inheritance()
    assert inheritance is not None
    for rule in inheritance.rules:
        for family in rule.families:
            for architecture in rule.architectures:
                for stack in rule.stacks:
                    entry = inherited_entry(rule, family, stack, architecture, (rule.memory_kinds or ("HBM2",))[0])
                    parameters_from_mapping(families[rule.family_there or family], entry.parameters, where=family)


def test_host_parameters_are_those_of_the_kinds() -> None:
    for kind in dict(KERNEL_TABLES.items()).values():
        for family in kind.parameters_by_family:
            assert set(kind.host_parameters) <= set(HOST_PARAMETERS[family.partition(".")[0]])


def test_a_stack_that_was_not_measured_keeps_the_silicon() -> None:
    def found(stack: str) -> SourcedParameters[GemmParameters]:
        return find_calibrated_parameters(
            GemmParameters, subject="a100-sxm4-80gb", architecture="Ampere", memory_kind="HBM2e", family="gemm.tensor",
            stacks=(stack,),
        )  # fmt: skip

    replayed, queued = found("graph"), found("back-to-back")
    assert replayed.origin == queued.origin == "measured"
    assert queued.parameters.launch_time != replayed.parameters.launch_time
    assert queued.parameters.dram_latency_cycles == replayed.parameters.dram_latency_cycles


def test_what_no_rule_knows_has_the_formulas_defaults() -> None:
    found = find_calibrated_parameters(GemmParameters, subject="x", architecture="Kepler", family="gemm.unheard-of")
    assert found.origin == "default" and found.interval_factors(1.0) == UNMEASURED_INTERVAL_FACTORS


def test_relatives_are_wider_than_the_family_itself() -> None:
    def width(architecture: str) -> float:
        found = find_calibrated_parameters(
            GemmParameters, subject="x", architecture=architecture, family="gemm.fp8", stacks=("graph",)
        )
        low, high = found.interval_factors(1.0)
        return high / low

    assert width("Hopper") < width("Volta")


def test_bounds_follow_the_bins() -> None:
    found = SourcedParameters(None, "measured", "x", ((1.0, 0.5, 2.0), (np.inf, 0.9, 1.1)))
    low, high = found.interval_bounds(np.array([0.5, 1.0, 4.0]))
    assert low == pytest.approx([0.25, 0.5, 3.6]) and high == pytest.approx([1.0, 2.0, 4.4])
    for seconds in (0.5, 1.0, 1.5, 4.0, np.inf, np.nan):
        assert found.interval_factors(seconds) == tuple(
            each.item() for each in found.interval_factor_arrays(np.array([seconds]))
        )
    assert found.interval_factors(4.0) == (0.9, 1.1)


@pytest.mark.parametrize("name", [one for one in entry_names("calibrations") if one != "architectures"])
def test_shipped_calibrations_load_and_fit_their_families(name: str) -> None:
    families = every_family()
    calibration = load_calibration(name)
    assert calibration.device_or_system == name and calibration.entries
    for entry in calibration.entries:
        parameters_from_mapping(families[entry.family], entry.parameters, where=f"{name}: {entry.family}")
        assert all(one.low <= 1.0 <= one.high for one in entry.interval)


# --- what the command writes ---------------------------------------------------------------------------------------


def test_json_is_one_document_with_the_keys_of_the_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.csv.gz"
    products().to_csv(file, index=False)
    assert run(["validate", str(file), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["files"]
    assert one["file"] == str(file) and one["kind"] == "gemm" and one["rows"] == one["predicted"] == 3
    assert one["unsupported"] == 0 and one["unsupported_reasons"] == {}
    keys = {"rows", "median_ape", "mape", "p90_ape", "bias", "total_error", "coverage", "baseline_mape"}
    for part in (one["overall"], one["by_device"]["h100-sxm5-80gb"], one["by_source"]["aiconfigurator"]):
        assert set(part) == keys and part["rows"] == 3


@pytest.mark.slow
def test_tables_predictions_and_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, rows, plot = (tmp_path / name for name in ("t.csv", "p.csv", "p.svg"))
    products(time_us=[3.0, np.nan, 220.0]).to_csv(file, index=False)
    assert run(["validate", str(file), "--predictions", str(rows), "--plot", str(plot)]) == 0
    written = pd.read_csv(rows)
    assert list(written.columns)[: len(products().columns)] == list(products().columns)
    assert (written["low"] <= written["predicted"]).loc[[0, 2]].all() and written["predicted"][2] > 100  # microseconds
    assert written["unsupported"][1].startswith("time_us")
    assert plot.read_text().startswith("<?xml") and "1 row: time_us" in capsys.readouterr().out


def test_two_files_share_one_table_of_predictions() -> None:
    reports = [validate_frame(name, products(), find_table_kind(products().columns)) for name in ("a", "b")]
    assert with_predictions(reports)["file"].tolist() == ["a"] * 3 + ["b"] * 3
    assert len(prediction_plot(reports).axes) == 2 and len(json_document(reports)["files"]) == 2


@pytest.mark.parametrize(
    ("option", "word"),
    [("--plot=x.gif", "ends in .png"), ("--predictions=x.txt", "csv"), ("--calibration=h100-sxm5", "nearest")],
)
def test_bad_options_are_errors_before_any_work(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "nothing.csv", option]) == 2
    assert word in capsys.readouterr().err


def test_an_own_calibration_prices_its_device_alone() -> None:
    own = load_calibration("h100-sxm5-80gb").model_copy()
    doubled = [one.model_copy(update={"parameters": one.parameters | {"launch_time": 1.0}}) for one in own.entries]
    own = own.model_copy(update={"entries": tuple(doubled)})
    frame = pd.concat([products(), products(device="a100-sxm4-80gb")], ignore_index=True)
    seconds = KERNEL_TABLES["gemm"].with_calibration(own).predict(frame).values
    assert (seconds[:3] > 1.0).all() and (seconds[3:] < 0.1).all()


# --- words ---------------------------------------------------------------------------------------------------------


def test_words_are_coded_once() -> None:
    frame = pd.DataFrame({"a": pd.Series([" x", "y", None, "x"], dtype="category")})
    codes, words = factorize_text_column(frame, "a", "none")
    assert [words[code] for code in codes] == ["x", "y", "none", "x"]
    calls: list[str] = []
    assert map_text_columns(frame, ("a", "absent"), lambda a, b: calls.append(a) or len(a), int).tolist() == [
        1,
        1,
        0,
        1,
    ]
    assert sorted(calls) == ["", "x", "x", "y"]  # ' x' and 'x' are two words of the column


def test_axes_of_parity_are_in_words(tmp_path: Path) -> None:
    """No mark-up of formulas is left in the numbers at the axes, nor taken for one in a name."""
    products().to_csv(tmp_path / "a$b$.csv", index=False)
    drawn = prediction_plot([validate_file(tmp_path / "a$b$.csv")])
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    labels = [tick.get_text() for axis in (axes.xaxis, axes.yaxis) for tick in axis.get_ticklabels(which="both")]
    assert {"10 us", "100 us"} <= set(labels) and not any("$" in label for label in labels)
    assert axes.get_title().startswith("a$b$.csv: ")


# what is wrong with a file

ROW = "me,l40s,bf16,512,512,512,1,9"
NAMES = "source,device,dtype,m,n,k,batch,time_us"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"{NAMES}\n{ROW},7,7\n", "rows have more cells than the header has names"),
        (f"{NAMES}\n{ROW}\n".replace(",", ";"), "its cells are separated by ';'; expected commas"),
        (f"{NAMES}\n{ROW}".replace(",", ";") + ",5\n", "separated by ';'; expected commas, and points for decimals"),
        (f"{NAMES}\n{ROW}\n".replace("_us", "_ms"), r"needs 'time_us' \('time_ms' is not that: convert it\)"),
        (f"{NAMES}\n{ROW}\n".replace(",", "\t"), r"its cells are separated by '\\t'; expected commas"),
        (f"{NAMES}\n{ROW}\n".replace("device", "Device"), r"'gemm', also needs 'device' \(is it 'Device'\?\) \("),
        (f"{NAMES}\n{ROW}\n".replace("source,", "").replace("me,", ""), r"table.csv: .* also needs 'source' \("),
    ],
)
def test_a_file_in_another_form_is_one_message(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(SpecError, match=words) as refusal:
        validate_file(tmp_path / "table.csv")
    assert "table.csv: " in str(refusal.value)


def test_a_comma_at_the_end_of_a_row_shifts_nothing(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(f"{NAMES}\n{ROW},\n{ROW},\n")
    assert validate_file(tmp_path / "table.csv").frame["device"].tolist() == ["l40s", "l40s"]


def test_a_table_without_a_row_to_predict_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.csv").write_text(f"{NAMES}\n{ROW.replace('bf16', 'bfloat16')}\n")
    assert run(["validate", str(tmp_path / "table.csv")]) == 0
    printed = capsys.readouterr().out
    assert "0 of 1 rows" in printed and "worst rows" not in printed
    assert "1 row: dtype 'bfloat16' is not modelled; nearest: 'bf16'" in printed


@pytest.mark.parametrize(("time", "asked"), [("0.009", True), ("9", False), ("9000", True)])
def test_a_unit_that_looks_wrong_is_asked_about(
    time: str, asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text(f"{NAMES}\n{ROW.removesuffix('9')}{time}\n")
    assert run(["validate", str(tmp_path / "table.csv")]) == 0
    assert ("is time_us in its unit?" in capsys.readouterr().out) is asked
