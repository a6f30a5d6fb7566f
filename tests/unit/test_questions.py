"""The questions as functions: the documents of the command line, tables in notebooks, data frames, our errors."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.padding import Padding

import paleo
from paleo import questions
from paleo.cli import run_command_line as command
from paleo.errors import PaleoError, SpecError
from paleo.report.columns import notebook_html

NODE = "dgx-a100-80gb"
SAMPLES = Path(__file__).parents[1] / "fuzz" / "samples"
#: The same question in Python and on the command line, and words that its table shows.
ASKED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "estimate": (
        lambda: paleo.estimate("lenet", NODE, gpus=8, epochs=2, price="2 USD/h", failures="4/knodeday"),
        f"estimate lenet --system {NODE} --gpus 8 --epochs 2 --price 2USD/h --failures 4/knodeday",
        "Memory of the fullest GPU",
    ),
    "scale": (
        lambda: paleo.scale("gpt2", NODE, [1, 8], mode="both", seq=64),
        f"scale gpt2 both --system {NODE} --gpus 1,8 --seq 64",
        "efficiency",
    ),
    "compare": (
        lambda: paleo.compare("lenet", [NODE, ("dgx-h100", 4)], gpus=8, samples=1e6, objective="cost"),
        f"compare lenet --systems {NODE},dgx-h100:4 --gpus 8 --samples 1M --objective cost",
        "dgx-h100",
    ),
    "search": (
        lambda: paleo.search("lenet", NODE, 2, global_batch=4, top=3, recompute="none"),
        f"plan lenet --system {NODE} --gpus 2 --global-batch 4 --top 3 --set recompute=none",
        "Best plans",
    ),
    "plan": (
        lambda: paleo.plan("lenet", [NODE], [2, 4], global_batch=4, samples=1e6, deadline="60d", budget="5M"),
        f"plan lenet --systems {NODE} --gpus 2,4 --global-batch 4 --samples 1M --deadline 60d --budget 5M",
        "Reproduce it",
    ),
    "target": (
        lambda: paleo.target("mlperf:bert", NODE, [8], batch=448),
        f"target mlperf:bert --system {NODE} --gpus 8 --batch 448",
        f"on {NODE}: 8 GPUs, ",
    ),
    "validate": (
        lambda: paleo.validate([SAMPLES / "gemm.csv", SAMPLES / "rails.csv"]),
        f"validate {SAMPLES / 'gemm.csv'} {SAMPLES / 'rails.csv'}",
        "5 of 5 rows",
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_an_answer_is_that_of_the_command_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask, line, words = ASKED[name]
    answer = ask()
    assert command([*line.split(), "--json"]) in (0, 1)
    printed, document = json.loads(capsys.readouterr().out), json.loads(json.dumps(answer.to_dict()))
    for each in (printed, document):
        each.pop("seconds", None)  # of the search
    assert document == printed
    shown = answer._repr_html_()
    assert shown.count("<table>") >= 1 and words in shown
    assert len(repr(answer)) < 300 and "\n" not in repr(answer)


def test_cells_of_a_table_are_not_shown_by_themselves_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich displays what a console prints in a notebook, also where the console has a file."""
    shown: list[Any] = []
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr("rich.jupyter.display", lambda *arguments: shown.append(arguments))
    assert notebook_html(Padding("a remark", (0, 1))).startswith("<pre> a remark ") and not shown


