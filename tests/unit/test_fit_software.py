"""Software parameters fitted to whole steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate.fit import count_rows
from paleo.calibrate.software import fit_software, software_jobs, software_profile_yaml
from paleo.cli import run_command_line as run
from paleo.specs.catalog import entry_names
from paleo.specs.loading import Spec
from paleo.specs.software import load_software
from paleo.tables.kinds._transformers import TransformerStepTable
from paleo.units import MILLISECOND

#: Seconds of host time that the made-up steps have; small networks show it clearly.
HOST = 40e-6


def steps(host: float, noise: float = 0.02) -> pd.DataFrame:
    """Steps of small networks as a framework of that host time would take them, with noise."""
    rows = [
        {
            "source": "made up", "model": f"gpt-{layers}", "system": "dgx-a100-80gb", "device": "a100-sxm4-80gb",
            "layers": layers, "hidden": hidden, "heads": 16, "vocab": 50304, "seq_len": 512, "n_gpus": tp, "tp": tp,
            "pp": 1, "dp": 1, "dtype": "fp16", "micro_batch": micro, "global_batch": 4 * micro, "recompute": "none",
            "software": "megatron-2021",
        }
        for layers in (4, 8) for hidden in (512, 1024) for tp in (1, 2) for micro in (1, 2, 4)
    ]  # fmt: skip
    profile = load_software("megatron-2021")
    ratio = profile.host.backward / profile.host.forward
    profile = profile.with_fields({"host.forward": host, "host.backward": ratio * host})
    table, generator = TransformerStepTable(), np.random.default_rng(3)
    for row in rows:
        exact = table.predict_row(row, profile).value / MILLISECOND
        row["iteration_ms"] = float(exact * np.exp(generator.normal(0.0, noise)))
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    steps(HOST).to_csv(path, index=False)
    return path


def test_a_fit_finds_the_host_time_that_made_the_steps(table: Path) -> None:
    (job,) = software_jobs(table)
    made = fit_software(job, "2026-01-01")
    assert made.profile_after.host.forward == pytest.approx(HOST, rel=0.05)
    assert made.profile_after.host.backward / made.profile_after.host.forward == pytest.approx(
        made.profile_before.host.backward / made.profile_before.host.forward, rel=0.01
    )
    assert made.profile_after.fit is not None
    assert made.profile_after.fit.rows_fitted + made.profile_after.fit.rows_held_out <= 24
    assert made.profile_after.fit.residual.mape < 0.05


def test_the_written_profile_is_one_that_runs(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "fitted.yaml"
    assert run(["calibrate", "--fit", str(table), "-o", str(out)]) == 0
    made = load_software(out)
    assert made.host.forward == pytest.approx(HOST, rel=0.05) and made.attention.implementation == "unfused"
    assert run(["estimate", "gpt2", "--system", "dgx-a100-80gb", "--software", str(out)]) == 0


@pytest.mark.parametrize("name", entry_names("software"))
def test_a_profile_that_is_written_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    profile = load_software(name)
    (tmp_path / f"{name}.yaml").write_text(software_profile_yaml(profile))
    again = load_software(tmp_path / f"{name}.yaml")
    for group in type(profile).model_fields:
        for field, value in dict(getattr(profile, group) if isinstance(getattr(profile, group), Spec) else {}).items():
            assert getattr(getattr(again, group), field) == (pytest.approx(value) if type(value) is float else value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--free", "host"], "no such number of a profile; nearest: 'host_forward'"),
        (["--only", "nanotron"], "no row of the profile 'nanotron'"),
    ],
)
def test_bad_requests_say_what_is_expected(
    table: Path, more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["calibrate", "--fit", str(table), "--output-dir", str(tmp_path), *more]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_too_few_steps_are_refused(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = tmp_path / "few.csv"
    pd.read_csv(table).head(5).to_csv(few, index=False)
    assert run(["calibrate", "--fit", str(few), "--output-dir", str(tmp_path)]) == 2
    assert "5 steps, too few" in capsys.readouterr().err and list(tmp_path.glob("*.yaml")) == []


def test_a_profile_is_not_fitted_to_rows_of_software_that_has_none(table: Path, tmp_path: Path) -> None:
    """They are predicted by the nearest profile, and counted as left out."""
    frame = pd.read_csv(table)
    frame.loc[frame["layers"] == 4, "software"] = "megatron-of-others"
    mixed = tmp_path / "mixed.csv"
    frame.to_csv(mixed, index=False)
    (job,) = software_jobs(mixed)
    assert (job.profile.name, job.step_count, job.skipped_rows) == ("megatron-2021", 12, 12)


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "table", "kind"),
    [("megatron-2021", "llm", TransformerStepTable), ("fsdp-composer", "llm", TransformerStepTable),
     ("pytorch-ngc", "other", None)],
)  # fmt: skip
def test_a_fitted_profile_states_the_rows_that_its_fit_finds(
    name: str, table: str, kind: type | None, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all their rows are predicted, nothing has to be."""
    if kind is not None:
        monkeypatch.setattr(kind, "predict", lambda self, frame: SimpleNamespace(values=np.ones(len(frame))))
    (job,) = software_jobs(shared / "measurements" / f"{table}_iterations.csv", only=[name])
    stated = load_software(name).fit
    assert stated is not None
    fitted, _, held_out = job.make_fit().split_rows
    assert (stated.rows_fitted, stated.rows_held_out) == (count_rows(fitted), count_rows(held_out))
    assert (stated.source, stated.architectures) == (job.citation, job.architectures)


def test_those_are_all_fitted_profiles() -> None:
    fitted = {name for name in entry_names("software") if load_software(name).fit is not None}
    assert fitted == {"megatron-2021", "fsdp-composer", "pytorch-ngc"}
