"""Spec files, model files and options spoilt in hundreds of ways: each is refused with one clear message and exit code
2.

Good files of every kind are taken apart key by key; each key is misspelt, taken away, given the wrong type, sign, unit,
or no finite value. Then come texts that are no YAML, networks that do not fit together, and options that mean nothing.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from paleo.cli import run_command_line as run
from paleo.specs.catalog import entry_files
from paleo.specs.loading import read_yaml

#: A process that takes so long hangs.
HANG_S = 120.0
Data = dict[str, Any]
Step = str | int
FULL = ["estimate", "{model}", "--system", "{system}", "--software", "{software}", "--calibration", "{calibration}"]

MODEL: Data = {
    "title": "A network with every kind of entry",
    "task": "tests",
    "source": "none",
    "tokens": "=seq",
    "params": {"seq": 16, "hidden": 32, "heads": 4, "layers": 3, "vocab": 64},
    "inputs": {"words": {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}},
    "blocks": {
        "feed_forward": {
            "args": {"width": "required"},
            "layers": [{"branches": [["layer_norm", {"mlp": {"ffn": "=width"}}], []], "join": "add"}],
        }
    },
    "layers": [
        {"name": "embed", "embedding": {"entries": "=vocab", "features": "=hidden"}},
        {
            "repeat": "=layers",
            "name": "block",
            "layers": [
                {"branches": [["layer_norm", {"attention": {"heads": "=heads"}}], []], "join": "add"},
                {"feed_forward": {"width": "=4 * hidden"}},
            ],
        },
        {"name": "head", "linear": {"features": "=vocab", "dim": "vocab", "bias": False, "tie": "embed"}},
        "cross_entropy",
    ],
    "dataset": {"name": "words", "samples": 1000, "source": "none"},
    "expect": {"parameters": 41280, "source": "counted by hand"},
}
VISION: Data = {
    "title": "A small convolutional network",
    "task": "tests",
    "source": "none",
    "inputs": {"image": {"dims": {"batch": "=batch", "channels": 3, "height": 16, "width": 16}}},
    "layers": [
        {"name": "stem", "conv": {"channels": 8, "kernel": 3, "stride": 1, "padding": 1}},
        "batch_norm",
        "relu",
        {"max_pool": {"kernel": 2}},
        {"dropout": {"rate": 0.5}},
        "flatten",
        {"linear": {"features": 10}},
        "cross_entropy",
    ],
}


def good() -> dict[str, Data]:
    """One good file of every kind; the system takes its device and link from the files beside it."""
    system = read_yaml(entry_files("systems")["dgx-a100-80gb"]) | {"name": "lab", "device": "./device.yaml"}
    system["levels"] = [dict(level, link="./link.yaml") for level in system["levels"]]
    calibration = read_yaml(entry_files("calibrations")["a100-sxm4-80gb"])
    calibration["entries"] = [one for one in calibration["entries"] if one["family"] == "gemm.tensor"][:1]
    files = {
        "model": MODEL,
        "device": read_yaml(entry_files("devices")["a100-sxm4-80gb"]),
        "link": read_yaml(entry_files("links")["nvswitch2-a100"]),
        "system": system,
        "software": read_yaml(entry_files("software")["pytorch-eager"]),
        "calibration": calibration,
    }
    return copy.deepcopy(files)


def write(folder: Path, files: dict[str, Data]) -> None:
    for name, data in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))


def arguments(folder: Path, template: list[str]) -> list[str]:
    return [part.format_map(_Paths(folder)) for part in template]


class _Paths(dict[str, str]):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> str:
        return str(self.folder / f"{name}.yaml")


def refused(capsys: pytest.CaptureFixture[str], call: list[str], *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the words."""
    code = run(call)
    captured = capsys.readouterr()
    assert code == 2, f"exit code {code}: {captured.out[:300]}{captured.err[:300]}"
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 1000
    for word in words:
        assert word in captured.err, f"{word!r} is not in {captured.err!r}"


# every key of every kind of file


@dataclass(frozen=True)
class Mutation:
    """One change of one key of a file: what to put in its place, and what the message has to name."""

    kind: str
    path: tuple[Step, ...]
    what: str
    change: Callable[[Data], None] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}-{'.'.join(map(str, self.path))}-{self.what}"


