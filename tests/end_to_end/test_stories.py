"""Five questions of buyers, each answered by one command on its first screen; docs/howto/choose.md shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paleo.cli.process import run

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "choose.md"
#: The lines of a small terminal.
SCREEN = 24
#: What each command's first screen must say, in the order of the page.
ANSWERS = [
    (
        0,
        r"Fastest: 4 GPUs of dgx-h100 \(of 8 in a node\); cheapest: 8 GPUs of dgx-a100-80gb \(1 node\)",
        r"l40s-8-p2p +8 ",
    ),
    (
        0,
        r"Cheapest within 90 days and 40,000,000 USD: 1,024 GPUs of dgx-b200 \(128 nodes\) with ",
        r"--tensor-model-paral",
    ),
    (1, r"Nothing fits into memory; 32 GPUs of dgx-a100-40gb \(4 nodes\) would do: paleo estimate", r"too much"),
    (0, r"Fastest: 16 GPUs of pcie4-8gpu-infiniband \(2 nodes\)", r"pcie4-8gpu-10gbe +16 "),
    (
        0,
        r"Fastest: 8 GPUs of rtx-4090-4gpu-25gbe \(2 nodes\) with dp=8",
        r"Show it again: paleo estimate llama3-8b .*--qlora",
    ),
]


def commands() -> list[list[str]]:
    """The commands of the page, one for each question."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [block.replace("\\\n", " ").split()[1:] for block in blocks]


def test_the_page_has_a_command_for_each_question() -> None:
    assert len(commands()) == len(ANSWERS)


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_one_command_answers_on_its_first_screen(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code, verdict, further = ANSWERS[number]
    assert run(commands()[number]) == code
    screen = " ".join(capsys.readouterr().out.splitlines()[:SCREEN])
    assert re.search(verdict, screen), screen
    assert re.search(further, screen), screen