#: A mistake in Python and on the command line: one message.
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no system": (lambda: paleo.compare("lenet", ","), "compare lenet --systems ,"),
    "no such system": (lambda: paleo.compare("lenet", "dgx-h10:8"), "compare lenet --systems dgx-h10:8"),
    "no count": (lambda: paleo.plan("lenet", [NODE], "8,x"), f"plan lenet --systems {NODE} --gpus 8,x"),
    "no objective": (
        lambda: paleo.compare("lenet", NODE, objective="mony"),
        f"compare lenet --systems {NODE} --objective mony",
    ),
    "a deadline of nothing": (
        lambda: paleo.plan("lenet", NODE, 8, deadline="60d"),
        f"plan lenet --system {NODE} --gpus 8 --deadline 60d",
    ),
    "no batch": (
        lambda: paleo.target("mlperf:bert", NODE, 8, batch="many"),
        f"target mlperf:bert --system {NODE} --gpus 8 --batch many",
    ),
    "failures of a run without length": (
        lambda: paleo.plan("lenet", NODE, 8, goodput=True),
        f"plan lenet --system {NODE} --gpus 8 --goodput",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_has_one_message(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ask, line = MISTAKES[name]
    with pytest.raises(PaleoError) as problem:
        ask()
    assert command(line.split()) == 2
    assert capsys.readouterr().err == f"error: {problem.value}\n"


def test_counts_by_doublings() -> None:
    assert questions.parse_gpu_counts("1,8..64") == [1, 8, 16, 32, 64]
    assert questions.parse_gpu_counts("3..8") == [3, 6, 8]
    assert questions.parse_gpu_counts([8, "16"]) == [8, 16]  # type: ignore[list-item]
    for wrong in ("1,024", "8..4", "0..8", "8..", "..8", "8...16", [True, 0]):
        with pytest.raises(SpecError, match="expected GPU counts"):
            questions.parse_gpu_counts(wrong)


@pytest.mark.slow
def test_each_system_of_a_plan_is_searched_at_its_own_count() -> None:
    answer = paleo.plan("lenet", [f"{NODE}:2", "dgx-h100"], [4], global_batch=8)
    assert {(plan.system.name, plan.row.gpus) for plan in answer.purchase.plans} == {(NODE, 2), ("dgx-h100", 4)}
    both = paleo.plan("lenet", [f"{NODE}:2", "dgx-h100:4"], global_batch=8, top=2)
    assert len({plan.system.name for plan in both.purchase.plans}) == 2  # not two of the better system
    found = paleo.plan("lenet", [f"{NODE}:2", "dgx-h100"], global_batch=8)  # the smallest order of the second
    assert {(plan.system.name, plan.row.gpus) for plan in found.purchase.plans} == {(NODE, 2), ("dgx-h100", 8)}


@pytest.mark.slow
def test_a_price_without_a_length_is_that_of_the_usual_training() -> None:
    """An objective of money is never decided by plans without a price."""
    answer = paleo.plan("lenet", NODE, [1, 8], global_batch=64, objective="cost", top=3)
    costs = [plan.objective_value("cost") for plan in answer.purchase.plans]
    assert None not in [plan.usd for plan in answer.purchase.plans] and costs == sorted(costs)


@pytest.mark.slow
def test_rows_of_a_frame() -> None:
    points = ASKED["scale"][0]().to_frame()
    assert list(points["gpus"]) == [1, 8, 1, 8]
    assert points["breakdown_s.memory_bound"].gt(0).all()
    assert (points["step_time_interval_s.low"] <= points["step_time_s"]).all()
    assert (points["step_time_s"] <= points["step_time_interval_s.high"]).all()
    one = ASKED["estimate"][0]()
    frame = one.to_frame()
    assert len(frame) == 1
    assert frame["step_time_s"].item() == one.step_time == one.prediction.step_time


def test_a_run_takes_the_length_of_its_sequences() -> None:
    assert paleo.Run(seq=64).model == {"seq": 64}
    assert paleo.Run(seq=64, model={"hidden": 8}).model == {"hidden": 8, "seq": 64}
    with pytest.raises(SpecError, match=r"model\.seq and seq state the same field"):
        paleo.Run(seq=64, model={"seq": 32})


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: paleo.Run(gpu=8), "Run: gpu: unknown key; nearest: 'gpus'"),
        (lambda: paleo.Run(gpus="many"), "Run: gpus: 'many': it should be a whole number"),
        (lambda: paleo.estimate("lenet", NODE, epoch=2), "paleo.estimate: unknown keyword 'epoch'; nearest: 'epochs'"),
        (lambda: paleo.search("lenet", NODE, [1], price="2 USD/h"), "paleo.search: unknown keyword 'price'"),
        (lambda: paleo.compare("lenet", [], gpus=8), "systems []: expected names such as dgx-a100-80gb:16"),
        (lambda: paleo.search("lenet", NODE, 0), "gpus '0': expected GPU counts from 1 to 10,000,000"),
        (lambda: paleo.plan("lenet", NODE, 8, deadline="soon"), "'soon'"),
        (lambda: paleo.compare("lenet", NODE, run=paleo.Run(), gpus=8), "gpus are fields of run=…"),
        (lambda: paleo.compare("lenet", NODE, objective="mony"), "'mony' is not time, cost or energy"),
    ],
)
def test_misspelt_keywords(ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(PaleoError) as problem:
        ask()
    assert words in str(problem.value)


def test_the_package_lists_its_names_and_loads_nothing() -> None:
    assert {"estimate", "scale", "compare", "search", "plan", "target", "Run", "predict"} <= set(dir(paleo))
    assert all(getattr(paleo, name) is not None for name in dir(paleo))
    light = "import sys, paleo; print(sorted({m.partition('.')[0] for m in sys.modules} & {'numpy', 'pydantic'}))"
    printed = subprocess.run([sys.executable, "-c", light], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.slow
def test_functions_keep_their_names_when_modules_of_theirs_are_imported() -> None:
    code = "import paleo.search.plans, paleo.predict, paleo; print(paleo.search.__module__, paleo.predict.__name__)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["paleo.questions", "predict"]


def test_a_prediction_is_short_in_print() -> None:
    step = paleo.predict(paleo.load_model("lenet"), paleo.load_system(NODE), paleo.Run(gpus=8))
    assert repr(step).startswith(f"<Prediction: lenet on 8 GPUs of {NODE}")


# what people type in notebooks


def test_numbers_of_numpy_are_numbers() -> None:
    import numpy as np

    step = paleo.estimate("lenet", NODE, gpus=np.int64(8), batch=np.int32(4))
    assert step.prediction.run == paleo.Run(gpus=8, batch=4) == paleo.Run(gpus=np.int64(8), batch=np.int8(4))
    assert [point.gpus for point in paleo.scale("lenet", NODE, np.array([1, 2])).points] == [1, 2]
    assert paleo.estimate("gpt2", NODE, seq=np.int64(64)).prediction.run.model == {"seq": 64}


def test_amounts_may_have_a_prefix() -> None:
    priced = paleo.estimate("gpt2", NODE, tokens="2M").training
    assert priced is not None and priced.samples == pytest.approx(2e6 / 1024)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: paleo.estimate(3, NODE), "model 3: expected a name"),  # type: ignore[arg-type]
        (lambda: paleo.estimate("lenet", 3), "system 3: expected a name"),  # type: ignore[arg-type]
        (lambda: paleo.estimate("lenet", NODE, run={"gpus": 8}), "run: {'gpus': 8}: expected"),  # type: ignore[arg-type]
        (lambda: paleo.estimate("lenet", NODE, samples="many"), "samples: 'many': expected a number"),
        (lambda: paleo.estimate("lenet", NODE, samples=[1]), "samples: [1]: expected a number"),  # type: ignore[arg-type]
        (lambda: paleo.estimate("lenet", NODE, samples=1, price=2.0), "2.0 has no unit"),
        (lambda: paleo.plan("lenet", NODE, 8, samples=1, deadline=3600), "'3600': expected a time"),  # type: ignore[arg-type]
        (lambda: paleo.search("lenet", NODE, 8, top=0), "top: 0: expected a number of plans"),
        (lambda: paleo.plan("lenet", NODE, 8, top=-1), "top: -1: expected a number of plans"),
        (lambda: paleo.search("lenet", NODE, 8, top="3"), "top: '3': expected a number of plans"),  # type: ignore[arg-type]
        (lambda: paleo.compare("lenet", None), "systems None: expected names"),  # type: ignore[arg-type]
        (lambda: paleo.target(3, NODE, 8), "task 3: expected a name"),  # type: ignore[arg-type]
        (lambda: paleo.target("gpt2", NODE, 8, loss="2"), "loss: '2': expected a number"),  # type: ignore[arg-type]
        (lambda: paleo.target("gpt2", NODE, 8, loss=float("nan")), "loss: nan: expected a number"),
        (
            lambda: paleo.estimate("lenet", NODE).prediction.predict_variant(bach=4),
            "bach: unknown key; nearest: 'batch'",
        ),
        (
            lambda: paleo.estimate("lenet", NODE).prediction.predict_variant(batch=-4),
            "batch: -4: it should be greater than 0",
        ),
        (lambda: paleo.predict("lenet", NODE, paleo.Run()), "paleo.estimate takes names"),  # type: ignore[arg-type]
        (lambda: paleo.estimate("lenet", NODE, samples=True), "samples: True: expected a number"),
        (lambda: paleo.estimate("lenet", NODE, samples=1, buy="x"), "--buy 'x': expected the years"),
        (lambda: paleo.estimate("lenet", NODE, samples=1, price="2 EUR/h"), "'EUR/h' is not a unit of a price by time"),
        (lambda: paleo.validate(3), "validate: 3: expected the path of a measured table"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_another_type_is_one_message(ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(SpecError) as refusal:
        ask()
    assert words in str(refusal.value)


def test_answers_can_be_keys_and_compared() -> None:
    first, second = (paleo.estimate("lenet", NODE, gpus=2) for _ in range(2))
    assert first == first and first != second and len({first, second, first.prediction}) == 3
    run = paleo.Run(gpus=2, model={"seq": 64})
    assert {run: 1}[paleo.Run(gpus=2, model={"seq": 64})] == 1 and hash(run) != hash(paleo.Run(gpus=4))
    assert hash(paleo.load_system(NODE)) == hash(paleo.load_system(NODE).model_copy())


def test_rows_of_a_data_frame_name_what_they_are_of() -> None:
    curve, task = paleo.scale("lenet", NODE, [1, 2]).to_frame(), paleo.target("mlperf:bert", NODE, [8], batch=448)
    assert curve[["model", "system"]].drop_duplicates().values.tolist() == [["lenet", NODE]]
    assert task.to_frame().iloc[0][["task", "system"]].tolist() == ["mlperf-bert", NODE]
    assert paleo.compare("lenet", [NODE, "dgx-h100"], gpus=2).to_frame()["system"].tolist() == [NODE, "dgx-h100"]


def test_profiles_and_calibrations_that_were_loaded_price_a_step() -> None:
    model, system, run = paleo.load_model("gpt2"), paleo.load_system(NODE), paleo.Run(batch=4)
    software = paleo.load_software("pytorch-eager")
    slow = software.model_copy(update={"host": software.host.model_copy(update={"forward": 1e-3})})
    usual = paleo.predict(model, system, run).step_time
    assert paleo.predict(model, system, run, software=slow).step_time > 2 * usual
    same = paleo.predict(model, system, run, calibration=paleo.load_calibration("a100-sxm4-80gb"))
    assert same.step_time == pytest.approx(usual)


def test_commands_under_a_comparison_of_plans_show_the_same_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """A strategy is not the whole plan: cuts, batches and the order of exchanges stand in the command alone."""
    answer = paleo.compare("gpt2", [(NODE, 8), ("dgx-1-v100", 8)], strategy="auto", global_batch=64, samples=1e6)
    candidates = answer.comparison.candidates
    line = f"compare gpt2 --systems {NODE}:8,dgx-1-v100:8 --strategy auto --global-batch 64 --samples 1M"
    assert command(line.split()) == 0
    shown = capsys.readouterr().out.replace(" \\\n  ", " ")
    lines = [line.partition(": paleo ")[2] for line in shown.splitlines() if line.startswith("Reproduce ")]
    for line, candidate in zip(lines, candidates, strict=True):
        assert command([*shlex.split(line), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_time_s"] == candidate.step_time


@pytest.mark.slow
def test_columns_of_data_frames_are_described() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "columns.md").read_text(encoding="utf-8")
    described = set[str]()
    for row in (line.split("|")[1] for line in page.splitlines() if line.startswith("|")):
        names = re.findall(r"`([^`]+)`", row)
        described |= {name if name[0] != "." else names[0].partition(".")[0] + name for name in names}
    asked = {"model": "gpt2", "samples": 1e6, "price": "2 USD/h", "seq": 64}
    swept = {"models": ["gpt2"], "systems": [NODE], "axes": {"gpus": [8], "samples": [1e6]}}
    frames = [
        paleo.estimate(system=NODE, gpus=8, **asked).to_frame(),
        paleo.scale(system=NODE, gpus=[1, 8], mode="both", **asked).to_frame(),
        paleo.compare(systems=[NODE, "t4"], gpus=8, **asked).to_frame(),
        paleo.search("mixtral-8x7b", "dgx-h100", 8, global_batch=8, top=3, strategy="ep=8").to_frame(),
        paleo.plan("gpt2", NODE, 8, global_batch=64, samples=1e6, top=3, strategy="dp").to_frame(),
        paleo.target("mlperf:bert", NODE, [8], batch=512, strategy="dp").to_frame(),
        paleo.sweep(swept),
    ]
    assert sorted({column for frame in frames for column in frame.columns} - described) == []


def test_a_picture_of_one_system_in_two_sizes_has_a_bar_for_each() -> None:
    from paleo.report import plots

    figure = plots.plot_systems(paleo.compare("lenet", ["dgx-h100:8", "dgx-h100:16", f"{NODE}:8"], batch=16).comparison)
    parts, rates, _ = figure.axes
    names = ["dgx-h100:8", "dgx-h100:16", f"{NODE}:8"]
    assert [label.get_text() for label in parts.get_yticklabels()] == names
    centres = {round(bar.get_y() + bar.get_height() / 2) for bar in rates.patches}
    assert centres == {round(bar.get_y() + bar.get_height() / 2) for bar in parts.patches} == {0, 1, 2}


@pytest.mark.slow
def test_one_run_has_the_same_figures_whatever_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"global_batch": 64, "microbatch": 4, "strategy": "zero=2"}
    paid = {"tokens": 1e9, "price": "2 USD/h", "electricity": "0.2 USD/kWh", "pue": 1.2, "host_power": "100 W"}
    one = paleo.estimate("gpt2", NODE, gpus=16, **options, **paid).to_frame()
    figures = ["step_time_s", "memory_bytes.total", "training.cost_usd", "training.energy_j"]
    (expected,) = one[figures].to_numpy().tolist()
    curve = paleo.scale("gpt2", NODE, [16], **options, **paid).to_frame()
    assert curve[[figures[0], "memory_total_bytes", *figures[2:]]].to_numpy().tolist() == [expected]
    beside = paleo.compare("gpt2", [NODE], gpus=16, **options, **paid).to_frame()
    assert beside[figures].to_numpy().tolist() == [expected]
    axes = {"gpus": [16], "tokens": [1e9], "gpu_price": ["2 USD/h"], "electricity": ["0.2 USD/kWh"], "pue": [1.2]}
    study = {"models": ["gpt2"], "systems": [NODE], "run": options, "axes": axes | {"host_power": ["100 W"]}}
    (row,) = paleo.sweep(study)[["step_time_s", "memory_bytes", "cost_usd", "energy_kwh"]].to_numpy().tolist()
    assert row == pytest.approx([*expected[:3], expected[3] / 3.6e6], rel=1e-12)
    words = ["--gpus", "16", "--global-batch", "64", "--strategy", "zero=2", "--set", "microbatch=4", "--tokens", "1B"]
    words += ["--price", "2 USD/h", "--electricity", "0.2 USD/kWh", "--pue", "1.2", "--host-power", "100 W"]
    assert command(["report", "gpt2", "--systems", NODE, *words, "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"{expected[2]:.3g} USD" in page and "no other system was asked for" in page
    first = paleo.plan("gpt2", NODE, 16, global_batch=64, tokens=1e9, top=1).to_frame()
    capsys.readouterr()
    assert command([*shlex.split(first.command[0])[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["step_time_s"], again["memory_bytes"]["total"]) == pytest.approx(
        (first.step_time_s[0], first.memory_bytes[0]), rel=1e-9
    )


def test_an_array_of_no_dimension_is_what_it_holds() -> None:
    first, second = (paleo.plan("gpt2", system, 8).to_dict() for system in ("dgx-h100", np.array("dgx-h100")))
    assert first["plans"] == second["plans"]
    with pytest.raises(SpecError, match="expected names, paths"):
        paleo.plan("gpt2", np.array(None), 8)


@pytest.mark.slow
def test_every_function_takes_numbers_of_numpy_as_pythons() -> None:
    """Found by the fuzz: a law that refused a numpy number, a network that was an array."""
    stated, plain = (paleo.target("mlperf:resnet", NODE, [8], noise_scale=kind(4096)) for kind in (np.int64, int))
    assert stated.to_dict() == plain.to_dict()
    with pytest.raises(SpecError):
        paleo.serve(np.array([1, 8]), NODE)  # type: ignore[arg-type]