#: Mappings whose keys are free, values that may be any text, numbers that may be negative, and keys with a default.
FREE = {"params", "dims", "args", "blocks", "inputs", "uncertainty", "releases"}
TEXTS = frozenset(
    [
        "name",
        "title",
        "task",
        "source",
        "notes",
        "full_name",
        "vendor",
        "architecture",
        "form_factor",
        "scope",
        "date",
        "cpu",
        "library",
        "subject",
        "stack",
        "kind",
        "compute_capability",
        "latency_source",
        "achieved_source",
        "assumed",
        "family",
    ]
)
SIGNED = {"bias", "total_error", "parameters", "uncertainty", "year"}
REQUIRED = {
    "model": "title task source inputs layers dataset.name dataset.samples expect.parameters expect.source",
    "device": "vendor architecture multiprocessors peak memory.capacity memory.bandwidth memory",
    "link": "kind scope bandwidth",
    "system": "device devices_per_node levels.0.name levels.0.link levels.0.topology",
    "software": "title host source",
    "calibration": "subject entries entries.0.family entries.0.stack entries.0.source"
    " entries.0.parameters entries.0.interval",
}
_UNIT = re.compile(r"(-?[\d.]+)\s*([A-Za-z/]+)\Z")


def walk(value: Any, path: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], Any]]:
    if path:
        yield path, value
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from walk(one, (*path, key))


