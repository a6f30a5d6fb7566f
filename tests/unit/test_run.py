"""A run is stated by groups, paths or short names; keys of before are read with a remark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paleo
from paleo.cli import run_command_line as call
from paleo.errors import SpecError
from paleo.report.json_schemas import json_schema
from paleo.specs.loading import validate_mapping
from paleo.specs.run import (
    FORMER_FIELD_NAMES,
    SHORT_FIELD_NAMES,
    Run,
    field_paths,
    flatten_to_paths,
    load_run,
    replace_fields,
    shortest_field_name,
    user_set_fields,
)

FORMS: list[dict[str, Any]] = [
    {"recompute": {"policy": "full", "layers": 4}, "model": {"seq": 64}},
    {"recompute": "full", "recompute_layers": 4, "seq": 64},
    {"recompute.policy": "full", "recompute.layers": 4, "model.seq": 64},
    {"recompute": {"policy": "full"}, "recompute.layers": 4, "seq": 64},
]


@pytest.mark.parametrize("fields", FORMS)
def test_a_field_is_stated_by_its_group_its_path_or_its_option(fields: dict[str, Any]) -> None:
    run = Run(**fields)
    assert (run.recompute.policy, run.recompute.layers, run.model) == ("full", 4, {"seq": 64})
    assert user_set_fields(run) == {"recompute.policy": "full", "recompute.layers": 4, "model.seq": 64}
    assert Run(**user_set_fields(run)) == run


def test_names_and_paths_are_of_fields() -> None:
    paths = field_paths()
    assert len(paths) == len(set(paths))
    assert {*SHORT_FIELD_NAMES.values(), *FORMER_FIELD_NAMES.values()} - {"model.seq"} <= set(paths)
    assert flatten_to_paths({shortest_field_name(path): 1 for path in paths}) == dict.fromkeys(paths, 1)


@pytest.mark.parametrize("old", FORMER_FIELD_NAMES)
def test_a_key_of_before_is_read_with_a_remark(old: str) -> None:
    with pytest.warns(FutureWarning, match=f"^{old} is now {FORMER_FIELD_NAMES[old]}; "):
        assert flatten_to_paths({old: 3}) == {FORMER_FIELD_NAMES[old]: 3}


def test_keys_of_before_are_read_at_every_door(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("cut: time\n", encoding="utf-8")
    estimate = ["estimate", "lenet", "--system", "t4"]
    with pytest.warns(FutureWarning, match=r"cut is now pipeline\.cut"):
        assert load_run(file).pipeline.cut == "time"
    with pytest.warns(FutureWarning, match=r"bucket is now exchange\.bucket"):
        assert call([*estimate, "--set", "bucket=1 MiB"]) == 0
    with pytest.warns(FutureWarning, match=r"attention is now kernels\.attention"):
        assert paleo.estimate("lenet", "t4", attention="fused").prediction.run.kernels.attention == "fused"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"recompute": {"layers": 1}, "recompute_layers": 2},
            "recompute_layers and recompute.layers state the same field",
        ),
        ({"input": "none", "input.cores": 3}, "input.cores: input is 'none', too; use one of them"),
        ({"recompute": {"polcy": "full"}}, "recompute.polcy: unknown key; nearest: 'recompute.policy'"),
        ({"input.core": 1}, "input.core: unknown key; nearest: 'input.cores'"),
        ({"bukcet": "1 MiB"}, "bukcet: unknown key; nearest: 'exchange.bucket'"),
        ({"recompute": "ful"}, "recompute: 'ful': it should be 'none', 'selective' or 'full'"),
        ({"experts.dispatch": "pigeon"}, "experts.dispatch: 'pigeon': it should be"),
        ({"fabric": 8}, "fabric: 8: it should be a mapping"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_stated(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=r"^run\.yaml: ") as caught:
        validate_mapping(Run, fields, "run.yaml")
    assert words in str(caught.value)


def test_an_updated_run_keeps_what_else_it_states() -> None:
    run = Run(recompute="full", recompute_layers=4, model={"seq": 64})
    other = replace_fields(run, {"gpus": 8, "recompute.layers": 5, "input.cores": 3.0, "model.layers": 2})
    changed = {"gpus": 8, "recompute.layers": 5, "input.cores": 3.0, "model.layers": 2}
    assert user_set_fields(other) == user_set_fields(run) | changed
    assert (run.gpus, run.recompute.layers) == (1, 4)
    assert hash(other) != hash(replace_fields(other, {"recompute.layers": 6}))
    with pytest.raises(AttributeError, match="recompute_layer"):
        replace_fields(run, {"recompute_layer": 1})


def test_a_variant_keeps_the_other_sizes_of_the_network() -> None:
    made = paleo.estimate("gpt2", "t4", run=Run(batch=1, model={"layers": 2})).prediction
    assert made.predict_variant(seq=64).run.model == {"layers": 2, "seq": 64}


def test_the_schema_of_run_files_has_the_short_forms() -> None:
    properties = json_schema("run")["properties"]
    assert set(SHORT_FIELD_NAMES) <= set(properties)
    assert {"enum": ["none", "selective", "full"], "type": "string"}.items() <= properties["recompute"]["anyOf"][
        1
    ].items()
