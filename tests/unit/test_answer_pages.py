"""Pages of services and of reinforcement learning: what they hold, and that they load nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.report.service_pages import reinforcement_page, service_page

DATE = "2030-01-31"
VOID = {"meta", "link", "br", "input"}


class Balanced(HTMLParser):
    """Elements of a page by name, and those that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def served():
    return paleo.serve("llama3-8b", "dgx-h100,dgx-a100-80gb", gpus=2, input=500, output=100, ttft=1.0)


@pytest.mark.slow
def test_page_of_a_service_has_verdict_charts_systems_and_every_plan(served):
    page = service_page(served.service, served.compared_services, date=DATE)
    elements = Balanced(page)
    assert not elements.open
    assert elements.names.count("figure") == 3
    assert served.service.verdict in page.replace("&#39;", "'")
    rows = page.count("<tr>") - page.count("<thead><tr>")
    assert rows == len(served.compared_services) + 3 + len(served.service.result.plans)
    assert all(each.system.name in page for each in served.compared_services)
    assert "vllm serve meta-llama/Meta-Llama-3-8B" in page
    assert DATE in page


@pytest.mark.slow
def test_page_loads_nothing(served):
    page = service_page(served.service, served.compared_services, date=DATE)
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "default-src 'none'" in page


def test_page_of_a_refusal_says_no_and_why():
    answer = paleo.serve("llama3-70b", "dgx-h100", gpus=1)
    page = service_page(answer.service, date=DATE)
    assert not Balanced(page).open
    assert "No: Llama 3 70B does not fit" in page
    assert "Layouts that cannot run" in page
    assert "<figure>" not in page


def test_page_of_a_step_has_parts_that_take_time_and_every_layout():
    answer = paleo.rl("qwen3-0.6b", "dgx-h100", gpus=8, rollouts=64, engine_strategy="tp=1", strategy="zero=1")
    page = reinforcement_page(answer.study, date=DATE)
    assert not Balanced(page).open
    assert answer.study.verdict in page
    assert page.count("<tr>") - page.count("<thead><tr>") == len(answer.study.steps)
    assert "log probabilities" in page
    assert "reward" not in page.partition("<table")[0]


@pytest.mark.slow
def test_explore_writes_a_page_and_refuses_other_suffixes(tmp_path, capsys):
    path = tmp_path / "service.html"
    words = ["serve", "llama3-8b", "--system", "dgx-h100", "--input", "200", "--output", "50", "--explore"]
    assert run([*words, str(path)]) == 0
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    capsys.readouterr()
    assert run([*words, str(tmp_path / "service.png")]) == 2
    assert "--explore" in capsys.readouterr().err
