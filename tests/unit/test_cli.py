from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperOption

from paleo import questions
from paleo.cli import run_command_line as run
from paleo.cli.process import app_with_all_commands

ROOT = Path(__file__).resolve().parents[2]
ESTIMATE = ["estimate", "lenet", "--system", "dgx-a100-80gb"]
COMMANDS_OF_SOMETHING = [
    *("audit", "collective", "compare", "estimate", "fleet", "import", "report", "rl", "scale", "serve"),
    *("summary", "sweep", "target", "trace", "tune", "validate"),
]
SCALE = ["scale", "lenet", "--system", "dgx-a100-80gb"]


@pytest.fixture
def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command with --json: its exit code and the one document that it prints."""

    def call(*arguments: str) -> tuple[int, Any]:
        code = run([*arguments, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command that must fail with exit code 2, nothing on stdout and one line on stderr: that line."""

    def call(*arguments: str) -> str:
        assert run(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        return captured.err

    return call


def finite(value: Any) -> bool:
    """Whether no number of a document is missing."""
    if isinstance(value, dict):
        return all(finite(one) for one in value.values())
    return value is not None


@pytest.mark.parametrize("command", COMMANDS_OF_SOMETHING)
def test_a_command_without_arguments_says_what_is_missing_and_shows_an_example(command: str, failure: Any) -> None:
    message = failure(command)
    assert message.startswith("error: Missing ")
    _, example = message.rstrip("\n").split("; for example: ")
    assert example.startswith(f"paleo {command} ")


@pytest.mark.parametrize("command", ["estimate", "scale", "compare", "plan", "collective", "calibrate", "sweep"])
def test_an_option_of_one_value_is_stated_once(command: str, failure: Any) -> None:
    first, *_ = [option for option in options_of(command) if not (option.multiple or option.is_flag)]
    name = max(first.opts, key=len)
    assert failure(command, name, "8", name, "16") == f"error: {name} occurs 2 times; it takes one value\n"


def options_of(command: str) -> list[Any]:
    """Options of a command, as typer knows them."""
    parameters = typer.main.get_command(app_with_all_commands()).commands[command].params  # type: ignore[attr-defined]
    return [each for each in parameters if isinstance(each, TyperOption)]


def test_options_of_several_values_and_flags_may_stand_again(document: Any) -> None:
    code, answer = document(*ESTIMATE, "--set", "batch=4", "--set", "optimizer=sgd", "--json")
    assert (code, answer["model"]) == (0, "lenet")


@pytest.mark.parametrize(
    ("spelling", "title"), [("LeNet", "LeNet"), ("Llama-3-8B", "Llama 3 8B"), ("DGX_H100", "DGX H100")]
)
def test_names_are_shown_in_any_spelling_that_predictions_take(spelling: str, title: str, capsys: Any) -> None:
    assert run(["show", spelling]) == 0
    assert title in capsys.readouterr().out


# contracts


def test_estimate_document_has_the_keys_of_the_contract(document: Any) -> None:
    code, made = document(*ESTIMATE, "--gpus", "8", "--batch", "16")
    assert code == 0
    assert (made["model"], made["system"]) == ("lenet", "dgx-a100-80gb")
    assert (made["gpus"], made["global_batch_size"]) == (8, 128)
    keys = "strategy dtype step_time_s step_time_interval_s samples_per_s tokens_per_s mfu flops_per_step"
    assert set(keys.split()) | {"fits", "calibration", "unmodelled", "warnings"} <= set(made)
    parts = "compute memory_bound launch communication_exposed communication_total bubble optimizer input"
    assert set(parts.split()) <= set(made["breakdown_s"])
    memory = "parameters gradients optimizer activations workspace total capacity"
    assert set(memory.split()) <= set(made["memory_bytes"])
    low, high = made["step_time_interval_s"]
    assert 0 < low <= made["step_time_s"] <= high
    assert made["samples_per_s"] == pytest.approx(128 / made["step_time_s"])


def test_the_parts_of_a_step_add_up(document: Any) -> None:
    made = document(*ESTIMATE, "--gpus", "8")[1]
    spent = {key: value for key, value in made["breakdown_s"].items() if key != "communication_total"}
    assert sum(spent.values()) == pytest.approx(made["step_time_s"], rel=1e-6)
    memory = dict(made["memory_bytes"])
    total, _ = memory.pop("total"), memory.pop("capacity")
    assert sum(memory.values()) == pytest.approx(total)


def test_summary_document_sums_over_repeats(document: Any) -> None:
    code, made = document("summary", "bert_base")
    assert code == 0
    keys = "name type output_shape parameters flops_forward flops_backward bytes_forward saved_bytes repeat"
    assert set(keys.split()) <= set(made["layers"][0])
    for key in ("parameters", "flops_forward", "flops_backward"):
        assert sum(layer[key] * layer["repeat"] for layer in made["layers"]) == pytest.approx(made[key])
    saved = sum(layer["saved_bytes"] * layer["repeat"] for layer in made["layers"])
    assert saved == pytest.approx(made["saved_activation_bytes"])


def test_summary_takes_batch_and_sequence(document: Any) -> None:
    short = document("summary", "bert_base", "--seq", "128", "--batch", "4", "--set", "model.predictions=20")[1]
    assert short["batch"] == 4
    assert short["layers"][0]["output_shape"] == [4, 128, 768]


def test_scale_document(document: Any) -> None:
    code, made = document(*SCALE, "--gpus", "1,2,4,8", "--global-batch", "4")
    assert code == 0
    assert [point["gpus"] for point in made["points"]] == [1, 2, 4]
    assert {point["global_batch_size"] for point in made["points"]} == {4}
    assert made["points"][0]["speedup"] == made["points"][0]["efficiency"] == 1.0
    for point in made["points"]:
        assert point["efficiency"] == pytest.approx(point["speedup"] / point["gpus"])
        assert {"step_time_s", "samples_per_s", "breakdown_s"} <= set(point)
    idle = {"scaling": "strong", "gpus": 8, "reason": "out of samples: 4 of them, 4 GPUs idle"}
    assert [idle | point for point in made["unusable"]] == made["unusable"] and len(made["unusable"]) == 1


def test_scale_is_weak_without_a_global_batch_and_both_on_demand(document: Any) -> None:
    weak = document(*SCALE, "--gpus", "1,2", "--batch", "8")[1]
    assert [point["global_batch_size"] for point in weak["points"]] == [8, 16]
    both = document(*SCALE, "both", "--gpus", "1,2", "--batch", "8")[1]
    assert [point["scaling"] for point in both["points"]] == ["strong", "strong", "weak", "weak"]
    assert document(*SCALE, "--mode", "strong", "--gpus", "1", "--batch", "8")[1]["curves"][0]["scaling"] == "strong"


def test_a_scale_shows_the_warnings_of_its_points_once(document: Any, capsys: Any) -> None:
    call = ["scale", "gpt2", "--system", "tpu-v5p-pod", "--gpus", "4,8", "--batch", "2", "--strategy", "sp"]
    warnings = document(*call)[1]["warnings"]
    assert [text.partition(":")[0] for text in warnings] == ["4, 8 GPUs"] * 2
    assert "sp changes nothing" in warnings[0] and "--software xla-tpu" in warnings[1]
    assert run(call) == 0
    assert " ".join(capsys.readouterr().out.split()).count("Warning: 4, 8 GPUs: ") == 2


def test_compare_document(document: Any) -> None:
    code, made = document("compare", "lenet", "--systems", "dgx-a100-80gb,aws-p4d.24xlarge,t4", "--gpus", "8")
    assert code == 0
    first, second, third = made["systems"]
    assert first["speedup"] == 1.0
    assert second["training"]["price_usd_per_hour"] > 0
    assert second["training"]["price_source"]
    assert "t4" in third["error"]
    assert made["best"]["time"] in ("dgx-a100-80gb", "aws-p4d.24xlarge")
    assert made["best"]["cost"] == "aws-p4d.24xlarge"


def test_a_comparison_says_whether_its_order_is_certain(document: Any, capsys: Any) -> None:
    alike = ["compare", "bert_base", "--systems", "dgx-a100-80gb,aws-p4d.24xlarge", "--gpus", "8", "--batch", "64"]
    made = document(*alike)[1]
    rival = next(name for name in ("dgx-a100-80gb", "aws-p4d.24xlarge") if name != made["best"]["time"])
    assert made["not_certain"]["time"] == [rival]
    assert run(alike) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Not certain, as 90 % intervals overlap: fastest (with {rival}:8)" in text
    assert "90 % interval of the time: dgx-a100-80gb:8 " in text
    unlike = [*alike[:3], "dgx-1-v100,dgx-h100", *alike[4:]]
    assert document(*unlike)[1]["not_certain"]["time"] == []
    assert run(unlike) == 0
    assert "fastest (with" not in " ".join(capsys.readouterr().out.split())


def test_points_of_a_scale_that_do_not_fit_have_no_figures(capsys: Any) -> None:
    call = ["scale", "llama3-8b", "--system", "dgx-a100-80gb", "--batch", "1", "--strategy", "zero=3"]
    assert run([*call, "--gpus", "1,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (single,) = (line.split() for line in lines if line.split()[:2] == ["1", "-"])
    assert set(single[1:]) == {"-"}  # nor a price
    assert any(line.startswith("Does not fit into 79.3 GiB: 1 GPU (") for line in lines)


def test_collective_document(document: Any) -> None:
    code, made = document("collective", "all-reduce", "--bytes", "1MB", "--ranks", "16", "--system", "dgx-a100-80gb")
    assert code == 0
    assert made["payload_bytes"] == 1e6
    times = {row["algorithm"]: row["time_s"] for row in made["algorithms"]}
    assert made["time_s"] == times[made["best"]]
    assert {row["algorithm"]: row["steps"] for row in made["algorithms"]}["ring"] == 2 * (16 - 1)
    assert finite(made)


def test_list_and_show_know_every_kind(document: Any) -> None:
    kinds = document("list")[1]
    assert {"models", "devices", "links", "systems", "collectives", "schedules", "layers"} <= set(kinds)
    for kind in ("collectives", "schedules", "layers", "strategies", "optimizers", "links", "software"):
        assert document("list", kind)[1] == {"schema": "paleo.list/1", kind: kinds[kind]}
        for name in list(kinds[kind])[:2]:
            assert document("show", name)[0] == 0
    assert document("show", "h100-sxm5-80gb")[1]["device"]["memory"]["capacity"] == 80 * 2**30
    assert document("show", str(ROOT / "models" / "lenet.yaml"))[1]["model"]["title"] == "LeNet-5"


# options


def test_options_reach_the_run(document: Any) -> None:
    made = document(*ESTIMATE, "--gpus", "4", "--global-batch", "64", "--microbatch", "8", "--dtype", "fp16",
                    "--optimizer", "sgd", "--calibration", "ideal", "--set", "exchange=after")[1]  # fmt: skip
    assert (made["global_batch_size"], made["microbatch"], made["num_microbatches"]) == (64, 8, 2)
    assert (made["dtype"], made["calibration"]) == ("fp16", "ideal")
    assert made["memory_bytes"]["optimizer"] == 61706 * 4  # sgd keeps the fp32 weights alone


def test_seq_and_set_change_the_model(document: Any) -> None:
    long = document("estimate", "bert_base", "--system", "dgx-a100-80gb", "--batch", "1", "--seq", "256")[1]
    short = document("estimate", "bert_base", "--system", "dgx-a100-80gb", "--batch", "1", "--set", "model.seq=128")[1]
    assert long["flops_per_step"] > 1.9 * short["flops_per_step"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ESTIMATE, "--gpu", "8"], "--gpus"),
        ([*ESTIMATE, "--gpus", "eight"], "'--gpus': 'eight' is not a whole number; write it in digits, such as 1024"),
        ([*ESTIMATE, "--dtype", "nvfp4"], "'nvfp4' is how fp4 is scaled; state dtype fp4 and scaling=nvfp4"),
        ([*ESTIMATE, "--gpus", "0"], "gpus: 0"),
        ([*ESTIMATE, "--dtype", "bf61"], "nearest: 'bf16'"),
        ([*ESTIMATE, "--optimizer", "adm"], "nearest: 'adam'"),
        ([*ESTIMATE, "--strategy", "td=8"], "td"),
        ([*ESTIMATE, "--strategy", "zero3"], "unknown 'zero3'; write zero=3"),
        (["estimate", "lenet", "--system", "t4", "--gpus", "8"], "such as aws-g4dn.metal, or write one: paleo init"),
        (["estimate", "lenet", "--system", "tpu-v2", "--gpus", "8"], "such as tpu-v2-pod, or write one"),
        (["estimate", "config.json", "--system", "t4"], "no such file; expected the config.json of a model"),
        (["estimate", "lenet", "--system", "h100"], "nearest: 'dgx-h100', "),
        ([*ESTIMATE, "--recompute", "some"], "'none', 'selective' or 'full'"),
        ([*ESTIMATE, "--software", "pytorch-lazy"], "nearest: 'pytorch-amp', 'pytorch-eager'"),
        ([*ESTIMATE, "--seq", "128"], "no parameter 'seq'"),
        ([*ESTIMATE, "--set", "bukcet=1 MiB"], "nearest: 'exchange.bucket'"),
        ([*ESTIMATE, "--set", "bucket"], "expected key=value"),
        ([*ESTIMATE, "--set", "exchange.bucket=5"], "has no unit"),
        ([*ESTIMATE, "--batch", "3", "--set", "batch=4"], "--batch sets it, too"),
        ([*ESTIMATE, "--set", "exchange=after", "--set", "exchange=after"], "occurs twice"),
        ([*ESTIMATE, "--epochs", "1", "--samples", "2"], "state one of them"),
        ([*ESTIMATE, "--plot", "timeline.jpg"], "ends in .png, .svg, .pdf"),
        ([*ESTIMATE, "--plot", "nowhere/at/all.png"], "there is no folder"),
        (["plan", "lenet", "--system", "dgx-h100", "--gpus", "8", "--per-layer", "--plot", "a.png"], "--per-layer"),
        (["estimate", "resnet5", "--system", "dgx-a100-80gb"], "nearest: 'resnet50'"),
        (["estimate", "lenet", "--system", "dgx-a100"], "'dgx-a100-80gb'"),
        (["estimate", "lenet"], "--system"),
        (["estimate", "no/such.yaml", "--system", "t4"], "no such file"),
        (["estimat", "lenet"], "'estimate'"),
        ([*SCALE, "--gpus", "1,two"], "expected GPU counts"),
        ([*SCALE, "--gpus", "0"], "expected GPU counts"),
        (["plan", "lenet", "--system", "dgx-h100", "--per-layer"], "--gpus is missing"),
        ([*SCALE, "weaker", "--gpus", "1"], "nearest: 'weak'"),
        ([*SCALE, "weak", "--mode", "strong", "--gpus", "1"], "use one of them"),
        ([*ESTIMATE, "--set", "model=x"], "expected sizes of the network"),
        ([*ESTIMATE, "--set", "model=x", "--seq", "64"], "expected sizes of the network"),
        ([*ESTIMATE, "--set", "input=none", "--set", "input.sample=3kB"], "contradicts it"),
        (["compare", "lenet", "--systems", ","], "expected names"),
        (["compare", "lenet", "--systems", "dgx-a100-80gb", "--tokens", "10"], "not counted in tokens"),
        (["collective", "all_redcue", "--bytes", "1MB", "--ranks", "8", "--system", "dgx-h100"], "'all_reduce'"),
        (
            ["collective", "all_reduce", "--bytes", "1", "--ranks", "8", "--system", "dgx-h100"],
            "--bytes: '1' has no unit",
        ),
        (
            ["collective", "all_reduce", "--bytes", "1e30B", "--ranks", "8", "--system", "dgx-h100"],
            "--bytes: '1e30B' is implausibly large: it is more than 1e+21 B",
        ),
        ([*SCALE, "--gpus", "1..1000000000"], "expected GPU counts from 1 to 10,000,000"),
        (["import", "torch", "missing.py:net", "--input", "1x3"], "missing.py: no such file"),
        (["import", "torch", "no_such_module_here:net", "--input", "1x3"], "no module named 'no_such_module_here'"),
        (["collective", "all_reduce", "--bytes", "1MB", "--ranks", "1", "--system", "dgx-h100"], "2 or more"),
        (["summary", "lenet", "--plot", "roof.svg"], "name one with --system"),
        (["summary", "lenet", "--plot", "roof.svg", "--system", "a100-sxm4-80gb", "--dtype", "fp8"], "'fp8'"),
        (["list", "modles"], "nearest: 'models'"),
        (["show", "resnet5"], "nearest: 'resnet50'"),
        (["estimate", "lenet", "--system", "t4", "--calibration", "idael"], "nearest: 'ideal'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(failure: Any, arguments: list[str], message: str) -> None:
    assert message in failure(*arguments)


@pytest.mark.slow
def test_what_does_not_fit_is_answered_in_full_with_exit_code_1(document: Any, capsys: Any) -> None:
    huge = ["gpt3-175b", "--gpus", "8"]
    code, made = document("estimate", *huge, "--system", "dgx-a100-80gb")
    assert (code, made["fits"]) == (1, False)
    assert made["memory_bytes"]["total"] > made["memory_bytes"]["capacity"]
    assert run(["estimate", *huge, "--system", "dgx-a100-80gb"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
    assert run(["compare", *huge, "--systems", "dgx-a100-80gb,dgx-h100"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert run(["scale", "gpt3-175b", "--gpus", "1,8", "--system", "dgx-a100-80gb"]) == 1
    assert "Does not fit at any of these counts" in capsys.readouterr().out


@pytest.mark.slow
def test_tables_print(capsys: Any) -> None:
    for arguments in (
        [*ESTIMATE, "--gpus", "16", "--samples", "1e6", "-v"],
        [*SCALE, "both", "--gpus", "1,2,64", "--batch", "8"],
        ["compare", "lenet", "--systems", "aws-p4d.24xlarge,t4,dgx-h100", "--gpus", "2"],
        ["collective", "all_gather", "--bytes", "64 KiB", "--ranks", "8", "--system", "dgx-h100"],
        ["summary", "lenet"],
        ["list", "systems"],
        ["show", "dgx-h100"],
        ["show", "conv"],
        ["--version"],
        [],
    ):
        assert run(arguments) == 0
        assert len(capsys.readouterr().out) > 5


def test_an_internal_error_is_a_fault_of_ours_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(questions, "predict", broken)
    assert run(ESTIMATE) == 3
    assert capsys.readouterr().err.startswith(
        "error: an error in paleo itself, not in your input: ZeroDivisionError at questions."
    )


# files


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("step.png", [*ESTIMATE, "--gpus", "16"]),
        ("scale.svg", [*SCALE, "both", "--gpus", "1,2,64", "--batch", "8"]),
        ("buy.pdf", ["compare", "lenet", "--systems", "aws-p4d.24xlarge,dgx-h100", "--gpus", "2"]),
        ("roof.svg", ["summary", "lenet", "--system", "t4"]),
        ("plans.png", ["plan", "lenet", "--system", "dgx-h100", "--gpus", "8"]),
        ("curves.SVG", ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "8", "--system", "dgx-1-v100"]),
    ],
)
def test_pictures_are_written_whole(name: str, arguments: list[str], tmp_path: Path, capsys: Any) -> None:
    assert run([*arguments, "--plot", str(tmp_path / name), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    start = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[name[-3:].lower()]
    assert (tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_failed_picture_leaves_the_old_one(tmp_path: Path) -> None:
    from paleo.files import write_atomically

    target = tmp_path / "old.png"
    target.write_bytes(b"old")

    def half(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(target, half)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


# the process


def test_public_names_and_cheap_import() -> None:
    code = """
import sys, paleo
assert "numpy" not in sys.modules
from paleo import Prediction, Run, load_model, load_system
made = paleo.predict(load_model("lenet"), load_system("dgx-a100-80gb"), Run(gpus=8))
from paleo import predict
from paleo.predict import predict as same
assert isinstance(made, Prediction) and predict is same
print(made.memory.fits, "pandas" in sys.modules, "matplotlib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["True", "False", "False"]


@pytest.mark.slow
def test_modules_that_share_a_name_with_a_function_can_be_imported() -> None:
    code = """
import paleo.search.plans as plans
import paleo.predict as prediction
import paleo.search.ranking, inspect, paleo
assert plans.__name__ == "paleo.search.plans" and paleo.search.plans is plans
assert paleo.search.ranking.Ranking is plans.Ranking
assert prediction.Prediction is paleo.Prediction and prediction.predict is paleo.predict
assert inspect.isfunction(paleo.search) and "system" in inspect.signature(paleo.search).parameters
assert paleo.search.__module__ == "paleo.questions" and not hasattr(paleo.search, "nothing")
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)


def test_help_loads_neither_numbers_nor_specs() -> None:
    code = """
import sys
from paleo.cli import run_command_line as run
run(["--help"])
heavy = {"numpy", "pandas", "matplotlib", "networkx", "pydantic", "yaml", "scipy", "torch"}
sys.exit(", ".join(sorted(heavy & set(sys.modules))) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m paleo list devices --json | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True, cwd=ROOT)
    assert (done.stdout, done.stderr) == ("{\n", "")


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("200", 200), ("7", 150), ("many", 150), ("", 150)])
def test_a_pipe_is_as_wide_as_columns_says(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from paleo.report.columns import console

    monkeypatch.setenv("COLUMNS", columns)
    assert console().width == width
