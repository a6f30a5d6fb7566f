"""The explorer page: every plan packed and unpacked, nothing loaded, and in a browser filters and keys that work."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paleo import Run, load_model, load_system
from paleo.cli import run_command_line as paleo
from paleo.launch.jobs import supported_search_space
from paleo.search.gpu_counts import search_gpu_counts
from paleo.search.plan_columns import plan_columns
from paleo.search.plans import search
from paleo.search.space import SearchSpace

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explorer") / "page.html"
    arguments = ["plan", "gpt2-xl", "--system", "dgx-a100-80gb", "--gpus", "8,16", "--global-batch", "64"]
    assert paleo([*arguments, "--samples", "1e7", "--explore", str(path)]) == 0
    return path


def facts(page: Path) -> dict[str, Any]:
    text = re.search(r'<script id="plans" type="application/json">(.*?)</script>', page.read_text(), re.S)
    assert text is not None
    data: dict[str, Any] = json.loads(text.group(1).replace("<\\/", "</"))
    return data


def test_columns_are_those_of_the_search(page: Path) -> None:
    data = facts(page)
    step = np.frombuffer(base64.b64decode(data["columns"]["step"]), dtype="<f4")
    gpus = np.frombuffer(base64.b64decode(data["columns"]["gpus"]), dtype="<u4")
    model, system, results = load_model("gpt2-xl"), load_system("dgx-a100-80gb"), []
    for count, software in ((8, "torchtitan"), (16, "megatron-core")):
        run = Run(gpus=count, global_batch=64, software=software)
        results.append(
            search_gpu_counts(model, system, run, (count,), space=supported_search_space(SearchSpace(), software))
        )
    steps = np.concatenate([result.ranking.step for result in results if result.ranking is not None])
    assert len(step) == len(steps) == data["count"] == data["evaluated"]
    assert np.allclose(np.sort(step), np.sort(steps), rtol=1e-6) and set(gpus.tolist()) == {8, 16}
    best, first = data["bestIndex"], results[1].plans[0]
    strategy = np.frombuffer(base64.b64decode(data["columns"]["strategy"]), dtype="<u2")
    assert best >= 0 and step[best] == pytest.approx(first.step_time, rel=1e-5)
    assert data["strategies"][strategy[best]] == first.strategy and first.strategy in data["command"]


def test_few_columns_are_the_best_ones() -> None:
    result = search(load_model("gpt2-xl"), load_system("dgx-a100-80gb"), Run(gpus=8, global_batch=64))
    assert result.ranking is not None
    some = plan_columns(result.ranking, 50)
    assert len(some) == 50 and some.evaluated_count == result.covered_configurations
    assert some.step_time.max() <= np.sort(result.ranking.step[result.ranking.fits])[49] * (1 + 1e-9)


def test_nothing_is_loaded(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and not re.search(r"https?:|url\(", text)


def drawn(page: Path, tmp_path: Path, script: str = "", size: str = "1200,1200") -> str:
    """The page's document after a script has run in a browser."""
    assert CHROMIUM is not None
    copy = tmp_path / "page.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    quiet = "--disable-background-networking --disable-component-update --disable-sync --no-first-run --disable-quic"
    options = ["--headless", "--no-sandbox", "--disable-gpu", *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}"]
    command = [CHROMIUM, *options, f"--window-size={size}", "--virtual-time-budget=4000", "--dump-dom", copy.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@browser
@pytest.mark.parametrize("size", ["1200,1200", "390,800"])
def test_a_browser_shows_the_best_plan_and_its_command(page: Path, tmp_path: Path, size: str) -> None:
    shown = drawn(page, tmp_path, "document.title = document.documentElement.scrollWidth <= innerWidth;", size)
    assert 'data-ready="yes"' in shown and "paleo estimate gpt2-xl" in shown
    assert re.search(r'id="verdict"[^>]*>[^<]*a step', shown)
    assert "<title>true</title>" in shown  # no sideways scrolling


@browser
def test_filters_and_keys_choose_other_plans(page: Path, tmp_path: Path) -> None:
    script = """
    const first = document.getElementById("verdict").textContent;
    const gpus = document.getElementById("gpus"); gpus.value = 0; gpus.dispatchEvent(new Event("input"));
    const few = document.getElementById("verdict").textContent;
    document.getElementById("plot").dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    const other = document.querySelector("#chosen h2").textContent;
    const budget = document.getElementById("budget"); budget.value = 0.0001; budget.dispatchEvent(new Event("input"));
    document.title = JSON.stringify([first, few, other, document.getElementById("verdict").textContent]);
    """
    title = re.search(r"<title>(.*?)</title>", drawn(page, tmp_path, script))
    assert title is not None
    first, few, other, none = json.loads(title.group(1).replace("&amp;", "&"))
    assert "on 8 GPUs" in few and other and none == "Nothing passes the filters."
    assert "a step" in first
