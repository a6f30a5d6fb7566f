"""Outputs and pictures of the documentation, made when the site is built: a command that fails ends the build.

A block of commands after ``<!-- run -->`` is followed by what its commands print and by the files that they save:
plots, pages, traces. After ``<!-- run 1 -->`` the exit code has to be 1; after ``<!-- run picture -->`` the output is
left out. A block of Python is followed by what it prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: Characters per line of outputs, and lines after which they are cut.
WIDTH, LINES = 96, 45
RUN = re.compile(
    r"<!-- run ?(?P<code>\d?)(?P<only>picture)? -->\n```(?P<language>sh|python)\n(?P<text>.*?)```\n", re.DOTALL
)
#: Ending of a file that a command saves -> how a page has it.
SHOWN = {
    ".svg": "\n![{name}](pictures/{name})\n",
    ".html": '\n<iframe src="pictures/{name}" title="{name}"></iframe>\n\n[Open {name}](pictures/{name})\n',
    ".json": "\n[{name}](pictures/{name})\n",
}
#: A log of torchtitan that the pages audit.
LOG = "step: {step}  loss:  7.1  memory: 47.30GiB(59.8%)  tps: 5,762  tflops: 333.1  mfu: 33.7%\n"
_JOBS = (Path(__file__).parent / "howto" / "fleet.md").read_text(encoding="utf-8")


def run_examples(markdown: str, pictures: dict[str, bytes]) -> str:
    """Return a page with the outputs of its examples; plots are added to ``pictures`` by their file names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("jobs.yaml").write_text(_JOBS.partition("```yaml\n")[2].partition("```")[0])
        for text in re.findall(r"```toml\n(.*?)```", markdown, re.DOTALL):
            Path("job.toml").write_text(text)
        Path("train.log").write_text("".join(LOG.format(step=step) for step in range(1, 13)))
        text = RUN.sub(lambda match: "".join(_with_output(match)), markdown)
        for path in (path for path in Path(folder).iterdir() if path.suffix in SHOWN):
            pictures[path.name] = path.read_bytes()
    return text


def _with_output(match: re.Match[str]) -> Iterator[str]:
    language, text = match["language"], match["text"]
    yield f"```{language}\n{text}```\n"
    if language == "python":
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(text, "example", "exec"), {})
        yield _block(out.getvalue())
        return
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["paleo"]:
            output = _printed(words[1:], int(match["code"] or 0))
            yield "" if match["only"] else _block(output)
            yield from (SHOWN[suffix].format(name=name) for name in words if (suffix := Path(name).suffix) in SHOWN)


def _printed(arguments: list[str], expected: int) -> str:
    """Run a command and return its output; RuntimeError where its exit code is another than the page says."""
    from paleo.cli import run_command_line as run
    from paleo.report import columns

    columns.PIPE_LINE_WIDTH = columns.TEXT_WIDTH = WIDTH
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run(arguments)
    if code != expected:
        raise RuntimeError(f"docs: paleo {shlex.join(arguments)}: exit code {code}: {errors.getvalue()}")
    return out.getvalue()


def _block(output: str) -> str:
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    lines = lines if len(lines) <= LINES else [*lines[: LINES - 1], "…"]
    return "\n```text\n" + "\n".join(lines) + "\n```\n" if lines else ""
