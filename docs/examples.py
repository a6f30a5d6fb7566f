"""Outputs and pictures of the documentation, made when the site is built: a command that fails ends the build.

A block of commands after ``<!-- run -->`` is followed by what its commands print and by the plots that they save (as
.svg); after ``<!-- run 1 -->`` the exit code has to be 1. A block of Python is followed by what it prints.
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
RUN = re.compile(r"<!-- run ?(?P<code>\d?) -->\n```(?P<language>sh|python)\n(?P<text>.*?)```\n", re.DOTALL)
#: A log of torchtitan that the pages audit.
LOG = "step: {step}  loss:  7.1  memory: 47.30GiB(59.8%)  tps: 5,762  tflops: 333.1  mfu: 33.7%\n"


def run_examples(markdown: str, pictures: dict[str, bytes]) -> str:
    """Return a page with the outputs of its examples; plots are added to ``pictures`` by their file names."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("train.log").write_text("".join(LOG.format(step=step) for step in range(1, 13)))
        text = RUN.sub(lambda match: "".join(_with_output(match)), markdown)
        for path in Path(folder).glob("*.svg"):
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
            yield _block(_printed(words[1:], int(match["code"] or 0)))
            plots = [word for word in words if word.endswith(".svg")]
            yield from (f"\n![{' '.join(words)}](pictures/{name})\n" for name in plots)


def _printed(arguments: list[str], expected: int) -> str:
    """Run a command and return its output; RuntimeError where its exit code is another than the page says."""
    from paleo.cli import run
    from paleo.report import columns

    columns.PLAIN_WIDTH = columns.TEXT_WIDTH = WIDTH
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run(arguments)
    if code != expected:
        raise RuntimeError(f"docs: paleo {shlex.join(arguments)}: exit code {code}: {errors.getvalue()}")
    return out.getvalue()


def _block(output: str) -> str:
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    lines = lines if len(lines) <= LINES else [*lines[: LINES - 1], "…"]
    return "\n```text\n" + "\n".join(lines) + "\n```\n" if lines else ""
