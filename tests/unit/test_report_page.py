"""The purchase report: its answer, and how a browser shows it."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paleo.cli import run_command_line as paleo
from paleo.predict import predict
from paleo.report.charts import CHART_WIDTH_POINTS, RIGHT_MARGIN_POINTS, stacked_bar_chart
from paleo.report.html_pages import goodput_map, gradient_exchange_panels, purchase_page
from paleo.search.gpu_counts import recommended_plans
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.system import load_system
from paleo.studies.cost import convert_training_amount
from paleo.studies.goodput import LongRunOptions
from paleo.studies.purchase import AUTO, Purchase, PurchaseRequest, hardware_sensitivities, recommend_plans

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
VOID = {"meta", "link", "br", "path", "rect", "polygon", "polyline", "circle"}


def asked(**more: object) -> PurchaseRequest:
    model = load_model("alexnet")
    systems = (
        (load_system("aws-p3dn.24xlarge"), 8),
        (load_system("aws-p5.48xlarge"), 8),
        (load_system("dgx-a100-80gb"), 4),
    )
    wanted = convert_training_amount(model, epochs=2)
    assert wanted is not None
    run = Run(global_batch=512, strategy=AUTO)
    return replace(PurchaseRequest(model, systems, run, wanted, counts=(1, 4, 16)), **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def study() -> Purchase:
    return recommend_plans(asked())


@pytest.fixture(scope="module")
def page(study: Purchase) -> str:
    return purchase_page(study, date="2026-11-21")


class Tags(HTMLParser):
    """Checks that tags close in order, and collects what the page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("data:")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.mark.slow
