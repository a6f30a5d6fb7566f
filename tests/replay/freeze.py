"""Predictions as they were last agreed on: what a change moves has to be named.

``steps.json`` holds step time, breakdown, interval, FLOP and memory of configurations drawn from a seed over every
preset, schedule, ZeRO stage, recomputation and software profile; ``plans.json`` the first plans of searches;
``errors.json`` the errors by source of ``paleo validate`` on some rows of each measured table (compared by
tests/measured). Frozen predictions are no evidence that anything is right; they show that a refactoring changed
nothing.

After a deliberate change of a model, from the root of the checkout:

    python -m tests.replay.freeze              # print what moved and by how much, and write it
    python -m tests.replay.freeze --dry-run    # print alone
    python -m tests.replay.freeze steps plans  # only these files
    python -m tests.replay.freeze --draw steps # draw the configurations anew (new presets, schedules, profiles)

and the commit says which cases moved and why. ``errors`` takes a minute or two, and needs ../shared.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.errors import PaleoError
from paleo.parallel.placement import STRATEGY_PRESETS
from paleo.predict import Breakdown, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.plans import search
from paleo.specs.catalog import entry_names
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

if TYPE_CHECKING:
    from paleo.tables.validation import FileReport

FOLDER = Path(__file__).resolve().parent
MEASUREMENTS = FOLDER.parents[2] / "shared" / "measurements"
#: Relative difference beyond which a prediction has moved.
TOLERANCE = 1e-9
#: Sums in another order may differ by this share of the whole that the numbers are parts of.
ROUNDING = 1e-12
SEED, DRAWS = 20261121, 200

Case = dict[str, Any]
Figures = dict[str, Any]


# configurations drawn from a seed

TINY = {"hidden": 256, "heads": 8, "layers": 8, "seq": 128, "vocab": 2048}
NETWORKS: list[tuple[str, Mapping[str, Any]]] = [
    ("lenet", {}), ("alexnet", {}), ("vgg16", {}), ("resnet50", {}), ("inception_v3", {}), ("unet", {}), ("dlrm", {}),
    ("lstm_lm", {}), ("gnmt", {}), ("deepspeech2", {}), ("transformer_big", {}), ("bert_base", {}), ("vit_b16", {}),
    ("gpt2", TINY), ("gpt2", {}), ("gpt2-xl", {}), ("llama2-7b", {}), ("llama3-8b", {}), ("llama3-70b", {}),
    ("gpt3-175b", {}), ("llama3-405b", {}), ("mixtral-8x7b", {}), ("deepseek_v2-lite", {}), ("qwen3-30b-a3b", {}),
]  # fmt: skip
SYSTEMS = ["dgx-a100-80gb", "dgx-h100", "dgx-1-v100", "dgx-2", "dgx-b200", "titan-ornl", "rtx-pro-6000-8gpu", "selene"]
SPLITS = [
    "dp", "zero=1", "zero=2", "zero=3", "tp=2", "tp=4,sp", "tp=8,sp,zero=1", "cp=2", "cp=4,ulysses", "ep=2",
    "ep=4,zero=1", "pp=2", "pp=4,zero=1", "pp=2,tp=2,sp", "pp=8,tp=4,sp", "pp=4,cp=2", "zero=3,pp=2", "spatial=2",
    "zero=1,shard=2", "zero=3,shard=4", "tp=2,pp=2,ep=2", "pp=2,zero=2",
]  # fmt: skip
#: Options beside the strategy: each is left out, or drawn, with this probability.
OPTIONS: dict[str, tuple[float, list[Any]]] = {
    "calibration": (0.25, ["ideal", "ppp=0.6"]),
    "dtype": (0.2, ["fp32", "fp16", "bf16", "tf32", "fp8"]),
    "optimizer": (0.25, ["sgd", "momentum", "adam", "lamb"]),
    "exchange": (0.25, ["overlapped", "after", "parameter-server"]),
    "exchange.algorithm": (0.1, ["ring", "double_tree", "hierarchical"]),
    "exchange.bucket": (0.1, ["1 MiB", "100 MiB"]),
    "offload": (0.1, ["optimizer", "activations", "optimizer,gradients,parameters"]),
    "clip": (0.1, ["none", "norm", "scaled"]),
    "input": (0.08, [{"decode": "5 ms", "copied": "1 MB"}, {"sample": "100 kB", "storage": "2 GB/s"}]),
    "lora": (0.06, ["8"]),
    "kernels.attention": (0.08, ["fused", "unfused"]),
    "forward_only": (0.06, [True]),
    "experts.imbalance": (0.1, [1.3]),
    "pipeline.cut": (0.15, ["time", "uniform"]),
    "recompute_layers": (0.08, [1, 2]),
    "recompute.every": (0.05, [2]),
}


def drawn(draws: int = DRAWS, seed: int = SEED) -> list[Case]:
    """Configurations that can be laid over their networks. Strategies, schedules and profiles take turns, so that none
    is left to chance."""
    chance, cases, attempt = random.Random(seed), list[Case](), 0
    strategies = [*SPLITS, *(preset for preset in sorted(STRATEGY_PRESETS) if preset != "dp")]
    profiles, schedules = sorted(entry_names("software")), sorted(SCHEDULES)
    while len(cases) < draws:
        strategy, attempt = strategies[len(cases) % len(strategies)], attempt + 1
        network, parameters = chance.choice(NETWORKS)
        run: Case = {"gpus": chance.choice([1, 2, 4, 8, 16, 32, 64, 256, 1024]), "strategy": strategy}
        run["software"] = profiles[len(cases) % len(profiles)]
        if "pp=" in strategy:
            run |= {"schedule": schedules[attempt % len(schedules)], "microbatch": chance.choice([1, 2])}
            run |= {"strategy": f"{strategy},vp=2"} if run["schedule"] == "interleaved" else {}
        run["batch"] = chance.choice([1, 4, 8, 16, 24, 64])
        run["recompute"] = chance.choice(["none", "none", "selective", "full"])
        run |= {name: chance.choice(values) for name, (share, values) in OPTIONS.items() if chance.random() < share}
        run |= {"model": dict(parameters)} if parameters else {}
        case = {"model": network, "system": chance.choice(SYSTEMS), "run": run}
        try:
            step_figures(case)
        except PaleoError:
            continue
        cases.append(case)
    return cases


#: Searches: networks, machines and profiles that take every path through the search.
SEARCHES: list[Case] = [
    {"model": model, "system": system, "run": {"gpus": gpus, "global_batch": batch, **options}}
    for model, system, gpus, batch, options in (
        ("gpt2", "dgx-h100", 16, 64, {}),
        ("gpt3-175b", "dgx-a100-80gb", 512, 1536, {}),
        ("mixtral-8x7b", "dgx-h100", 16, 32, {}),
        ("resnet50", "dgx-1-v100", 16, 256, {}),
        ("bert_base", "dgx-1-v100", 8, 64, {"dtype": "fp16", "software": "tensorflow1"}),
        ("gpt2", "dgx-a100-80gb", 16, 64, {"calibration": "ideal"}),
        ("gpt2", "dgx-h100", 16, 128, {"software": "megatron-core"}),
        ("mixtral-8x7b", "dgx-h100", 32, 64, {"software": "megatron-core"}),
        ("gpt2", "dgx-h100", 16, 64, {"software": "megatron-2021"}),
        ("resnet50", "dgx-h100", 16, 512, {"input": {"decode": "10 ms", "copied": "2 MB"}}),
        ("llama2-7b", "dgx-h100", 16, 64, {"software": "nanotron"}),
        ("mixtral-8x7b", "dgx-h100", 16, 32, {"experts.imbalance": 1.25}),
        ("gpt2", "dgx-a100-80gb", 32, 64, {"software": "cuda-graph"}),
        ("gpt2", "dgx-h100", 16, 64, {"forward_only": True}),
        ("llama2-7b", "dgx-h100", 16, 64, {"lora": "8", "dtype": "fp8"}),
        ("gpt2", "deepbench-8gpu-dual-root", 16, 64, {"dtype": "fp32", "calibration": "dgx-a100-80gb"}),
        ("gpt2", "dgx-a100-80gb", 8, 48, {"software": "megatron-2021"}),
        ("llama3-405b", "dgx-h100", 512, 512, {"software": "megatron-core"}),
        ("qwen3-30b-a3b", "dgx-h100", 64, 128, {"software": "megatron-core"}),
    )
]
#: Plans of each search that are frozen.
TOP = 5


# what is frozen of each


def step_figures(case: Case) -> Figures:
    """Step time, its parts and interval [s], FLOP, and the parts of the memory [byte] of one configuration."""
    step = predict(load_model(case["model"]), load_system(case["system"]), validate_mapping(Run, case["run"], "replay"))
    memory = {**step.memory.parts, "total": step.memory.total, "host": step.host_memory}
    parts = {field.name: getattr(step.breakdown, field.name) for field in fields(Breakdown)}
    parts = {name: seconds for name, seconds in parts.items() if seconds or name != "stragglers"}  # asked for alone
    return {
        "step_time": step.step_time,
        **parts,
        "interval_low": step.interval[0],
        "interval_high": step.interval[1],
        "flops": step.model_flops_per_step,
        **{f"memory_{name}": value for name, value in memory.items()},
    }


def plan_figures(case: Case) -> Figures:
    """How many configurations were searched and fit, and the first plans."""
    run = validate_mapping(Run, case["run"], "replay")
    ranking = search(load_model(case["model"]), load_system(case["system"]), run, top=TOP)
    plans = [
        [
            f"{plan.strategy} microbatch={plan.microbatch} recompute={plan.recompute} {plan.schedule}"
            + (" overlapped" if plan.overlaps_gradient_exchange else ""),
            plan.step_time,
            plan.memory,
        ]
        for plan in ranking.plans
    ]
    return {"configurations": ranking.covered_configurations, "fitting": ranking.fitting_configurations, "plans": plans}


#: Rows of each source in a measured table whose errors are frozen, at most.
ROWS = 30


def row_keys(table: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """A short name for each row by what stands in these columns."""
    texts = (table[name].fillna("").astype(str) for name in columns)
    return [sha1("|".join(row).encode()).hexdigest()[:7] for row in zip(*texts, strict=True)]


def sampled(table: str) -> Case:
    """A table with the columns that it has today and some of its rows, spread by their hashes."""
    frame = pd.read_csv(MEASUREMENTS / table, dtype=str, keep_default_na=False)
    columns = list(frame.columns)
    keys = pd.Series(row_keys(frame, columns)).drop_duplicates().sort_values()
    chosen = keys.groupby(frame["source"]).head(ROWS)
    return {"table": table, "columns": columns, "rows": chosen.tolist()}


def tables() -> list[str]:
    """The measured tables that ``paleo validate`` reads."""
    from paleo.tables.run_tables import find_table_kind

    def read(path: Path) -> bool:
        try:
            find_table_kind(pd.read_csv(path, nrows=1).columns)
        except PaleoError:
            return False
        return True

    return [path.name for path in sorted(MEASUREMENTS.glob("*.csv*")) if read(path)]


#: Tables of which tests/measured/test_step_tables.py predicts every row: it compares their frozen errors, too.
WHOLE_TABLES = ("cnn_iterations.csv", "other_iterations.csv")


def error_figures(case: Case, whole: FileReport | None = None) -> Figures:
    """Errors by source over the rows of one table that the case names, of equal rows the first; they are predicted,
    or looked up in a report on the ``whole`` table."""
    frame = pd.read_csv(MEASUREMENTS / case["table"], dtype=str, keep_default_na=False)
    keys = pd.Series(row_keys(frame, case["columns"]))
    rows = keys.isin(case["rows"]).to_numpy() & ~keys.duplicated().to_numpy()
    report = whole if whole is not None else _report(case["table"], frame[rows])
    chosen = rows if whole is not None else np.ones(int(rows.sum()), dtype=bool)
    errors = {
        source: report.errors(chosen & (report.row_sources == source))
        for source in sorted(set(report.row_sources[chosen & report.predicted_row_mask]))
    }
    sources = {source: [each.rows, each.mape, each.bias, each.coverage] for source, each in errors.items()}
    unsupported = int((chosen & ~report.predicted_row_mask).sum())
    return {"rows": int(chosen.sum()), "unsupported": unsupported, "sources": sources}


def _report(table: str, rows: pd.DataFrame) -> FileReport:
    from paleo.tables.validation import validate_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / table.removesuffix(".gz")
        rows.to_csv(path, index=False)
        return validate_file(path)


#: What is frozen: the file's name, where its cases come from, and what is computed of each.
FILES: dict[str, tuple[Callable[[], list[Case]], Callable[[Case], Figures]]] = {
    "steps": (drawn, step_figures),
    "plans": (lambda: SEARCHES, plan_figures),
    "errors": (lambda: [sampled(table) for table in tables()], error_figures),
}


# files and differences


def load(name: str) -> list[tuple[Case, Figures]]:
    """The frozen cases of a file and their figures."""
    return [(entry["case"], entry["figures"]) for entry in json.loads((FOLDER / f"{name}.json").read_text())]


def write(name: str, entries: Sequence[tuple[Case, Figures]]) -> None:
    """One case a line, figures with twelve digits."""
    lines = [json.dumps({"case": case, "figures": rounded(figures)}) for case, figures in entries]
    (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def rounded(value: Any) -> Any:
    """Numbers with twelve digits, all the way down."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Mapping):
        return {key: rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def differences(before: Any, after: Any, name: str = "", whole: float = 0.0) -> Iterator[str]:
    """Every figure that moved, in words. ``whole`` is what a figure is part of: what is zero but for rounding has not
    moved."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in {**before, **after}:
            part_of = before.get("memory_total" if key.startswith("memory") else "step_time", 0.0)
            yield from differences(before.get(key), after.get(key), f"{name} {key}".strip(), part_of)
    elif isinstance(before, list) and isinstance(after, list | tuple) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{name}[{index}]")
    elif isinstance(before, float) and isinstance(after, float | int):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=ROUNDING * abs(whole)):
            change = f"{after / before - 1:+.3g}" if before else f"{after:g} more"
            yield f"{name}: {before:.9g} -> {after:.9g} ({change})"
    elif before != after:
        yield f"{name}: {before!r} -> {after!r}"


def label(case: Case) -> str:
    """A case in one line."""
    if "table" in case:
        return str(case["table"])
    options = " ".join(f"{key}={value}" for key, value in case["run"].items())
    return f"{case['model']} on {case['system']}: {options}"


def figures_or_error(figures: Callable[[Case], Figures], case: Case) -> Figures:
    """What is computed of a case, as it is stored; a case that is refused keeps its message."""
    try:
        stored: Figures = rounded(figures(case))
    except PaleoError as error:
        return {"error": str(error)}
    return stored


def moved_figures(name: str, case: Case, frozen: Figures) -> list[str]:
    """What differs between a frozen case and the same one predicted now."""
    return list(differences(frozen, figures_or_error(FILES[name][1], case)))


def freeze(name: str, *, draw: bool, dry: bool) -> int:
    """Compute one file anew, print what moved, write it; the number of cases that moved."""
    cases, figures = FILES[name]
    path = FOLDER / f"{name}.json"
    known = {label(case): (case, frozen) for case, frozen in load(name)} if path.exists() else {}
    draw = draw or not known
    entries, moved = [], 0
    for case in cases() if draw else [case for case, _ in known.values()]:
        after = figures_or_error(figures, case)
        entries.append((case, after))
        changes = list(differences(known[label(case)][1], after)) if label(case) in known else []
        moved += bool(changes)
        if changes:
            print(f"{name}: {label(case)}", *changes, sep="\n    ")
    print(f"{name}: {len(entries)} cases, {moved} moved")
    if not dry:
        write(name, entries)
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description="Freeze predictions again, and print which moved by how much.")
    parser.add_argument("files", nargs="*", metavar="file", help=f"of {', '.join(FILES)} (all)")
    parser.add_argument("--draw", action="store_true", help="choose the cases anew")
    parser.add_argument("--dry-run", action="store_true", help="print what would move, write nothing")
    options = parser.parse_args()
    for name in options.files or FILES:
        freeze(name, draw=options.draw, dry=options.dry_run)


if __name__ == "__main__":
    main()
