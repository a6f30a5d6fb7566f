"""What MODEL means: names, hub ids, configurations, folders, files, modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paleo.errors import SpecError
from paleo.importers import _model_readers as networks
from paleo.network.graph import build_graph
from paleo.predict import predict
from paleo.specs.catalog import catalog_hub_ids, entry_names
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from tests.unit.test_import_hf import TINY

FILE = Path(__file__).resolve().parents[2] / "models" / "llama3-8b.yaml"
HUB = "nobody/tiny-llama-Instruct"


def parameters(model: str | Path) -> int:
    return build_graph(load_model(model), batch=1).parameters


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a hub id in a cache of Hugging Face of its own."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    return tmp_path / f"models--{HUB.replace('/', '--')}"


def revision(folder: Path, name: str, **more: int) -> None:
    place = folder / "snapshots" / name
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(TINY | more))


@pytest.mark.parametrize("name", ["llama3-8b", "Llama-3-8B", "LLAMA3_8B", "llama-3.1-8b", FILE])
def test_a_name_in_any_spelling_and_a_path_are_one_network(name: str | Path) -> None:
    assert parameters(name) == 8_030_261_248


def test_a_configuration_and_its_folder_are_the_network_of_that_name(tmp_path: Path) -> None:
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    file, whole = load_model(str(folder / "config.json")), load_model(folder)
    assert (whole.name, whole.catalog_name_or_path, file.catalog_name_or_path) == (
        "Tiny-1B",
        str(folder),
        str(folder / "config.json"),
    )
    assert parameters(folder) == parameters(str(folder / "config.json")) == build_graph(whole, batch=1).parameters
    (folder / "config.json").write_text(json.dumps(TINY | {"num_hidden_layers": 1}))
    assert parameters(folder) < build_graph(whole, batch=1).parameters


def test_the_cache_of_the_hub_holds_the_configuration(cache: Path) -> None:
    revision(cache, "old")
    revision(cache, "new", num_hidden_layers=7)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("new")
    model = load_model(HUB)
    assert (model.name, model.catalog_name_or_path, model.params["layers"], model.remarks) == (
        "tiny-llama-Instruct",
        HUB,
        7,
        (),
    )
    (cache / "refs" / "main").write_text("../../elsewhere")
    assert load_model(HUB).params["layers"] in (3, 7)


def test_a_twin_stands_in_where_the_cache_has_nothing(cache: Path) -> None:
    model = load_model("meta-llama/Llama-3.1-8B-Instruct")
    assert model.name == "llama3-8b"
    (remark,) = model.remarks
    assert "not in the local cache; this is llama3-8b of the catalog" in remark
    step = predict(model, load_system("dgx-h100"), Run(gpus=8, batch=1, microbatch=1, recompute="full"))
    assert step.warnings[0] == remark


def test_a_configuration_that_is_refused_leaves_the_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "a"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    assert "is refused" in load_model("meta-llama/Llama-3.1-8B").remarks[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nobody/nothing-7b", "hf download nobody/nothing-7b config.json"),
        ("resnet5", "nearest: 'resnet50'"),
        ("nosuch.json", "no such file"),
        ("nosuch.onnx", "no such file"),
        ("nosuch.yaml", "no such file"),
        ("nosuch.py:build@2x3", "no such file"),
        ("collections:OrderedDict", "state the shapes of its inputs"),
        ("nosuch_package:build@2x3", "no module named"),
        ("paleo", "holds no config.json"),
        ("9" * 300, "unknown model"),
        (f"{'a' * 300}/b", "is not in the cache"),
        (f"{'a' * 300}:build@2x3", "no module named"),
    ],
)
def test_what_means_nothing_says_what_it_lacks(text: str, said: str, cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_model(text)
    assert said in str(caught.value)


def test_code_runs_only_where_it_is_named_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("raise RuntimeError('ran')")
    with pytest.raises(SpecError, match="code runs only where"):
        load_model(f"{file}:build@2x3", run_code=False)


def test_a_module_is_a_network_with_a_remark(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "net.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(784, 10)\n")
    model = load_model(f"{file}:build@2x784")
    assert build_graph(model, batch=1).parameters == 7850
    assert "ran the code of" in model.remarks[0]


def test_variants_of_weights_are_told_from_sizes() -> None:
    assert list(networks._without_variants("Qwen3-8B-FP8")) == ["Qwen3-8B"]
    assert list(networks._without_variants("Qwen3-8B")) == []


def test_no_two_networks_have_one_other_name() -> None:
    """The last one would take it without a word."""
    owners: dict[str, set[str]] = {}
    for name in entry_names("models"):
        for alias in load_model(name).aliases:
            owners.setdefault("".join(c for c in alias.lower() if c not in "-_ "), set()).add(name)
    assert {alias: owner for alias, owner in owners.items() if len(owner) > 1} == {}
    assert len(catalog_hub_ids()) > 250


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("Qwen/Qwen3-8B-Instruct-2507-FP8", "qwen3-8b"),
        ("unsloth/Meta-Llama-3.1-8B-bnb-4bit", "llama3-8b"),
        ("microsoft/Phi-4-mini-instruct", "phi4-mini"),
        ("nvidia/DeepSeek-V3.2-NVFP4", "deepseek_v3.2"),
        ("google/gemma-2-9b-it", "gemma2-9b"),
        ("stabilityai/stable-diffusion-xl-base-1.0", "stable-diffusion-xl"),
    ],
)
def test_ids_of_variants_mean_the_network_of_the_catalog(hub_id: str, name: str, cache: Path) -> None:
    model = load_model(hub_id)
    assert model.name == name and f"this is {name} of the catalog" in model.remarks[0]


@pytest.mark.parametrize(
    ("asked", "hub"),
    [
        ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
        ("lenet", ""),
    ],
)
def test_a_network_keeps_the_id_of_the_weights_that_were_asked_for(asked: str, hub: str, cache: Path) -> None:
    assert load_model(asked).weights_hub_id == hub
