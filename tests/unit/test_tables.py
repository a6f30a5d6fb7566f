"""Tables on narrow screens, and what an estimate says of its communication."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import paleo
from paleo.cli import run_command_line as command
from paleo.report.columns import SplittingTable, empty_table
from paleo.studies.collective import step_collectives
from paleo.units import format_duration

NODE = "dgx-a100-80gb"


def printed(table: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_a_table_that_is_too_wide_comes_in_parts() -> None:
    table = empty_table("Figures", ["GPUs", *(f"figure{number}" for number in range(9))])
    table.add_row("8", *("1,234,567" for _ in range(9)))
    assert isinstance(table, SplittingTable)
    wide, narrow = printed(table, 150), printed(table, 80)
    assert wide.count("GPUs") == 1 and narrow.count("GPUs") == 2 and narrow.count("Figures") == 1
    for text in (wide, narrow):
        assert text.count("1,234,567") == 9
    assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_of_a_curve_is_broken(width: int) -> None:
    curve = paleo.scale("resnet50", NODE, "1..64", global_batch=1024, goodput=True)
    text = printed(curve.table(), width)
    assert max(map(len, text.splitlines())) <= width
    last = curve.curves[-1].points[-1].prediction
    figures = (f"{last.samples_per_s:,.0f}", format_duration(last.step_time), "with failures", " USD", " kWh")
    assert all(figure in text for figure in figures)


@pytest.mark.parametrize("strategy", ["dp", "zero=3", "tp=2,zero=1", "tp=2,pp=2,zero=1"])
def test_collectives_of_a_step_name_their_price(strategy: str) -> None:
    """What they take alone is about what the step counts as communication."""
    step = paleo.estimate("gpt2", NODE, gpus=16, strategy=strategy, global_batch=64).prediction
    shown = step_collectives(step)
    assert {each.time_source.partition(" ")[0] for each in shown} <= {"measured", "inherited", "datasheet"}
    assert any(NODE in each.time_source for each in shown if "dp" not in each.axes) or strategy in ("dp", "zero=3")
    alone = sum(each.calls * each.seconds for each in shown)
    assert alone == pytest.approx(step.breakdown.communication_total, rel=0.3)


def test_prices_of_constants_are_theirs() -> None:
    step = paleo.estimate("gpt2", NODE, gpus=16, calibration="ppp=0.6").prediction
    assert {each.time_source for each in step_collectives(step)} == {"ppp=0.6"}


def test_slowed_computation_is_part_of_what_communication_takes() -> None:
    """Software whose collectives take nothing from computation has none; at a contention of 1 nothing is won."""
    eager = paleo.estimate("gpt2", NODE, gpus=16, global_batch=64, software="pytorch-eager").prediction
    core = paleo.estimate("gpt2", NODE, gpus=16, global_batch=64, software="megatron-core").prediction
    for step in (eager, core):
        assert 0 <= step.contention_time <= step.breakdown.communication_exposed
    assert eager.contention_time > core.contention_time
    assert paleo.estimate("gpt2", NODE, gpus=1).prediction.contention_time == 0


def test_verbose_names_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["estimate", "gpt2", "--system", NODE, "--gpus", "16", "--strategy", "dp", "-v"]) == 0
    text = capsys.readouterr().out
    assert "all_reduce" in text and "datasheet (infiniband-hdr" in text and "measured (dgx-a100-80gb.yaml)" in text
