"""The documentation: its commands and its Python run, its pages are built without a warning; the shell completes."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paleo.cli import run_command_line as paleo
from paleo.cluster.jobs import read_jobs
from paleo.specs.device import load_device
from paleo.specs.loading import parse_yaml
from paleo.specs.model import load_model
from paleo.specs.system import load_system
from paleo.studies.sweep import SweepStudy
from tests.unit.test_serving_commands import TABLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCKS = [
    (page, kind, text) for page in PAGES for kind, text in re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.S)
]


def shown(kind: str) -> list[tuple[Path, str]]:
    return [(page, text) for page, found, text in BLOCKS if found == kind]


#: Commands of the pages, but those that the site runs when it is built.
COMMANDS = list(dict.fromkeys(
    line
    for page in PAGES
    for text in re.findall(r"(?<!-->\n)```sh\n(.*?)```", page.read_text(), re.DOTALL)
    for line in text.replace("\\\n", " ").splitlines()
    if line.startswith("paleo ")
))  # fmt: skip


#: A line of the log that pages name.
LOG = "step: {step}  loss:  7.1  memory: 47.30GiB(59.8%)  tps: 5,762  tflops: 333.1  mfu: 33.7%\n"


#: What these ask for fits nowhere, which is an answer of its own.
UNFIT = {
    command
    for command in COMMANDS
    if command.startswith("paleo estimate deepseek_v3") and "--schedule dualpipe" in command
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text("".join(LOG.format(step=step) for step in range(1, 13)))
    (tmp_path / "requests.csv").write_text("arrival_s,input_tokens,output_tokens\n0,500,20\n0.5,300,40\n1.5,800,30\n")
    (tmp_path / "jobs.yaml").write_text(next(text for _, text in shown("yaml") if text.startswith("jobs:")))
    (tmp_path / "bench_serve.txt").write_text(TABLE.format(ttft=100, tpot=8))
    if "--from job.sh" in command:
        (written,) = (line for line in COMMANDS if "--launch job.sh" in line)
        assert paleo(shlex.split(written)[1:]) == 0
    assert paleo(shlex.split(command)[1:]) == int(command in UNFIT)


@pytest.mark.parametrize(("page", "code"), shown("python"), ids=lambda one: getattr(one, "stem", ""))
def test_python_runs(page: Path, code: str) -> None:
    exec(compile(code, str(page), "exec"), {})


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The document that a command prints."""

    def call(*arguments: str) -> dict[str, Any]:
        assert paleo(arguments) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_files_shown_are_right(tmp_path: Path, printed: Callable[..., dict[str, Any]]) -> None:
    texts = [text for _, text in shown("yaml")]
    assert len(texts) >= 3
    for text in texts:
        data = parse_yaml(text, where="docs")
        path = tmp_path / "shown.yaml"
        path.write_text(text)
        if "axes" in data:
            assert SweepStudy.model_validate(data).row_count > 1
        elif "placement" in data:
            written = ["estimate", "gpt2", "--system", "dgx-a100-80gb", "--run", str(path), "--json"]
            asked = ["--gpus", "16", "--batch", "8", "--strategy", "tp=4,sp", "--json"]
            assert printed(*written) == printed(*written[:4], *asked) | {"strategy": "batch,tp=4,dp=4"}
        elif "multiprocessors" in data or "peak" in data:
            assert load_device(path).name == data["name"]
        elif "levels" in data:
            assert load_system(path).levels
        elif "jobs" in data:
            assert read_jobs(path)
        else:
            assert load_model(path).title == data["title"]


def test_links_between_pages_lead_somewhere() -> None:
    generated = {"cli.md", "json.md", "files.md", "catalog.md", "table_columns.md"}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)", page.read_text()):
            assert (page.parent / target).exists() or Path(target).name in generated, f"{page.name}: {target}"


#: A directive of mkdocstrings: the module or object, and the members of it that are shown.
SHOWN = re.compile(r"^::: ([\w.]+)(?:\n\s+options: \{members: \[([^\]]*)\])?", re.MULTILINE)


def test_members_that_pages_show_are_there() -> None:
    """The site is built without a warning where a module lacks one of them."""
    directives = [match for page in PAGES for match in SHOWN.findall(page.read_text())]
    assert len(directives) > 50
    for name, members in directives:
        shown_object = pkgutil.resolve_name(name)
        missing = [member for member in re.findall(r"\w+", members) if not hasattr(shown_object, member)]
        assert not missing, f"{name}: {missing}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for module in ("material", "mkdocs", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module} (extra docs)")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=quiet)
    assert built.returncode == 0, built.stderr + built.stdout
    text = (tmp_path / "reference" / "cli.html").read_text()
    assert "paleo estimate" in text and "--global-batch" in text
    assert "H100" in (tmp_path / "reference" / "catalog.html").read_text()
    assert "McCandlish" in (tmp_path / "formulas.html").read_text()
    gallery = tmp_path / "pictures" / "gallery"
    assert dict(Counter(path.suffix for path in gallery.iterdir())) == {".svg": 13, ".html": 2, ".json": 1}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("paleo estimate resnet5", {"resnet50"}),
        ("paleo estimate resnet50 --system dgx-h2", {"dgx-h200"}),
        ("paleo compare resnet50 --systems dgx-2,dgx-h2", {"dgx-2,dgx-h200"}),
        ("paleo sw", {"sweep"}),
    ],
)
def test_the_shell_completes(words: str, expected: set[str]) -> None:
    asked = {"_PALEO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "paleo"], env=os.environ | asked, capture_output=True, text=True, check=False
    )
    assert expected <= set(done.stdout.split())


@pytest.mark.parametrize("text", [text for _, text in shown("csv")], ids=lambda text: str(len(text)))
def test_tables_shown_are_read(text: str, tmp_path: Path) -> None:
    from paleo.tables.validation import validate_file

    (tmp_path / "table.csv").write_text(text)
    report = validate_file(tmp_path / "table.csv")
    assert not report.unsupported_reasons
    assert report.errors().p90_ape is not None and report.errors().p90_ape < 0.5
