"""Six questions of buyers, each answered by one command on its first screen, on a page of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paleo.cli.process import run_command_line

PAGES = Path(__file__).parents[2] / "docs" / "howto"
STORIES = ["tune", "pretrain", "mixtral", "ethernet", "workstations", "torchtitan"]
#: The lines of a small terminal.
SCREEN = 24
#: What each command's first screen must say, in the order of the pages.
ANSWERS = [
    (
        0,
        r"Fastest: 4 GPUs of dgx-h100 \(of 8 in a node\); cheapest: 8 GPUs of dgx-a100-80gb \(1 node\)",
        r"l40s-8-p2p +8 ",
    ),
    (
        0,
        r"Fewest GPUs within 90 days and 40,000,000 USD: 1,024 GPUs of dgx-b200 \(128 nodes\) with ",
        r"Launch it: --num-layers 80",
    ),
    (1, r"Nothing fits into memory; 32 GPUs of dgx-a100-40gb \(4 nodes\) would do: paleo estimate", r"too much"),
    (0, r"Fastest: 16 GPUs of pcie4-8gpu-infiniband \(2 nodes\)", r"pcie4-8gpu-10gbe +16 "),
    (
        0,
        r"Fastest: 8 GPUs of rtx-4090-4gpu-25gbe \(2 nodes\) with dp=8",
        r"Reproduce it: paleo estimate llama3-8b .*--qlora",
    ),
    (0, r"Fastest: 64 GPUs of dgx-b200 \(8 nodes\)", r"dgx-h100 +64 "),
]


def commands() -> list[list[str]]:
    """The first command of each page."""
    blocks = (re.search(r"```sh\n(.*?)```", (PAGES / f"{name}.md").read_text(), re.DOTALL) for name in STORIES)
    return [block[1].replace("\\\n", " ").split()[1:] for block in blocks if block]


def test_each_question_has_a_page_with_a_command() -> None:
    assert len(commands()) == len(ANSWERS)


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_one_command_answers_on_its_first_screen(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the job file that the page shows, where it shows one."""
    code, verdict, further = ANSWERS[number]
    file = re.search(r"`(\S+)`:\n\n```toml\n(.*?)```", (PAGES / f"{STORIES[number]}.md").read_text(), re.DOTALL)
    if file is not None:
        (tmp_path / file[1]).write_text(file[2])
    monkeypatch.chdir(tmp_path)
    assert run_command_line(commands()[number]) == code
    screen = " ".join(capsys.readouterr().out.splitlines()[:SCREEN])
    assert re.search(verdict, screen), screen
    assert re.search(further, screen), screen