def test_the_page_is_well_formed_and_loads_nothing(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == [] and tags.loads == []
    assert "http" not in re.sub(r"<ul class=sources>.*?</ul>|http-equiv", "", page)  # sources may name pages


@pytest.mark.slow
def test_the_answer_names_the_winner_of_each_goal(study: Purchase, page: str) -> None:
    cheapest, fastest = study.best("cost"), study.best("time")
    assert cheapest is not None and fastest is not None
    cards = re.findall(r"<h3>(\w+)</h3><p class=winner>(.*?)</p>", page)
    assert cards[0] == (
        "Cheapest",
        cheapest.candidate.system.gpus_and_nodes_text(cheapest.gpus),
    )  # the goal asked for stands first
    assert ("Fastest", fastest.candidate.system.gpus_and_nodes_text(fastest.gpus)) in cards
    assert "Price of dgx-a100-80gb" in page and "median of" in page  # nobody rents out this very system


def test_the_page_states_what_fools_the_masses(page: str) -> None:
    text = html.unescape(page)
    for words in (
        "Predicted, not measured",
        "h100-sxm5-80gb: auto: measured (h100-sxm5-80gb)",
        "wider intervals",
        "Whole training steps, not kernels",
        "1 multiply-add is 2 FLOP",
        "dense, without sparsity",
        "Strong scaling: the global batch is 512 at every count",
        "Statistical efficiency: not counted",
        "Not modelled",
        "input pipeline",
        "2 epochs of ImageNet",
        "Price of aws-p5.48xlarge",
        "GPU counts differ (4, 8)",
    ):
        assert words in text, words


def test_all_systems_run_the_same_global_batch(study: Purchase) -> None:
    assert {one.prediction.plan.global_batch for one in study.offers if one.prediction} == {512}


@pytest.mark.slow
def test_a_critical_batch_raises_times_and_costs_alike(study: Purchase) -> None:
    more = recommend_plans(asked(critical_batch=512.0))
    for before, after in zip(study.offers, more.offers, strict=True):
        assert before.candidate.training and after.candidate.training
        assert after.candidate.training.samples == pytest.approx(2 * before.candidate.training.samples)
        assert after.candidate.training.time == pytest.approx(2 * before.candidate.training.time, rel=1e-3)
    assert "2.00 times the samples" in purchase_page(more, date="2026-11-21")


@pytest.mark.slow
def test_failures_are_a_section_with_a_map() -> None:
    study = recommend_plans(asked(long_run=LongRunOptions(failures="50/knodeday"), counts=()))
    page = purchase_page(study, date="2026-11-21")
    (offer, *_) = study.offers
    failing = offer.candidate.training.long_run  # type: ignore[union-attr]
    assert failing is not None
    assert f"goodput {100 * failing.goodput:.1f} %" in page
    assert page.count("Goodput [%] of 8 × aws-p5.48xlarge; framed: this run</figcaption>") == 1
    assert "failures, restarts, checkpoints" not in page
    table = goodput_map(failing, (0.5, 1.0, 2.0))
    assert table[1, 1] == pytest.approx(failing.goodput)
    assert table[1, 1] > max(table[1, 0], table[1, 2])  # the interval is the best one
    assert table[0, 1] < table[1, 1] < table[2, 1]


@pytest.mark.slow
def test_how_workers_exchange_has_a_chart_for_each_thing_asked() -> None:
    """A crossing of compressed and dense steps, a knee, staleness, and packed nodes against random ones; nothing of it
    where steps are synchronous, dense and packed."""
    run = Run(global_batch=512, strategy="dp", compress="onebit", consistency="async", servers=4, nodes="random")
    question = asked(systems=((load_system("aws-p3.16xlarge"), 16),), run=run, counts=(1, 4, 16), scaling="weak")
    answer = recommend_plans(question)
    (offer,) = answer.offers
    panels = list(gradient_exchange_panels(answer, offer))
    assert [heading.split()[0] for heading, _, _ in panels] == ["Compression", "Updates", "Step"]
    assert all(chart.svg.count("</svg>") == 1 for _, chart, _ in panels)
    study = offer.candidate.consistency
    drawn = " ".join(f"{heading} {chart.svg} {words}" for heading, chart, words in panels)
    assert study is not None and f"knee at {float(study.consistency_result.knee):.3g}" in drawn
    assert "pays below" in drawn and "onebit pays here" in drawn and "packed nodes and random" in drawn
    assert f"<td class=number>{study.samples_per_s:,.0f}" in re.sub(
        ' data-key="[^"]*"', "", purchase_page(answer, date="")
    )
    plain = replace_fields(run, {"compress": None, "consistency": "bsp", "nodes": "packed"})
    synchronous = recommend_plans(replace(question, run=plain))
    assert list(gradient_exchange_panels(synchronous, synchronous.offers[0])) == []


@pytest.mark.slow
def test_names_are_escaped() -> None:
    question = asked()
    odd = question.model.model_copy(update={"name": "<script>alert(1)</script>"})
    text = purchase_page(recommend_plans(replace(question, model=odd, counts=())), date="now")
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text


def test_sensitivity_is_zero_for_what_a_single_gpu_lacks_and_bounded_by_the_change() -> None:
    made = predict(load_model("alexnet"), load_system("aws-p3dn.24xlarge"), Run(gpus=1, batch=64))
    found = {one.hardware_property: one for one in hardware_sensitivities(made)}
    assert (
        found["link bandwidth"].largest_change
        == found["link latency"].largest_change
        == found["memory capacity"].largest_change
        == 0
    )
    for what in ("arithmetic (FLOP/s)", "memory bandwidth"):
        assert 1 / 1.21 < found[what].step_ratio_increased <= 1 <= found[what].step_ratio_decreased < 1.26


@pytest.mark.slow
def test_recommended_plans_fit_where_data_parallelism_does_not() -> None:
    model, system = load_model("llama2-7b"), load_system("aws-p4d.24xlarge")
    made, _, _ = recommended_plans(model, system, Run(gpus=8, global_batch=64))
    assert made[0].memory.fits
    assert made[0].plan.strategy_text != "dp=8"
    steps = [one.step_time for one in made if one.memory.fits]
    assert made[0].interval[0] < min(steps) <= made[0].step_time  # the simplest of those that are as fast


@pytest.mark.slow
def test_a_system_that_cannot_take_part_says_why() -> None:
    one_gpu = load_system("v100-pcie-16gb")
    question = asked(counts=())
    made = recommend_plans(replace(question, systems=(*question.systems[:1], (one_gpu, 8))))
    assert made.offers[1].prediction is None
    assert "is one device without links" in purchase_page(made, date="now")


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    systems = "--systems=aws-p3dn.24xlarge:2,aws-p5.48xlarge"
    assert paleo(["report", "lenet", systems, "--gpus=1", "--samples=1000", "-o", str(target), "--objective=time"]) == 0
    text = target.read_text()
    assert "2 GPUs of aws-p3dn.24xlarge" in text and "1 GPU of aws-p5.48xlarge" in text
    assert text.index("Fastest") < text.index("Cheapest")
    assert paleo(["report", "lenet", "--systems=", "-o", str(target)]) == 2
    assert paleo(["report", "lenet", systems, "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert paleo(["report", "lenet", systems, "--objective=enery", "-o", str(target)]) == 2
    assert "'energy'" in capsys.readouterr().err


def chromium(url: Path, *options: str) -> tuple[str, str]:
    """What a page's document has become, and what the browser logged of it."""
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--v=0",
    ]
    profile = f"--user-data-dir={url.parent / 'profile'}"
    environment = os.environ | {"HOME": str(url.parent)}
    done = subprocess.run(
        [*command, profile, *options, url.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


PROBE = """<script>
const frame = document.getElementById("page");
frame.onload = () => {
  const page = frame.contentDocument, wide = page.documentElement.scrollWidth, found = {width: wide};
  const head = page.querySelectorAll("table.sortable th")[4 - 1], column = 3, table = head.closest("table");
  const keys = () => Array.from(table.tBodies[0].rows).map(row => Number(row.cells[column].dataset.key));
  head.querySelector("button").click(); found.rising = keys();
  head.querySelector("button").click(); found.falling = keys();
  const drawn = Array.from(page.querySelectorAll("svg"), one => one.getBoundingClientRect().height);
  found.drawings = drawn.filter(height => height > 20).length;
  found.first = page.querySelector("#answer .card.main").getBoundingClientRect().bottom;
  document.title = JSON.stringify(found);
};
frame.srcdoc = document.getElementById("text").textContent;
</script>"""


@pytest.mark.slow
@browser
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1280, 800), (3840, 2160)])
def test_a_browser_shows_it_at_any_width(page: str, tmp_path: Path, width: int, height: int) -> None:
    """Renders without console errors, nothing sticks out sideways, tables sort, the answer is on the first screen."""
    text = page.replace("</script>", "<\\/script>")
    frame = f'<iframe id="page" style="border:0" width="{width}" height="{height}"></iframe>'
    holder = tmp_path / "holder.html"
    probe = PROBE.replace(
        'document.getElementById("text").textContent',
        'document.getElementById("text").textContent.replaceAll("<\\\\/", "</")',
    )
    holder.write_text(
        f'<meta charset="utf-8"><title>?</title>{frame}<script type="text/plain" id="text">{text}</script>{probe}'
    )
    shown, log = chromium(holder, "--dump-dom", "--virtual-time-budget=5000")
    assert log == ""
    title = re.search(r"<title>(\{.*?\})</title>", shown)
    assert title, shown[:500]
    found = json.loads(html.unescape(title[1]))
    assert found["width"] <= width
    assert found["rising"] == sorted(found["rising"]) and found["falling"] == found["rising"][::-1]
    assert found["drawings"] >= 8
    assert found["first"] < height


@pytest.mark.slow
@browser
def test_it_prints(page: str, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text(page)
    chromium(target, f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


def test_a_size_stands_beside_its_bar_and_not_at_the_limit() -> None:
    """3.6 GiB at the dashed capacity of 40 GiB would read as the capacity."""
    chart = stacked_bar_chart(
        [("small", {"a": 3.6}, "3.6 GiB"), ("large", {"a": 39.0}, "39 GiB")], "memory", [40.0, 40.0]
    )
    texts = re.findall(r'<text [^>]*?(?:x="|translate\()([\d.]+)[^>]*>([\d.]+ GiB)</text>', chart.svg)
    numbers = {words: float(x) for x, words in texts}
    limit = CHART_WIDTH_POINTS - RIGHT_MARGIN_POINTS  # the longest of the rows
    assert numbers["3.6 GiB"] < limit / 5 and numbers["39 GiB"] > limit
