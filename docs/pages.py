"""Pages that are made from the program itself: mkdocs calls ``on_files``; ``python docs/pages.py TABLE…`` writes
accuracy.md."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from paleo.errors import PaleoError

with contextlib.suppress(ImportError):
    import griffe

    class Doctests(griffe.Extension):
        """Shows the worked values of docstrings as code."""

        def on_object(self, *, obj: Any, **_: Any) -> None:
            if obj.docstring is not None:
                obj.docstring.value = fenced(obj.docstring.value)


ACCURACY = Path(__file__).resolve().parent / "accuracy.md"


def on_files(files: Any, config: Any) -> Any:
    """Hook of mkdocs: adds the generated pages of the reference."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ACCURACY.parent))
    from architecture import svg

    pages = {
        "reference/cli.md": cli,
        "reference/json.md": json_documents,
        "reference/files.md": spec_files,
        "reference/catalog.md": catalog,
        "reference/table_columns.md": table_columns,
    }
    for name, write in pages.items():
        files.append(File.generated(config, name, content=write()))
    files.remove(files.get_file_from_path("architecture.svg"))
    files.append(File.generated(config, "architecture.svg", content=svg()))
    data = (ACCURACY.parent / "parity.csv").read_text(encoding="utf-8")
    files.append(File.generated(config, "parity-data.js", content=f"window.PARITY = {json.dumps(data)};\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Hook of mkdocs: runs the examples of a page and adds their outputs and plots."""
    from examples import RUN, run_examples
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    markdown = re.sub(r"(?<=\d) %(?= [|])", "\u00a0%", markdown)  # not broken in cells of tables
    if not RUN.search(markdown):
        return markdown
    pictures: dict[str, bytes] = {}
    try:
        text = run_examples(markdown, pictures)
    except Exception as error:
        raise PluginError(f"{page.file.src_uri}: {error}") from error
    folder = f"pictures/{Path(page.file.src_uri).stem}/"
    for name, content in pictures.items():
        files.append(File.generated(config, folder + name, content=content))
    return re.sub(r'(\]\(|src=")pictures/', rf"\g<1>{'../' * page.file.src_uri.count('/')}{folder}", text)


def fenced(docstring: str) -> str:
    """A docstring with its doctests between fences."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        starts, blank = line.startswith(">>>"), not line.strip()
        if starts and not inside:
            lines.append("```python")
        if inside and blank:
            lines.append("```")
        inside = starts or (inside and not blank)
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


# the command line


def cli() -> str:
    """Every command with its arguments and options."""
    import typer

    from paleo.cli import app_with_all_commands

    group: Any = typer.main.get_command(app_with_all_commands())
    parts = ["# Command line\n", "Exit codes: 0; 1 (the answer is no); 2 (wrong input).\n"]
    for name, command in group.commands.items():
        text, _, examples = (command.help or "").partition("\b")
        parts += [f"## paleo {name}\n", f"{text.strip()}\n", f"```sh\n{examples.strip()}\n```\n"]
        rows = [(_usage(p), (getattr(p, "help", None) or "").strip(), _default_of(p)) for p in command.params]
        parts.append(
            table(("option", "what it does", "if left out"), [row for row in rows if row[0] != "`--help`, `-h`"])
        )
    return "\n".join(parts)


def _default_of(parameter: Any) -> str:
    """The default of an option, in words where it has them."""
    if parameter.required:
        return "required"
    stated = getattr(parameter, "show_default", True)
    return stated if isinstance(stated, str) else str(parameter.default)


def _usage(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in parameter.opts)
    return names if parameter.is_flag or not parameter.metavar else f"{names} {parameter.metavar}"


# what --json prints


def json_documents() -> str:
    """The keys of every document, from the schemas that ``paleo schema`` prints."""
    from paleo.report.json_schemas import commands_with_json_document, json_schema

    parts = [_JSON_INTRO]
    for name in commands_with_json_document():
        schema = json_schema(name)
        parts.append(f"## paleo {name} --json\n\nSchema `{schema['$id']}`.\n")
        parts.append(table(("key", "type", "", "meaning"), _keys(schema)))
    return "\n".join(parts)


_JSON_INTRO = """# JSON

Every document names its schema by its key `schema`; `paleo schema COMMAND` prints it as JSON Schema. The number behind
the name rises when a key changes its meaning or goes away; keys may be added. Figures are in SI: seconds, bytes, FLOP,
watt, joule; `usd`, `kwh`, `days` and `minutes` say so. `[]` stands for each entry of a list, `*` for a name. A number
that is not finite is null.
"""


def _keys(schema: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, type, whether it may be missing, and meaning, of a schema and of all below it."""
    required = schema.get("required", ())
    for key, field in schema.get("properties", {}).items():
        kinds = " or ".join(field.get("type", ["anything"]))
        missing = "" if key in required else "may be missing"
        yield f"`{before}{key}`", kinds, missing, field.get("description", "")
        yield from _keys(field, f"{before}{key}.")
        yield from _keys(field.get("items", {}), f"{before}{key}[].")
        if field.get("additionalProperties"):
            yield from _keys({"properties": {"*": field["additionalProperties"]}, "required": ["*"]}, f"{before}{key}.")


def table_columns() -> str:
    """The columns of every kind of measured table, from the declarations that `paleo validate` reads by."""
    from paleo.tables.base import COLUMNS
    from paleo.tables.run_tables import table_kinds

    parts = ["# Columns of measured tables\n\nA cell may be blank unless its kind cannot do without it.\n"]
    for name, kind in sorted(table_kinds().items()):
        rows = [
            (
                f"`{column}`",
                COLUMNS[column].expected_text,
                "yes" if column in kind.identifying_columns else "",
                COLUMNS[column].meaning,
            )
            for column in dict.fromkeys(part for entry in kind.columns for part in entry.split(" + "))
        ]
        parts.append(f"## {name}\n\n{table(('column', 'holds', 'needed', 'meaning'), rows)}")
    return "\n".join(parts)


# files


def spec_files() -> str:
    """The keys of every kind of YAML file."""
    from paleo.specs.device import Device, Link, Memory, Price
    from paleo.specs.model import Dataset, ModelInput, ModelSpec, PublishedCounts
    from paleo.specs.run import Run
    from paleo.specs.software import SoftwareProfile, field_table
    from paleo.specs.system import Host, InterconnectLevel, System
    from paleo.studies.cost import Tariff
    from paleo.studies.sweep import SweepStudy

    intro = (
        "Numbers with a dimension carry their unit (`900 GB/s`, `80 GiB`, `5 us`, `32.77 USD/h`). Unknown keys, "
        "keys that stand twice and "
        "bare numbers are errors that name the key and the nearest right spelling. A file may `extend` another of "
        "its kind. The catalog lies in `models/` and in `hardware_specs/` (`devices/`, `links/`, `systems/`, "
        "`software/`, `calibrations/`).\n"
    )
    kinds: dict[str, list[Any]] = {
        "Models": [ModelSpec, ModelInput, Dataset, PublishedCounts],
        "Devices": [Device, Memory, Price],
        "Links": [Link],
        "Systems": [System, InterconnectLevel, Host],
        "Software profiles": [SoftwareProfile],
        "Runs": [Run],
        "Prices": [Tariff],
        "Studies": [SweepStudy],
    }
    parts = ["# Files\n", intro]
    for title, specs in kinds.items():
        parts.append(f"## {title}\n")
        if specs == [SoftwareProfile]:
            parts.append("Fields stand in groups: `host: {forward: 5 us}` sets `host.forward`.\n")
            parts.append(table(("field", "unit", "default", "meaning"), field_table(SoftwareProfile)))
            continue
        for spec in specs:
            parts += [f"### {spec.__name__}\n", f"{_described(spec)}\n", _fields(spec)]
    parts += [
        "## Layers of a model\n",
        "Each layer is `type: {key: value}`; `name` and `input` are common to all.\n",
        _layers(),
    ]
    return "\n".join(parts)


def _described(entry: Any) -> str:
    return "\n".join(line.strip() for line in (entry.__doc__ or "").strip().splitlines())


def _fields(spec: Any) -> str:
    described = any(field.description for field in spec.model_fields.values())
    shown = [
        (f"`{name}`", _kind(field.annotation, field.metadata), _default(field))
        + ((field.description or "",) if described else ())
        for name, field in spec.model_fields.items()
    ]
    return table(("key", "holds", "if left out", *(("meaning",) if described else ())), shown)


def _kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type in words: ``bytes per second, with unit``, ``text``, ``one of …``."""
    from pydantic import BeforeValidator

    quantities = {id(quantity.__metadata__[0]): words for quantity, words in _quantities().items()}
    known = [quantities[id(entry)] for entry in metadata if id(entry) in quantities]
    if known:
        return known[0]
    if any(isinstance(entry, BeforeValidator) for entry in metadata):
        return "a figure with its unit"
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0], arguments[1:])
    if origin is Literal:
        return "one of " + ", ".join(f"`{entry}`" for entry in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(entry) for entry in arguments if entry is not type(None))
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin in (dict, Mapping):
        return f"mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "anything"}
    return plain.get(annotation) or getattr(annotation, "__name__", str(annotation))


def _quantities() -> dict[Any, str]:
    from paleo import units

    return {
        units.Seconds: "time, as `5 us`",
        units.Bytes: "bytes, as `80 GiB`",
        units.BytesPerSecond: "bandwidth, as `900 GB/s`",
        units.FlopsPerSecond: "rate, as `312 TFLOP/s`",
        units.Hertz: "frequency, as `1410 MHz`",
        units.Watts: "power, as `400 W`",
        units.PricePerSecond: "price, as `32.77 USD/h`",
    }


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, "", (), {}, []) else f"`{value}`"


def _layers() -> str:
    from paleo.layers.base import LAYERS

    rows = []
    for name, layer in sorted(LAYERS.items()):
        keys = [key for key in layer.model_fields if key not in ("name", "input", "inputs")]
        rows.append((f"`{name}`", ", ".join(f"`{key}`" for key in keys), _described(layer).partition("\n")[0]))
    return table(("layer", "keys", "what it is"), rows)


# the catalog


def catalog() -> str:
    """Everything that has a name, with a line on it."""
    from paleo.report import catalog as entries

    parts = ["# Catalog\n", "What `paleo list` prints; `paleo show NAME` says all that is known of an entry.\n"]
    for kind in entries.DESCRIPTIONS_BY_KIND:
        lines = entries.catalog_descriptions(kind)
        parts += [
            f"## {kind.capitalize()} ({len(lines)})\n",
            table(("name", "what it is"), [(f"`{k}`", v) for k, v in lines.items()]),
        ]
    return "\n".join(parts)


# how wrong is it


def _left_out_errors(reports: Sequence[Mapping[str, Any]]) -> str:
    """Tables that no kind of `paleo validate` reads."""
    rows = [(_table_name(report), report["error"]) for report in reports if "error" in report]
    return f"### Tables that are not read\n\n{table(('table', 'reason'), rows)}" if rows else ""


def accuracy(everything: Sequence[Mapping[str, Any]]) -> str:
    """The page on errors, as ``paleo validate --json`` finds them in measured tables."""
    from datetime import date

    from paleo import __version__

    reports = [report for report in everything if "error" not in report]
    parts = [
        _INTRO.format(release=__version__, date=date.today().isoformat()),
        PARITY,
        "## All tables\n",
        table(_MULTI_HEAD_TENSORS, [_errors(_table_name(r), r["overall"], r) for r in reports]),
    ]
    parts += [
        "## Weakest slices\n",
        _weakest(reports),
        _reasons(reports),
        _left_out_errors(everything),
        _sources_left_out(),
    ]
    parts.append(_held_out())
    parts += [_rounds(report["file"]) for report in reports if report["kind"] == "training_runs"]
    for report in reports:
        parts.append(f"## {_table_name(report)}\n")
        for key, title in (("by_device", "device"), ("by_source", "source")):
            groups: Mapping[str, Any] = report[key]
            rows = [_errors(name, errors)[:-2] for name, errors in sorted(groups.items())]
            parts.append(table((title, *_MULTI_HEAD_TENSORS[1:-2]), rows))
    return "\n".join(parts)


_MULTI_HEAD_TENSORS = (
    "table",
    "rows",
    "median error",
    "mean error",
    "worst tenth",
    "bias",
    "total",
    "coverage",
    "one constant",
    "unsupported",
    "kind",
)
#: The picture that filters by table and source, drawn by parity.js from parity.csv.
PARITY = """## Predicted and measured

Each point is a measured row, at most 40 of each source; on the dashed line it is predicted exactly.

<div id="parity"><img src="parity.svg" alt="Predicted against measured step times by source"></div>
<script src="parity-data.js"></script><script src="parity.js"></script>
"""
_INTRO = """# How wrong is it?

Errors of predictions against measured times, by Paleo {release} on {date}. This page is made by `make accuracy`, which
runs `paleo validate --json` on every table; nothing on it is typed by hand. The same tables calibrate the devices that
they hold, so that for those it shows how well the formulas *fit*, not how well they foretell;
"Rows that were not fitted" says that.

- **median, mean, worst tenth**: relative error of a row, |predicted / measured - 1|; the worst tenth is its 90th
  percentile.
- **bias**: mean of log(predicted / measured); below zero is too fast.
- **total**: sum of predicted over sum of measured times, less 1: what long rows say.
- **coverage**: share of rows inside the stated 90 % interval; 90 % is right, more is too careful, less is too bold.
- **one constant**: mean error of the bare roofline divided by one efficiency for each device, chosen in hindsight for
  these very rows; what a prediction has to beat.
- **unsupported**: rows that cannot be modelled; they are counted, with the reason, never dropped in silence.
"""


def _table_name(report: Mapping[str, Any]) -> str:
    """A table by its file, with the folder where that is not the one of all tables: ``mlperf/storage.csv``."""
    path = Path(report["file"])
    return path.name if path.parent.name == "measurements" else f"{path.parent.name}/{path.name}"


#: Fewer rows than these make no slice, and so many slices are shown.
SLICE_ROWS, SLICES = 12, 20


def _slices(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Devices and sources of all tables, the worst mean error first."""
    found = [
        (f"{_table_name(report).partition('.')[0]}: {name}", errors)
        for report in reports
        for groups in (report["by_device"], report["by_source"])
        for name, errors in groups.items()
        if errors["rows"] >= SLICE_ROWS and errors["mape"] is not None
    ]
    return sorted(found, key=lambda entry: -entry[1]["mape"])


def _weakest(reports: Sequence[Mapping[str, Any]]) -> str:
    text = f"The {SLICES} worst devices and sources of at least {SLICE_ROWS} rows.\n\n"
    rows = [_errors(name, errors)[:-2] for name, errors in _slices(reports)[:SLICES]]
    return text + table(("table: device or source", *_MULTI_HEAD_TENSORS[1:-2]), rows)


def ledger(reports: Sequence[Mapping[str, Any]]) -> str:
    """The block of README: every table in a line, then the weakest slices."""
    heads = ("measured rows", "rows", "mean error", "bias", "coverage", "one constant in hindsight")
    chosen = (0, 1, 3, 5, 7, 8)

    def lines(entries: Iterable[tuple[str, Mapping[str, Any] | None]]) -> str:
        rows = [_errors(name, errors) for name, errors in entries]
        return table(heads, [[row[index] for index in chosen] for row in rows])

    whole = [(_table_name(report).partition(".")[0], report["overall"]) for report in reports]
    return f"{lines(whole)}\nThe weakest devices and sources:\n\n{lines(_slices(reports)[:6])}"


def _sources_left_out() -> str:
    """The ledger of steps as ``paleo calibrate --fit … --only ledger`` wrote it."""
    with (ACCURACY.parent / "ledger.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.reader(file))
    heads = [name.replace("_", " ") for name in lines[0]]
    rows = [[*line[:3], *(f"{100 * float(cell):.1f} %" if cell else "-" for cell in line[3:])] for line in lines[1:]]
    text = (
        "Each source of six rows or more, as fitted, and with arithmetic, intervals and what engine profiles take of "
        "sources fitted to all others.\n\n"
    )
    return f"## Sources of steps, left out\n\n{text}{table(heads, rows)}"


def _held_out() -> str:
    """What the calibration files and software profiles say of rows that were not fitted."""
    from paleo.specs.calibration import INHERITANCE_FILE, load_calibration
    from paleo.specs.catalog import entry_names
    from paleo.specs.software import load_software

    rows: list[tuple[str, ...]] = []
    for name in (name for name in entry_names("calibrations") if name != INHERITANCE_FILE):
        rows += [
            (name, f"{entry.family}, {entry.stack}", *_held(entry.rows_fitted, entry.residual))
            for entry in load_calibration(name).entries
            if entry.residual is not None
        ]
    for name in entry_names("software"):
        fit = load_software(name).fit
        if fit is not None:
            rows.append((name, "whole steps", *_held(fit.rows_fitted, fit.residual)))
    heads = (
        "what",
        "family, way of timing",
        "fitted rows",
        "rows held out",
        "median error",
        "mean error",
        "bias",
        "total",
    )
    return f"## Rows that were not fitted\n\n{table(heads, rows)}"


def _rounds(file: str) -> str:
    """Submissions as foretold by tasks that were fitted to all other rounds."""
    import pandas as pd

    from paleo.calibrate.mlperf_tasks import (
        CROSS_VALIDATION_HEADINGS,
        cross_validated_submissions,
        error_table_rows,
        format_percent,
        gpu_ranking_accuracy,
    )

    submissions = cross_validated_submissions(pd.read_csv(file))
    share, pairs = gpu_ranking_accuracy(submissions)
    return (
        "## Submissions of MLPerf, each round left out\n\nMean errors of tasks fitted to all other rounds.\n\n"
        f"{table(CROSS_VALIDATION_HEADINGS, error_table_rows(submissions))}\nOf {pairs:,} pairs of submissions on two "
        f"kinds of "
        f"GPUs, "
        f"of one benchmark, round and count, whose minutes differ by more than 5 %, {format_percent(share)} are "
        "predicted in the right order.\n"
    )


def _held(fitted: int, residual: Any) -> tuple[str, ...]:
    shares = (residual.median_ape, residual.mape, residual.bias, residual.total_error)
    return (
        f"{fitted:,}",
        f"{residual.rows:,}",
        *("–" if share is None else f"{100 * share:.1f} %" for share in shares),
    )


def _validated(files: Sequence[str], parts: list[Any]) -> Iterator[dict[str, Any]]:
    """What ``paleo validate --json`` says of each file; why, under ``error``, where it cannot read one. Points of the
    picture are added to ``parts``."""
    from parity import points

    import paleo
    from paleo.report.columns import json_text

    for file in files:
        try:
            answer = paleo.validate(file)
        except PaleoError as error:
            yield {"file": file, "error": str(error).removeprefix(f"{file}: ").partition(";")[0]}
            continue
        name = _table_name({"file": file}).partition(".")[0]
        for report in answer.reports:
            column, measured = report.table.measured_column, report.measured / report.table.measured_unit_in_si
            parts.append(points(name, column, answer.predictions().assign(**{column: measured})))
        yield from json.loads(json_text(answer.json_document()))["files"]


def _errors(name: str, errors: Mapping[str, Any] | None, report: Mapping[str, Any] | None = None) -> list[str]:
    kind = [] if report is None else [f"{report['unsupported']:,}", report["kind"]]
    if not errors or not errors.get("rows"):
        return [name, "0", *["–"] * 7, *(kind or ["", ""])]
    shares: list[Callable[[], float | None]] = [
        lambda key=key: errors.get(key)  # type: ignore[misc]
        for key in ("median_ape", "mape", "p90_ape", "bias", "total_error", "coverage", "baseline_mape")
    ]
    shown = ["–" if (value := share()) is None else f"{100 * value:.1f} %" for share in shares]
    return [name, f"{errors['rows']:,}", *shown, *(kind or ["", ""])]


def _reasons(reports: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (_table_name(report), reason, f"{count:,}")
        for report in reports
        for reason, count in report["unsupported_reasons"].items()
    ]
    return f"### Rows that cannot be modelled\n\n{table(('table', 'reason', 'rows'), rows)}" if rows else ""


README = ACCURACY.parent.parent / "README.md"
_LEDGER = re.compile(r"(<!-- ledger -->\n).*?(<!-- /ledger -->)", re.S)


def main(files: Sequence[str]) -> None:
    """Write accuracy.md, the points of its picture, and the ledger of README.md."""
    from parity import write

    parts: list[Any] = []
    reports = list(_validated(files, parts))
    write(parts)
    ACCURACY.write_text(accuracy(reports), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    README.write_text(
        _LEDGER.sub(lambda block: f"{block[1]}{ledger([r for r in reports if 'error' not in r])}{block[2]}", text),
        encoding="utf-8",
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        raise SystemExit("usage: python docs/pages.py TABLE…")
    try:
        main(sys.argv[1:])
    except PaleoError as error:
        raise SystemExit(f"error: {error}") from None
