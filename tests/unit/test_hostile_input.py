"""Files that never end, that unpack to floods, and inputs that once ended in a traceback: one line each, and soon."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest

from paleo import Run, load_model, load_system, predict
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.search.space import divisors
from paleo.tables.cells import MAX_TABLE_BYTES, read_table
from paleo.tables.kinds._machines import measured_step_time
from paleo.tables.run_tables import find_table_kind

HEADER = "source,device,library,dtype,m,n,k,batch,time_us\n"


def line(call: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one line that a call ends with."""
    assert run(call) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("call", [["validate"], ["import", "onnx"], ["import", "hf"], ["show"], ["sweep"]])
@pytest.mark.parametrize("kind", ["zero", "pipe", "folder"])
def test_inputs_that_are_no_files(
    call: list[str], kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if call[-1] == "onnx":
        pytest.importorskip("onnx")
    path = {"zero": "/dev/zero", "pipe": f"{tmp_path}/pipe.yaml", "folder": f"{tmp_path}/folder.yaml"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "folder":
        Path(path).mkdir()
    said = line([*call, path], capsys)
    assert path in said and ("expected" in said or kind == "folder")


def test_a_packed_table_that_unpacks_to_a_flood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = tmp_path / "t.csv.gz"
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        file.write(HEADER.encode())
        for _ in range(MAX_TABLE_BYTES // 1_000_000 + 2):
            file.write(b"s,l40s,cuBLAS,bf16,64,64,64,1,5\n" * 31_250)
    assert bomb.stat().st_size < 2_000_000
    assert f"more than {MAX_TABLE_BYTES} bytes" in line(["validate", str(bomb)], capsys)


@pytest.mark.parametrize("suffix", [".zip", ".bz2", ".xz"])
def test_other_archives_are_no_tables(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bz2
    import io
    import lzma
    import zipfile

    text, packed = (HEADER + "s,l40s,c,bf16,64,64,64,1,5\n").encode(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("t.csv", text)
    content = {".zip": packed.getvalue(), ".bz2": bz2.compress(text), ".xz": lzma.compress(text)}[suffix]
    (tmp_path / f"t.csv{suffix}").write_bytes(content)
    line(["validate", str(tmp_path / f"t.csv{suffix}")], capsys)


def test_functions_that_call_functions_are_counted_before_they_are_written_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thirty functions that each call the next one ten times: 10^30 nodes in a file of a few kilobytes."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper

    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    functions = []
    for number in range(30):
        called = ("own", f"f{number + 1}") if number < 29 else ("", "Relu")
        names = ["x", *(f"v{index}" for index in range(9)), "y"]
        nodes = [
            helper.make_node(called[1], [before], [after], domain=called[0])
            for before, after in itertools.pairwise(names)
        ]
        functions.append(helper.make_function("own", f"f{number}", ["x"], ["y"], nodes, opset))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("f0", ["x"], ["y"], domain="own")], "g",
        [value("x", TensorProto.FLOAT, [1, 4])], [value("y", TensorProto.FLOAT, [1, 4])],
    )  # fmt: skip
    file = tmp_path / "bomb.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opset, functions=functions, ir_version=8), str(file))
    assert "nodes once its functions are expanded" in line(["import", "onnx", str(file)], capsys)
    loop = helper.make_function("own", "f0", ["x"], ["y"], [helper.make_node("f0", ["x"], ["y"], domain="own")], opset)
    onnx.save(helper.make_model(graph, opset_imports=opset, functions=[loop], ir_version=8), str(file))
    assert "calls itself" in line(["import", "onnx", str(file)], capsys)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (["show", "a\x1b[31mb"], "nothing is named"),
        (["collective", "all_reduce", "--bytes", "9e999999GB", "--ranks", "8", "--system", "dgx-h100"], "finite"),
        (["calibrate", "--device", "\x00"], ""),
        (["scale", "lenet", "--system", "dgx-h100", "--gpus", "9" * 5000], "expected GPU counts"),
        (["estimate", "lenet", "--system", "dgx-h100", "--strategy", "tp=" + "9" * 5000], "not one whole number"),
        (["estimate", "lenet", "--system", "dgx-h100", "--epochs", "1e308"], "at most 9e+15"),
        (["estimate", "lenet", "--system", "dgx-h100", "--gpus", "0"], "gpus"),
        (["estimate", "lenet", "--system", "dgx-h100", "--gpus", "9" * 400], "9007199254740992"),
        (["estimate", "lenet", "--system", "dgx-h100", "--global-batch", "9" * 400], "9007199254740992"),
        (["import", "hf", "x.json", "--size", "seq=" + "9" * 5000], "--size"),
        (["import", "torch", "os:nothing", "--input", "1x" + "9" * 5000], "--input"),
        (["report", "lenet", "--systems", "dgx-h100:" + "9" * 5000], "expected GPU counts"),
    ],
    ids=range(12),
)
def test_words_that_once_ended_in_a_traceback(call: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in line(call, capsys)


def test_a_base_whose_name_holds_a_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text('extend: "a\\0b.yaml"\n')
    line(["estimate", "lenet", "--system", str(tmp_path / "s.yaml")], capsys)


# absurd numbers


def test_a_network_that_no_machine_could_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "{title: x, task: t, source: s, inputs: {x: {dims: {batch: =batch, f: 1000000000000}}}, "
        "layers: [{linear: {features: 300000000000}}]}"
    )
    (tmp_path / "huge.yaml").write_text(text)
    assert "3e+23 parameters" in line(["summary", str(tmp_path / "huge.yaml")], capsys)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_fp64_and_processors_have_no_winograd_kernels_of_cudnn(kind: str, tmp_path: Path) -> None:
    """With fp32's reduced products an fp64 step would run at 1.5 times the peak."""
    from paleo.predict import predict
    from paleo.specs.model import load_model
    from paleo.specs.run import Run
    from paleo.specs.system import load_system

    (tmp_path / "d.yaml").write_text(f"extend: v100-sxm2-16gb\nkind: {kind}\n")
    (tmp_path / "s.yaml").write_text("{extend: dgx-a100-80gb, device: ./d.yaml}")
    system, network = load_system(tmp_path / "s.yaml"), load_model("vgg16")
    dtypes = ("fp64",) if kind == "gpu" else ("fp64", "fp32")
    for dtype in dtypes:
        assert (predict(network, system, Run(batch=16, dtype=dtype)).mfu or 0) < 1


def test_shares_of_peaks_name_what_they_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate", "lenet", "--system", "dgx-a100-80gb", "--calibration", "ppp=0.6", "--json"]) == 0
    assert any("launches of kernels" in text for text in json.loads(capsys.readouterr().out)["unmodelled"])


# cells of measured tables


@pytest.mark.parametrize("cell", ["1;2", "inf", "1e999", "nan", "", "x", "-1", "0", "9" * 400])
@pytest.mark.parametrize("table", ["llm_iterations", "other_iterations", "compression", "memory", "cnn_iterations"])
def test_a_malformed_cell_is_a_reason_or_one_line(
    table: str, cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = Path(__file__).parents[1] / "fuzz" / "samples" / f"{table}.csv"
    header, *rows = list(csv.reader(sample.read_text().splitlines()))
    for column, name in enumerate(header):
        if name in ("dp", "tp", "pp", "n_gpus", "global_batch", "parameters", "batch_per_gpu", "seq_len", "dtype"):
            for row in rows:
                row[column] = cell
    with (tmp_path / "t.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    code, captured = run(["validate", str(tmp_path / "t.csv"), "--json"]), capsys.readouterr()
    if code == 2:
        assert captured.err.startswith("error: column ") and captured.err.count("\n") == 1
    else:
        (report,) = json.loads(captured.out)["files"]
        assert (code, captured.err) == (0, "")
        assert sum(report["unsupported_reasons"].values()) == report["unsupported"]


def test_a_size_that_is_no_whole_number_leaves_its_row_out() -> None:
    frame = read_table(Path(__file__).parents[1] / "fuzz" / "samples" / "conv.csv").head(2).astype({"c": float})
    frame.loc[1, "c"] += 0.5
    assert find_table_kind(frame.columns).predict(frame).failure_reasons.tolist() == ["", "c is not a whole number"]


def test_a_malformed_cell_leaves_out_its_row_alone(tmp_path: Path) -> None:
    """Rows of one device are priced together; a group of 1;2 in the second one is the reason of that row."""
    sample = Path(__file__).parents[1] / "fuzz" / "samples" / "cnn_layers.csv"
    frame = read_table(sample).head(4).astype({"groups": object})
    frame.loc[1, "groups"] = "1;2"
    predictions = find_table_kind(frame.columns).predict(frame)
    assert [reason[:30] for reason in predictions.failure_reasons] == ["", "column 'groups', row 1: '1;2' ", "", ""]
    assert (predictions.values > 0).tolist() == (predictions.baseline > 0).tolist() == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "column", "expected"),
    [
        ("cnn_iterations", "iteration_ms", "a number from 1e-09 to 1e+15 ms"),
        ("cnn_iterations", "n_gpus", "a whole number from 1 to 9e+15"),
        ("other_iterations", "iteration_ms", "a number from 1e-09 to 1e+15 ms"),
        ("other_iterations", "seq_len", "a whole number from 1 to 9e+15"),
        ("conv", "stride_h", "a whole number from 1 to 9e+15"),
        ("conv", "pad_w", "a whole number from 0 to 9e+15"),
        ("conv", "time_us", "a number from 1e-06 to 1e+18 us"),
        ("conv", "n", "a whole number from 0 to 9e+15"),
        ("consistency", "updates_per_s", "a number from 1e-12 to 1e+15 1/s"),
        ("consistency", "one_worker_step_s", "a number from 1e-12 to 1e+12 s"),
        ("compression", "step_s", "a number from 1e-12 to 1e+12 s"),
        ("compression", "gpus", "a whole number from 1 to 9e+15"),
        ("attention", "window", "a whole number from 0 to 9e+15"),
        ("attention", "causal", "0 or 1"),
        ("gemm", "trans_a", "one of n, t"),
    ],
)
def test_a_cell_that_is_no_number_leaves_its_row_out_of_a_report(
    kind: str, column: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rows are predicted as without it; so is the same row twice but for that cell."""
    frame = read_table(Path(__file__).parents[1] / "fuzz" / "samples" / f"{kind}.csv").astype(object)
    plain = find_table_kind(frame.columns).predict(frame)
    sound = frame[(plain.failure_reasons == "") & (frame.get("iteration_ms", frame.get("time_us")) != "")].head(1)
    cell = sound.iloc[0].get(column, "")
    rows = pd.concat([sound, sound, sound]).assign(**{column: [cell, "x", cell]})
    rows.to_csv(tmp_path / "t.csv", index=False)
    assert run(["validate", str(tmp_path / "t.csv"), "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["files"]
    assert (
        report["unsupported_reasons"] == {f"{column} 'x' is not {expected}": 1}
        and report["unsupported"] == 1
        and report["rows"] == 3
    )


# names that mean something to a terminal, a picture or a page

NAMES = "extend: lenet\nname: '$\\bad{$ [/red] <script>'\ntitle: '[/x] $\\frac{$ &'\n"
BOX = "extend: dgx-a100-80gb\nname: '[/red]$x_{$ <b>'\nfull_name: '[/b]'\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        ["estimate", "{m}", "--system", "{s}", "--plot", "{d}/p.png"],
        ["summary", "{m}", "--system", "{s}", "--plot", "{d}/p.svg"],
        ["scale", "{m}", "--system", "{s}", "--gpus", "1,8", "--plot", "{d}/p.png"],
        ["compare", "{m}", "--systems", "{s},dgx-h100", "--plot", "{d}/p.png"],
        ["plan", "{m}", "--system", "{s}", "--gpus", "8", "--global-batch", "32", "--plot", "{d}/p.pdf"],
        ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "8", "--system", "{s}", "--plot", "{d}/p.png"],
        ["report", "{m}", "--systems", "{s}:8", "-o", "{d}/r.html"],
        ["show", "{m}"],
        ["show", "{s}"],
    ],
    ids=lambda call: call[0],
)
def test_names_are_text(call: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.yaml").write_text(NAMES)
    (tmp_path / "s.yaml").write_text(BOX)
    places = {"m": f"{tmp_path}/m.yaml", "s": f"{tmp_path}/s.yaml", "d": str(tmp_path)}
    assert run([word.format(**places) for word in call]) == 0, capsys.readouterr().err
    if call[0] == "report":
        assert (
            "<script>'" not in (tmp_path / "r.html").read_text()
            and "[/red] <script>" not in (tmp_path / "r.html").read_text()
        )


def test_cells_that_a_spreadsheet_would_run_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.csv"
    table.write_text(HEADER.replace("batch,", "batch,=note,") + "=cmd|'/C calc'!A0,l40s,@x,bf16,64,64,64,1,-z,5\n")
    assert run(["validate", str(table), "--predictions", str(tmp_path / "p.csv")]) == 0
    header, row = list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    assert "'=note" in header and row[:3] == ["'=cmd|'/C calc'!A0", "l40s", "'@x"] and "'-z" in row


TARGET = ["target", "mlperf:bert", "--system", "dgx-h100", "--gpus", "8"]
PLAN = ["plan", "gpt2", "--system", "dgx-h100", "--gpus", "2", "--tokens", "1e9"]
LENET = ["estimate", "lenet", "--system", "dgx-h100", "--gpus", "8", "--epochs", "1"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ([*TARGET, "--noise-scale", "1e-308"], "from 1 to 9e+15"),
        ([*TARGET, "--batch", "300.5"], "a whole number of samples"),
        ([*PLAN, "--deadline", "0d"], "a time above zero"),
        ([*PLAN, "--budget", "-5"], "USD above zero"),
        ([*PLAN, "--budget", "1e300"], "USD above zero"),
        ([*LENET, "--storage", "0 GB/s"], "must be above zero"),
        ([*LENET, "--dtype", "int8"], "do not train in int8"),
        ([*LENET, "--checkpoint", "1e300steps"], "whole steps as 250steps"),
        ([*LENET, "--checkpoint", "9" * 5000 + "steps"], "whole steps as 250steps"),
        ([*LENET, "--software", "megatron-core@2024-13"], "no release '2024-13'"),
        ([*LENET, "--software", "megatron-core@9999"], "no release '9999'"),
        ([*LENET, "--compress", "powersgd:4.5"], "a whole number: the rank"),
        ([*LENET, "--compress", "topk"], "compress topk: expected topk:X"),
    ],
)
def test_amounts_that_nobody_means_are_one_line(
    call: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in line(call, capsys)


def test_batches_of_many_divisors_are_searched_soon() -> None:
    assert divisors(360) == tuple(n for n in range(1, 361) if 360 % n == 0)
    assert len(divisors(2**20 * 3**14)) == 21 * 15


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"schedule": "zb-v"}, "schedule=zb-v changes nothing: there is no pipeline"),
        ({"strategy": "sp"}, "sp changes nothing: there is no tensor parallelism"),
        ({"servers": 2}, "servers=2 changes nothing: workers are synchronous (bsp)"),
        ({"background": 0.3}, "background=0.3 changes nothing: the run has 8 GPUs of a node of 8"),
        ({"strategy": "ep=8"}, "ep=8 changes nothing: the network has no experts"),
        ({"experts.dispatch": "deepep"}, "experts.dispatch=deepep changes nothing: the network has no experts"),
        (
            {"recompute": "selective", "recompute.modules": ["layernorm"]},
            "recompute.modules=layernorm changes nothing: no layer of the network has that part",
        ),
        ({"consistency": "async", "servers": 2}, ""),
        ({"schedule": "gpipe", "strategy": "pp=2"}, ""),
    ],
)
def test_options_that_change_nothing_say_so(options: dict[str, object], idle: str) -> None:
    said = predict(load_model("lenet"), load_system("dgx-h100"), Run(gpus=8, **options)).warnings  # type: ignore[arg-type]
    assert [line for line in said if "changes nothing" in line] == [idle] * bool(idle)


def test_a_report_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["report", "lenet", "--systems", "dgx-h100", "--gpus", "8", "-o", "answer.pdf"]
    assert "expected a name that ends in .html" in line(call, capsys)


@pytest.mark.parametrize("time", ["1e-308", "1e300"])
def test_times_that_nobody_can_measure_leave_out_their_row(
    time: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.csv"
    table.write_text(f"{HEADER}s,l40s,cuBLAS,bf16,512,512,512,1,{time}\ns,l40s,cuBLAS,bf16,512,512,512,1,9\n")
    assert run(["validate", str(table), "--json"]) == 0
    file = json.loads(capsys.readouterr().out)["files"][0]
    assert file["predicted"] == 1
    assert list(file["unsupported_reasons"]) == [f"time_us '{float(time)}' is not a number from 1e-06 to 1e+18 us"]


@pytest.mark.parametrize("cell", ["device", "-1", "inf", "9" * 400])
def test_a_time_of_a_power_row_that_is_no_number_is_named(cell: str) -> None:
    with pytest.raises(SpecError, match="is not a number above zero"):
        measured_step_time({"iteration_ms": cell})


# doors beside spec files


SERVED, JOB = ["serve", "gpt2", "--system", "l4", "--trace"], ["estimate", "--system", "l4", "--from"]
NANOTRON = b"""parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b}
tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 8}
model: {model_config: {hidden_size: 8, num_hidden_layers: [1], vocab_size: 9, num_attention_heads: 2}}
"""
MPT = b"""model: {name: mpt_causal_lm, d_model: x}
max_seq_len: 8
global_train_batch_size: 8
device_train_microbatch_size: 2
"""


@pytest.mark.parametrize(
    ("name", "content", "call", "words"),
    [
        ("config.json", b'{"model_type": [[]]}', ["import", "hf"], "model_type"),
        ("t.csv", b"\xe1\x00", SERVED, "UTF-8"),
        ("t.csv", b"time,input_length,output_length\n1,1e308,2\n", SERVED, "tokens"),
        ("t.csv", b"time,input_length,output_length\n1,5,0\n", SERVED, "no requests"),
        ("n.yaml", NANOTRON, JOB, "num_hidden_layers"),
        ("m.yaml", MPT, JOB, "d_model"),
    ],
)
def test_files_that_once_ended_in_a_traceback(
    name: str, content: bytes, call: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in line([*call, str(tmp_path / name)], capsys)


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("rl", {"gpus": 10**400}, "--gpus of thousands of digits: expected a whole number"),
        ("rl", {"rollouts": "x"}, "--rollouts 'x': expected a whole number"),
        ("rl", {"staleness": (1,)}, "--staleness"),
        ("serve", {"gpus": "9"}, "--gpus '9': expected a whole number"),
        ("serve", {"input": range(3)}, "--input"),
        ("serve", {"length_variation": float("nan")}, "--length-variation nan: expected a number"),
    ],
)
def test_values_of_python_that_once_escaped(name: str, arguments: dict[str, object], words: str) -> None:
    import paleo

    with pytest.raises(SpecError, match=re.escape(words)):
        getattr(paleo, name)(**{"model": "gpt2", "system": "dgx-h100", "gpus": 8, **arguments})


@pytest.mark.parametrize("study", [3, {1}, b"x", {"models": 3}, object()])
def test_studies_that_are_none(study: object) -> None:
    import paleo

    with pytest.raises(SpecError, match=r"paleo\.sweep"):
        paleo.sweep(study)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [3, "x", {"seq": "y"}, {"seq": 0}])
def test_sizes_of_onnx_that_are_none(sizes: object) -> None:
    import paleo

    with pytest.raises(SpecError, match="sizes"):
        paleo.from_onnx("nothing.onnx", sizes=sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["load_model", "load_system", "load_software", "load_task"])
@pytest.mark.parametrize("value", [{}, [], 3, b"x", None])
def test_names_that_are_no_text(name: str, value: object) -> None:
    import paleo

    with pytest.raises(SpecError, match="expected"):
        getattr(paleo, name)(value)


@pytest.mark.parametrize("gpus", [8.5, {8.5}, [None], object()])
def test_counts_that_are_none(gpus: object) -> None:
    import paleo

    with pytest.raises(SpecError, match="expected GPU counts"):
        paleo.search("lenet", "dgx-h100", gpus)  # type: ignore[arg-type]


# ranges, and files that name others


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--calibration", "ppp=1e-300"], "from 0.0001 to 1"),
        (["--epochs", "1e25"], "at most 9e+15"),
        (["--set", "experts.imbalance=1e300"], "expected 0, or"),
        (["--set", "model.hidden=1e19"], "expected 0, or"),
    ],
)
def test_numbers_beyond_their_range(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in line(["estimate", "lenet", "--system", "dgx-h100", *options], capsys)


def test_a_profile_with_an_absurd_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.yaml").write_text("title: x\nextend: pytorch-eager\nsource: x\ngradients: {accesses: 1.0e300}\n")
    said = line(["estimate", "lenet", "--system", "dgx-h100", "--software", str(tmp_path / "s.yaml")], capsys)
    assert "gradients.accesses" in said and "expected 0, or" in said


@pytest.mark.parametrize("text", ["extend: /etc/x.yaml", "extend: ../x.yaml", "extend: l4\ndevice: ../../x.yaml"])
def test_files_name_no_others_outside_their_folder(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.yaml").write_text("extend: dgx-h100\n")
    (tmp_path / "folder" / "s.yaml").write_text(text.replace("extend: l4", "extend: dgx-h100") + "\n")
    said = line(["estimate", "lenet", "--system", str(tmp_path / "folder" / "s.yaml")], capsys)
    assert "outside the folder" in said


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.toml", "[training]\nlocal_batch_size = " + "9" * 5000),
        ("train.toml", '# paleo: {"model": ' + "[" * 100_000 + "\n[training]\nlocal_batch_size = 0.5\n"),
        ("serve.sh", "vllm serve qwen3-0.6b --num-speculative-tokens x\n"),
        ("serve.sh", "vllm serve qwen3-0.6b --speculative-config '{\"num_speculative_tokens\": 1e999}'\n"),
        ("serve.sh", "vllm serve qwen3-0.6b --speculative-config '" + "[" * 100_000 + "'\n"),
    ],
)
def test_numbers_of_job_files_that_no_number_is(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    call = ["serve", text] if name == "serve.sh" else ["estimate", str(tmp_path / name), "llama3-8b"]
    said = line([call[0], *call[2:], "--system", "dgx-h100", "--from", call[1]], capsys)
    assert "TOML" in said or "local_batch_size" in said or "speculative" in said


@pytest.mark.parametrize("value", [[1, 8], [[1.0]], []])
def test_arrays_in_place_of_words(value: list[object]) -> None:
    import numpy as np

    import paleo

    with pytest.raises(SpecError):
        paleo.validate("nothing.csv", calibration=np.array(value))  # type: ignore[arg-type]
    with pytest.raises(SpecError):
        paleo.serve("qwen3-0.6b", "dgx-h100", strategy=np.array(value))  # type: ignore[arg-type]