def at(data: Any, path: tuple[Step, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def put(path: tuple[Step, ...], value: Any) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        at(data, path[:-1])[path[-1]] = value

    return change


def misspelt(path: tuple[Step, ...]) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        holder = at(data, path[:-1])
        items = [(f"{key}q" if key == path[-1] else key, value) for key, value in holder.items()]
        holder.clear()
        holder.update(items)

    return change


def missing(path: tuple[Step, ...]) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        del at(data, path[:-1])[path[-1]]

    return change


def wrong_values(path: tuple[Step, ...], value: Any) -> Iterator[tuple[str, Any]]:
    """Values that cannot stand where ``value`` stands."""
    key = next(step for step in reversed(path) if isinstance(step, str))
    if key != "width":  # the argument of a block may be anything; what uses it complains
        yield "mapping", {"a": 1} if not isinstance(value, dict) else [1]
    if isinstance(value, bool):
        yield "number", 7
    elif isinstance(value, int | float):
        yield "text", "many"
        yield "NaN", float("nan")
        if not SIGNED & set(path) and value:
            yield "negative", -value
    elif isinstance(value, str) and (match := _UNIT.match(value)):
        number, unit = match.groups()
        yield "no unit", float(number)
        yield "wrong unit", f"{number} {'GB' if unit.endswith('s') else 'ms'}"
        yield "negative", f"-{value}"
        yield "NaN with unit", f"nan {unit}"
    elif isinstance(value, str) and key in TEXTS:
        yield "list", ["a", "b"]
    elif isinstance(value, str) and value.startswith("="):
        yield "unknown name", "=nobody + 1"
        yield "no expression", "=1 +"


def mutations() -> Iterator[Mutation]:
    for kind, data in good().items():
        for path, value in walk(data):
            if isinstance(path[-1], str) and not FREE & set(path[-2:-1]) and path[-1] not in FREE:
                yield Mutation(kind, path, "misspelt", misspelt(path))
            if not {"aliases", "notes", "params", "args"} & set(path) and path[-1] not in FREE:
                for what, wrong in wrong_values(path, value):
                    yield Mutation(kind, path, what, put(path, wrong))
        for text in REQUIRED[kind].split():
            steps = tuple(int(step) if step.isdecimal() else step for step in text.split("."))
            yield Mutation(kind, steps, "missing", missing(steps))


@pytest.mark.parametrize("mutation", list(mutations()), ids=str)
def test_a_spoilt_key_is_refused(mutation: Mutation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = good()
    mutation.change(files[mutation.kind])
    write(tmp_path, files)
    key = next(str(step) for step in reversed(mutation.path) if isinstance(step, str))
    file = "calibration" if mutation.kind == "calibration" else f"{mutation.kind}.yaml"
    refused(capsys, arguments(tmp_path, FULL), file, "finite" if mutation.what == "NaN" else key)


def test_the_files_are_good_before_they_are_spoilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, good() | {"vision": VISION})
    assert run([*arguments(tmp_path, FULL), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0
    assert run(arguments(tmp_path, ["summary", "{vision}", "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == (3 * 9 + 1) * 8 + 16 + (8 * 64 + 1) * 10
    assert len(list(mutations())) > 300


# texts that hold no spec


def nested(depth: int) -> str:
    return "layers: " + "[" * depth + "]" * depth + "\n"


TEXT_MUTATIONS: dict[str, tuple[bytes, str]] = {
    "binary": (bytes(range(256)) * 4, "UTF-8"),
    "zeros": (b"\0" * 100, "not valid YAML"),
    "elf": (b"\x7fELF\x02\x01\x01\x00\xff\xfe", "UTF-8"),
    "latin-1": ("title: Ein kleines Netz für Tests".encode("latin-1"), "UTF-8"),
    "utf-16": ("title: x".encode("utf-16"), "UTF-8"),
    "empty": (b"", "is empty"),
    "spaces": (b" \n\n  \n", "is empty"),
    "comment": (b"# nothing\n", "holds nothing"),
    "list": (b"- a\n- b\n", "a list"),
    "scalar": (b"hello", "a str"),
    "number": (b"42", "a int"),
    "unclosed": (b"title: [a, b\n", "line 2: not valid YAML"),
    "tab": (b"title:\n\t- a\n", "line 2: not valid YAML"),
    "indent": (b"title: a\n  task: b\n", "line 2: not valid YAML"),
    "duplicate": (b"title: a\ntask: b\ntitle: c\n", "'title' is repeated (first on line 1)"),
    "nested duplicate": (b"memory:\n  kind: a\n  kind: b\n", "line 3: key 'kind' is repeated"),
    "two documents": (b"title: a\n---\ntitle: b\n", "second YAML document"),
    "anchor": (b"title: &a b\ntask: *a\n", "anchors and aliases"),
    "tag": (b"title: !!python/object/apply:os.system [ls]\n", "tags"),
    "deep": (nested(500).encode(), "nested deeper"),
    "deeper": (nested(200_000).encode(), "nested deeper"),
    "NaN": (b"year: .nan\n", "not a finite number"),
    "infinity": (b"year: -.inf\n", "not a finite number"),
    "beyond a double": (b"year: 1e999\n", "not a finite number"),
    "unknown": (b"colour: red\n", "colour: unknown key"),
    "list as key": (b"[a, b]: c\n", "a key must be a plain word"),
    "large": (b"title: a\n" * 500_000, "larger than"),
    "many values": (b"layers: [" + b"1," * 300_000 + b"]", "more than"),
}


@pytest.mark.parametrize("kind", ["model", "device", "system", "software", "calibration"])
@pytest.mark.parametrize("name", TEXT_MUTATIONS)
def test_a_text_that_holds_no_spec_is_refused(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, word = TEXT_MUTATIONS[name]
    write(tmp_path, good())
    (tmp_path / f"{kind}.yaml").write_bytes(raw)
    refused(capsys, arguments(tmp_path, FULL), f"{kind}.yaml", word)


@pytest.mark.parametrize("kind", ["model", "device", "link", "system", "software", "calibration"])
@pytest.mark.parametrize("what", ["directory", "nothing", "pipe", "dangling link"])
def test_what_is_no_file_is_refused(kind: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, good())
    path = tmp_path / f"{kind}.yaml"
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "dangling link":
        path.symlink_to(tmp_path / "nowhere.yaml")
    word = {"directory": "is a directory", "pipe": "not a regular file"}.get(what, "no such file")
    refused(capsys, arguments(tmp_path, FULL), f"{kind}.yaml", word)


def test_files_that_extend_one_another_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = good()
    files["model"]["extend"] = "./other.yaml"
    write(tmp_path, files | {"other": {"extend": "./model.yaml"}})
    refused(capsys, arguments(tmp_path, FULL), "model.yaml", "extend", "extend one another in a circle")


# networks that do not fit together

DEEP: list[Any] = ["relu"]
for _ in range(28):
    DEEP = [{"repeat": 2, "layers": DEEP}]
GROWING = [{"repeat": 2, "layers": [{"branches": [["relu"], ["relu"]], "join": "concat"}]}]
for _ in range(3):
    GROWING = [{"repeat": 10, "layers": GROWING}]
TREE = {f"b{i}": {"layers": [f"b{i + 1}", f"b{i + 1}"]} for i in range(20)} | {
    "b20": {"layers": [{"when": "=1 > 2", "relu": {}}]}
}
CONV = {"channels": 8, "kernel": 3}

NETWORKS: dict[str, tuple[Data, str]] = {
    "unknown layer": ({"layers": ["rleu"]}, "nearest: 'relu'"),
    "unknown option": ({"layers": [{"conv": CONV | {"chanels": 8}}]}, "chanels"),
    "missing option": ({"layers": [{"conv": {"channels": 8}}]}, "kernel"),
    "two types": ({"layers": [{"conv": CONV, "relu": {}}]}, "exactly one layer type"),
    "no type": ({"layers": [{"name": "a"}]}, "exactly one layer type"),
    "empty entry": ({"layers": [{}]}, "layers[0]"),
    "number as layer": ({"layers": [3]}, "layers[0]"),
    "list as layer": ({"layers": [["relu"]]}, "layers[0]"),
    "null as layer": ({"layers": [None]}, "layers[0]"),
    "no layers": ({"layers": []}, "layers"),
    "options are text": ({"layers": [{"conv": "wide"}]}, "layers[0].conv"),
    "kernel too large": ({"layers": [{"conv": CONV | {"kernel": 99}}]}, "layers[0]"),
    "zero kernel": ({"layers": [{"conv": CONV | {"kernel": 0}}]}, "kernel"),
    "zero stride": ({"layers": [{"conv": CONV | {"stride": 0}}]}, "stride"),
    "negative padding": ({"layers": [{"conv": CONV | {"padding": -1}}]}, "padding"),
    "zero dilation": ({"layers": [{"conv": CONV | {"dilation": 0}}]}, "dilation"),
    "groups do not divide": ({"layers": [{"conv": CONV | {"groups": 2}}]}, "layers[0]"),
    "three kernel sizes": ({"layers": [{"conv": CONV | {"kernel": [3, 3, 3]}}]}, "layers[0]"),
    "dropout of one and a half": ({"layers": [{"dropout": {"rate": 1.5}}]}, "rate"),
    "fractional channels": ({"layers": [{"conv": CONV | {"channels": 8.5}}]}, "channels"),
    "quoted channels": ({"layers": [{"conv": CONV | {"channels": "8"}}]}, "channels"),
    "boolean channels": ({"layers": [{"conv": CONV | {"channels": True}}]}, "channels"),
    "text with unit": ({"layers": [{"conv": CONV | {"channels": "8 GB"}}]}, "channels"),
    "too many channels": ({"layers": [{"conv": CONV | {"channels": 10**17}}]}, "layers[0]"),
    "far too many channels": ({"layers": [{"conv": CONV | {"channels": 10**30}}]}, "channels"),
    "linear then conv": ({"layers": ["flatten", {"linear": {"features": 3}}, {"conv": CONV}]}, "layers[2]"),
    "attention on pictures": ({"layers": [{"attention": {"heads": 2}}]}, "layers[0]"),
    "add of two shapes": ({"layers": [{"branches": [[{"conv": CONV}], []], "join": "add"}]}, "layers[0]"),
    "one branch": ({"layers": [{"branches": [["relu"]], "join": "add"}]}, "two branches"),
    "no join": ({"layers": [{"branches": [["relu"], []]}]}, "join"),
    "unknown join": ({"layers": [{"branches": [["relu"], []], "join": "sum"}]}, "join"),
    "branches are text": ({"layers": [{"branches": "relu", "join": "add"}]}, "branches"),
    "input that comes later": ({"layers": [{"relu": {}, "inputs": ["late"]}, {"name": "late", "relu": {}}]}, "late"),
    "input from itself": ({"layers": [{"name": "me", "relu": {}, "inputs": ["me"]}]}, "'me'"),
    "cycle": (
        {"layers": [{"name": "a", "add": {}, "inputs": ["image", "b"]}, {"name": "b", "relu": {}, "inputs": ["a"]}]},
        "'b'",
    ),
    "inputs are text": ({"layers": [{"relu": {}, "inputs": "image"}]}, "inputs"),
    "no inputs": ({"layers": [{"relu": {}, "inputs": []}]}, "inputs"),
    "two inputs of one": ({"layers": [{"relu": {}, "inputs": ["image", "image"]}]}, "relu takes 1"),
    "one input of two": ({"layers": ["add"]}, "add takes 2 or more"),
    "name twice": ({"layers": [{"name": "a", "relu": {}}, {"name": "a", "relu": {}}]}, "'a' stands twice"),
    "name of an input": ({"layers": [{"name": "image", "relu": {}}]}, "'image' stands twice"),
    "name with dots": ({"layers": [{"name": "a.b", "relu": {}}]}, "dots"),
    "name of a generated one": ({"layers": ["relu", {"name": "relu1", "relu": {}}]}, "relu1"),
    "name is a number": ({"layers": [{"name": 3, "relu": {}}]}, "name"),
    "block that uses itself": ({"blocks": {"again": {"layers": ["again"]}}, "layers": ["again"]}, "nested deeper"),
    "blocks that use each other": (
        {"blocks": {"a": {"layers": ["b"]}, "b": {"layers": ["a"]}}, "layers": ["a"]},
        "nested deeper",
    ),
    "blocks that double": ({"blocks": TREE, "layers": ["b0"]}, "more than"),
    "block without its argument": (
        {"blocks": {"a": {"args": {"n": "required"}, "layers": ["relu"]}}, "layers": ["a"]},
        "'n'",
    ),
    "block with a stray argument": (
        {"blocks": {"a": {"layers": ["relu"]}}, "layers": [{"a": {"n": 3}}]},
        "unknown argument",
    ),
    "empty block": ({"blocks": {"a": {"layers": []}}, "layers": ["a"]}, "blocks.a.layers"),
    "10^9 repeats": ({"layers": [{"repeat": 10**9, "layers": ["relu"]}]}, "1000000000"),
    "10^30 repeats": ({"layers": [{"repeat": 10**30, "layers": ["relu"]}]}, "repeat"),
    "10^9 repeats, multiplied": (
        {
            "layers": [
                {"repeat": 10**5, "layers": [{"repeat": 10**5, "layers": [{"repeat": 10**5, "layers": ["relu"]}]}]}
            ]
        },
        "repeat",
    ),
    "minus one repeat": ({"layers": [{"repeat": -1, "layers": ["relu"]}]}, "-1"),
    "half a repeat": ({"layers": [{"repeat": 1.5, "layers": ["relu"]}]}, "1.5"),
    "repeat of text": ({"layers": [{"repeat": "often", "layers": ["relu"]}]}, "often"),
    "repeat of nothing": ({"layers": [{"repeat": 3}]}, "layers"),
    "repeat beside a layer": ({"layers": [{"repeat": 3, "relu": {}, "layers": ["relu"]}]}, "relu"),
    "100000 shrinking repeats": ({"layers": [{"repeat": 10**5, "layers": [{"conv": CONV}]}]}, "layers[0]"),
    "100000 growing repeats": ({"layers": [{"repeat": 10**5, "layers": GROWING}]}, "layers"),
    "deep repeats": ({"layers": DEEP}, "nested deeper"),
    "condition that is none": ({"layers": [{"when": "=1 + 1", "relu": {}}]}, "when"),
    "condition of text": ({"layers": [{"when": "yes", "relu": {}}]}, "when"),
    "everything left out": ({"layers": [{"when": "=1 > 2", "relu": {}}]}, "layers"),
    "share nobody": ({"layers": [{"name": "b", "linear": {"features": 3}, "share": "a"}]}, "share"),
    "share without a name": ({"layers": [{"name": "a", "relu": {}}, {"relu": {}, "share": "a"}]}, "share"),
    "share a list": ({"layers": [{"name": "a", "relu": {}}, {"name": "b", "relu": {}, "share": ["a"]}]}, "share"),
    "share with a repeat": (
        {"layers": [{"name": "a", "relu": {}}, {"name": "b", "repeat": 2, "layers": ["relu"], "share": "a"}]},
        "share",
    ),
    "share other weights": (
        {"layers": [{"name": "a", "conv": CONV}, {"name": "b", "conv": CONV | {"channels": 9}, "share": "a"}]},
        "'a.weight'",
    ),
    "tie to nobody": ({"layers": ["flatten", {"linear": {"features": 3, "tie": "embed"}}]}, "embed"),
    "unknown name in =": (
        {"params": {"width": 8}, "layers": [{"conv": CONV | {"channels": "=widht"}}]},
        "nearest: 'width'",
    ),
    "no arithmetic": ({"layers": [{"conv": CONV | {"channels": "=__import__('os').getpid()"}}]}, "expression"),
    "attribute": ({"layers": [{"conv": CONV | {"channels": "=batch.__class__"}}]}, "not allowed"),
    "power": ({"layers": [{"conv": CONV | {"channels": "=9**9**9**9"}}]}, "not allowed"),
    "huge product": ({"layers": [{"conv": CONV | {"channels": "=99999999 * 99999999 * 99999999"}}]}, "far beyond"),
    "division by zero": ({"layers": [{"conv": CONV | {"channels": "=8 // 0"}}]}, "divides by zero"),
    "long expression": ({"layers": [{"conv": CONV | {"channels": "=" + "+".join(["1"] * 500)}}]}, "characters"),
    "unbalanced expression": ({"layers": [{"conv": CONV | {"channels": "=" + "(" * 90 + "1"}}]}, "channels"),
    "text in arithmetic": (
        {"params": {"kind": "wide"}, "layers": [{"conv": CONV | {"channels": "=kind + 1"}}]},
        "kind",
    ),
    "empty expression": ({"layers": [{"conv": CONV | {"channels": "="}}]}, "channels"),
    "params in a circle": ({"params": {"a": "=b", "b": "=a"}}, "params.a"),
    "input without dims": ({"inputs": {"image": {"dims": {}}}}, "inputs.image.dims"),
    "input of size zero": (
        {"inputs": {"image": {"dims": {"batch": "=batch", "features": 0}}}},
        "inputs.image.dims.features",
    ),
    "input of half a size": (
        {"inputs": {"image": {"dims": {"batch": "=batch", "features": 2.5}}}},
        "inputs.image.dims.features",
    ),
    "input with a wrong role": (
        {"inputs": {"image": {"dims": {"batch": "=batch"}, "role": "picture"}}},
        "inputs.image.role",
    ),
    "input without a batch": (
        {"inputs": {"image": {"dims": {"features": 8}}}, "layers": [{"linear": {"features": 3}}]},
        "batch",
    ),
    "input with a batch of its own": (
        {"inputs": {"image": {"dims": {"batch": 8, "features": 8}}}, "layers": [{"linear": {"features": 3}}]},
        "batch",
    ),
    "no inputs at all": ({"inputs": {}}, "inputs"),
    "huge input": (
        {"inputs": {"image": {"dims": {"batch": "=batch", "features": 10**16}}}, "layers": ["relu"]},
        "10000000000000000",
    ),
    "tokens of text": ({"tokens": "many"}, "tokens"),
    "negative tokens": ({"tokens": -5}, "tokens"),
    "tokens in a condition": ({"tokens": "=1 > 2"}, "tokens"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_that_does_not_fit_together_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, word = NETWORKS[name]
    write(tmp_path, {"model": VISION | changes})
    refused(capsys, arguments(tmp_path, ["estimate", "{model}", "--system", "dgx-a100-80gb"]), "model.yaml", word)


# options

LENET = ["estimate", "lenet", "--system", "dgx-a100-80gb"]
GPT2 = ["estimate", "gpt2", "--system", "dgx-a100-80gb"]
HUGE = str(10**18)

OPTIONS: dict[str, tuple[list[str], str]] = {
    "gpus 0": ([*LENET, "--gpus", "0"], "gpus"),
    "gpus negative": ([*LENET, "--gpus", "-8"], "gpus"),
    "gpus text": ([*LENET, "--gpus", "all"], "gpus"),
    "gpus NaN": ([*LENET, "--gpus", "nan"], "gpus"),
    "gpus fraction": ([*LENET, "--gpus", "1.5"], "gpus"),
    "gpus 10^18": ([*LENET, "--gpus", HUGE], "gpus: 1000000000000000000: it should be less than"),
    "gpus on one device": (["estimate", "lenet", "--system", "t4", "--gpus", "2"], "gpus"),
    "gpus that do not divide": ([*GPT2, "--gpus", "6", "--strategy", "tp=4"], "tp=4"),
    "batch 0": ([*LENET, "--batch", "0"], "batch"),
    "batch negative": ([*LENET, "--batch", "-1"], "batch"),
    "batch NaN": ([*LENET, "--batch", "nan"], "batch"),
    "batch huge": ([*LENET, "--batch", HUGE], "batch: 1000000000000000000: it should be less than"),
    "batch beyond int": ([*LENET, "--batch", "9" * 400], "batch"),
    "batches that differ": ([*LENET, "--gpus", "2", "--batch", "8", "--global-batch", "8"], "global_batch"),
    "global batch 0": ([*LENET, "--global-batch", "0"], "global_batch"),
    "global batch huge": (
        [*LENET, "--global-batch", HUGE],
        "global_batch: 1000000000000000000: it should be less than",
    ),
    "microbatch above batch": ([*LENET, "--batch", "4", "--microbatch", "8"], "microbatch"),
    "microbatch 0": ([*LENET, "--microbatch", "0"], "microbatch"),
    "seq 0": ([*GPT2, "--seq", "0"], "seq"),
    "seq negative": ([*GPT2, "--seq", "-5"], "seq"),
    "seq huge": ([*GPT2, "--seq", HUGE], "seq"),
    "seq of a network without": ([*LENET, "--seq", "8"], "seq"),
    "dtype unknown": ([*LENET, "--dtype", "fp12"], "fp12"),
    "dtype empty": ([*LENET, "--dtype", ""], "dtype"),
    "dtype not on the device": ([*LENET, "--dtype", "fp8"], "fp8"),
    "optimizer unknown": ([*LENET, "--optimizer", "sdg"], "nearest: 'sgd'"),
    "schedule unknown": ([*GPT2, "--gpus", "8", "--strategy", "pp=2", "--schedule", "1f2b"], "1f1b"),
    "schedule unknown, unused": ([*GPT2, "--schedule", "1f2b"], "1f1b"),
    "software unknown": ([*LENET, "--software", "torch"], "software"),
    "calibration unknown": ([*LENET, "--calibration", "perfect"], "calibration"),
    "calibration ppp=0": ([*LENET, "--calibration", "ppp=0"], "ppp"),
    "calibration ppp=-1": ([*LENET, "--calibration", "ppp=-1"], "ppp"),
    "calibration ppp=nan": ([*LENET, "--calibration", "ppp=nan"], "ppp"),
    "calibration ppp=x": ([*LENET, "--calibration", "ppp=x"], "ppp"),
    "calibration ppp=2": ([*LENET, "--calibration", "ppp=2"], "ppp"),
    "recompute unknown": ([*LENET, "--recompute", "most"], "recompute"),
    "strategy unknown": ([*LENET, "--strategy", "dpp"], "nearest: "),
    "strategy tp=0": ([*GPT2, "--gpus", "8", "--strategy", "tp=0"], "tp=0"),
    "strategy tp=x": ([*GPT2, "--gpus", "8", "--strategy", "tp=x"], "tp=x"),
    "strategy tp=2.5": ([*GPT2, "--gpus", "8", "--strategy", "tp=2.5"], "tp=2.5"),
    "strategy tp twice": ([*GPT2, "--gpus", "8", "--strategy", "tp=2,tp=4"], "tp=4"),
    "strategy tp=10^18": ([*GPT2, "--gpus", "8", "--strategy", f"tp={HUGE}"], "tp="),
    "strategy two presets": ([*GPT2, "--gpus", "8", "--strategy", "dp,owt"], "preset"),
    "strategy wrong product": ([*GPT2, "--gpus", "8", "--strategy", "tp=2,dp=2"], "takes 4 gpus"),
    "strategy zero=9": ([*GPT2, "--gpus", "8", "--strategy", "zero=9"], "zero=9"),
    "strategy heads not divided": ([*GPT2, "--gpus", "8", "--strategy", "tp=8"], "cannot be divided"),
    "strategy deeper than the network": ([*LENET, "--gpus", "64", "--strategy", "pp=64"], "cannot be cut"),
    "strategy of 100000 stages": ([*LENET, "--gpus", "100000", "--strategy", "pp=100000"], "at most"),
    "strategy vp without pp": ([*GPT2, "--gpus", "8", "--strategy", "vp=2"], "vp=2"),
    "strategy vp huge": ([*GPT2, "--gpus", "8", "--strategy", "pp=2,vp=9999999"], "at most"),
    "set no equals": ([*LENET, "--set", "bucket"], "key=value"),
    "set no key": ([*LENET, "--set", "=5"], "key=value"),
    "set no value": ([*LENET, "--set", "exchange.bucket="], "key=value"),
    "set unknown": ([*LENET, "--set", "buckett=1 MiB"], "nearest: 'exchange.bucket'"),
    "set bare number": ([*LENET, "--set", "exchange.bucket=5"], "bucket"),
    "set negative": ([*LENET, "--set", "exchange.bucket=-5 MiB"], "bucket"),
    "set wrong unit": ([*LENET, "--set", "exchange.bucket=5 ms"], "bucket"),
    "set NaN": ([*LENET, "--set", "kernels.cudnn=.nan"], "cudnn"),
    "set NaN with unit": ([*LENET, "--set", "exchange.bucket=nan MiB"], "bucket"),
    "set junk": ([*LENET, "--set", "exchange.bucket=[{]"], "bucket"),
    "set newline": ([*LENET, "--set", "exchange.bucket=1 MiB\nbatch: 3"], "bucket"),
    "set list": ([*LENET, "--set", "exchange.bucket=[1, 2]"], "bucket"),
    "set zero bytes": ([*LENET, "--set", "\0=\0"], "--set"),
    "set control": ([*LENET, "--set", "exchange.bucket=\x07"], "bucket"),
    "set dotted": ([*LENET, "--set", "model.=3"], "model"),
    "set deep": ([*LENET, "--set", "model.a.b=3"], "a.b"),
    "set unknown parameter": ([*GPT2, "--set", "model.hiden=64"], "nearest: 'hidden'"),
    "set parameter to text": ([*GPT2, "--set", "model.hidden=wide"], "hidden"),
    "set parameter to zero": ([*GPT2, "--set", "model.hidden=0"], "0"),
    "set parameter to a fraction": ([*GPT2, "--set", "model.hidden=7.5"], "7.5"),
    "set parameter negative": ([*GPT2, "--set", "model.vocab=-3"], "-3"),
    "set parameter huge": ([*GPT2, "--set", f"model.vocab={HUGE}"], "far beyond"),
    "set parameter to a call": ([*GPT2, "--set", "model.hidden==open('x')"], "hidden"),
    "set heads not divided": ([*GPT2, "--set", "model.heads=7"], "head"),
    "set layers to a million": ([*GPT2, "--set", "model.layers=1000000000"], "repeat"),
    "set algorithm unknown": ([*LENET, "--gpus", "8", "--set", "exchange.algorithm=rnig"], "nearest: 'ring'"),
    "set algorithm unknown, unused": ([*LENET, "--set", "exchange.algorithm=rnig"], "nearest: 'ring'"),
    "set algorithm of nothing": ([*LENET, "--gpus", "8", "--set", "exchange.algorithm=pairwise"], "pairwise"),
    "set cudnn text": ([*LENET, "--set", "kernels.cudnn=new"], "cudnn"),
    "set exchange unknown": ([*LENET, "--set", "exchange=never"], "exchange"),
    "epochs NaN": ([*LENET, "--epochs", "nan"], "epochs"),
    "epochs infinite": ([*LENET, "--epochs", "inf"], "epochs"),
    "epochs negative": ([*LENET, "--epochs", "-1"], "epochs"),
    "epochs zero": ([*LENET, "--epochs", "0"], "epochs"),
    "samples negative": ([*LENET, "--samples", "-1"], "samples"),
    "samples NaN": ([*LENET, "--samples", "nan"], "samples"),
    "tokens of pictures": ([*LENET, "--tokens", "1000"], "tokens"),
    "epochs of no data set": ([*GPT2, "--epochs", "1"], "epoch"),
    "system empty": (["estimate", "lenet", "--system", ""], "system"),
    "system a folder": (["estimate", "lenet", "--system", "/"], "directory"),
    "system missing": (["estimate", "lenet", "--system", "/no/such/system.yaml"], "no such file"),
    "system a device of bytes": (["estimate", "lenet", "--system", "/dev/zero"], "regular file"),
    "system long": (["estimate", "lenet", "--system", "a" * 5000], "unknown system"),
    "system long path": (["estimate", "lenet", "--system", "/" + "a" * 5000], "cannot be read"),
    "system zero byte": (["estimate", "lenet", "--system", "a\0b/"], "cannot be read"),
    "model empty": (["estimate", "", "--system", "t4"], "model"),
    "model a folder": (["summary", "./"], "this folder holds no config.json"),
    "model a device": (["estimate", "t4", "--system", "t4"], "model"),
    "model dots": (["summary", "../../etc/passwd"], "passwd"),
    "unknown option": ([*LENET, "--gpuz", "8"], "--gpus"),
    "unknown command": (["estimte", "lenet"], "estimate"),
    "no system": (["estimate", "lenet"], "--system"),
    "stray argument": ([*LENET, "again"], "again"),
    "scale to nothing": (["scale", "lenet", "--system", "dgx-a100-80gb", "--gpus", ","], "gpus"),
    "scale to 10^18": (["scale", "lenet", "--system", "dgx-a100-80gb", "--gpus", HUGE], "gpus"),
    "scale to text": (["scale", "lenet", "--system", "dgx-a100-80gb", "--gpus", "1,two"], "gpus"),
    "scale some": (["scale", "lenet", "some", "--system", "dgx-a100-80gb", "--gpus", "1"], "some"),
    "compare nothing": (["compare", "lenet", "--systems", ""], "systems"),
    "compare unknown": (["compare", "lenet", "--systems", "dgx-a100-80gb,dgx-q100"], "dgx-q100"),
    "collective of one rank": (
        ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "1", "--system", "dgx-h100"],
        "2 or more",
    ),
    "collective of no bytes": (
        ["collective", "all_reduce", "--bytes", "MB", "--ranks", "8", "--system", "dgx-h100"],
        "MB",
    ),
    "collective of -1 MB": (
        ["collective", "all_reduce", "--bytes", "-1MB", "--ranks", "8", "--system", "dgx-h100"],
        "--bytes",
    ),
    "collective of NaN": (
        ["collective", "all_reduce", "--bytes", "nanMB", "--ranks", "8", "--system", "dgx-h100"],
        "nanMB",
    ),
    "collective of seconds": (
        ["collective", "all_reduce", "--bytes", "1ms", "--ranks", "8", "--system", "dgx-h100"],
        "1ms",
    ),
    "collective unknown": (
        ["collective", "reduce_all", "--bytes", "1MB", "--ranks", "8", "--system", "dgx-h100"],
        "reduce_all",
    ),
    "list unknown": (["list", "gpus"], "gpus"),
    "show unknown": (["show", "nothing-like-this"], "nothing-like-this"),
    "plot nowhere": ([*LENET, "--plot", "/no/such/folder/a.png"], "--plot"),
    "plot of a kind": ([*LENET, "--plot", "a.gif"], "--plot"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_means_nothing_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    call, word = OPTIONS[name]
    refused(capsys, call, word)


# the process itself


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        (b"\x00\x01\x02\xff", ["estimate", "{model}", "--system", "t4"]),
        (nested(10_000).encode(), ["summary", "{model}"]),
        (yaml.safe_dump(VISION | NETWORKS["10^9 repeats"][0]).encode(), ["summary", "{model}"]),
        (yaml.safe_dump(VISION | NETWORKS["100000 growing repeats"][0]).encode(), ["summary", "{model}"]),
        (yaml.safe_dump(VISION | NETWORKS["blocks that use each other"][0]).encode(), ["summary", "{model}"]),
        (yaml.safe_dump(VISION | NETWORKS["power"][0]).encode(), ["summary", "{model}"]),
        (b"title: &a [*a]\n", ["summary", "{model}"]),
        (b"", ["estimate", "lenet", "--system", "{model}"]),
        (b"", ["estimate", "lenet", "--system", "t4", "--gpus", "nan"]),
        (b"", ["estimate", "lenet", "--system", "t4", "--set", "exchange.bucket=["]),
    ],
)
def test_a_process_says_one_line_and_exits_with_2(changes: bytes, call: list[str], tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_bytes(changes)
    done = subprocess.run(
        [sys.executable, "-m", "paleo", *arguments(tmp_path, call)],
        capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parents[2], timeout=HANG_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1
