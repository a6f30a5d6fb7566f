"""Predicted against measured: points of measured tables for the page on errors, and a picture of them for README."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from paleo.report.plots import COLOUR_CYCLE, GREY, MARKERS, PLOT_STYLE

HERE = Path(__file__).resolve().parent
#: Most points of one source of a table, and sources of the picture that have a colour of their own.
MOST_POINTS, COLOURED = 40, 8
#: Tables of the picture, whose rows are whole training steps.
STEPS = ("llm_iterations", "other_iterations", "cnn_iterations")


def points(name: str, column: str, frame: pd.DataFrame) -> pd.DataFrame:
    """Return the predicted rows of a table, at most `MOST_POINTS` of each source, spread over its rows.

    Parameters
    ----------
    name : str
        The table.
    column : str
        Its measured column.
    frame : DataFrame
        Rows with ``predicted``, ``source`` and ``device`` (or ``system``).
    """
    measured = pd.to_numeric(frame[column], errors="coerce")
    known = frame[(measured > 0) & (pd.to_numeric(frame["predicted"], errors="coerce") > 0)]
    device = known.get("device", known.get("gpu", known.get("system")))
    rows = pd.DataFrame({
        "table": name,
        "source": known.get("source", pd.Series("", index=known.index)).fillna("").str.slice(0, 60),
        "device": "" if device is None else device.fillna(""),
        "column": column,
        "measured": pd.to_numeric(known[column]),
        "predicted": pd.to_numeric(known["predicted"]),
    })  # fmt: skip
    groups = [group.iloc[:: max(1, -(-len(group) // MOST_POINTS))] for _, group in rows.groupby("source", sort=False)]
    return pd.concat(groups) if groups else rows


def write(parts: Iterable[pd.DataFrame]) -> None:
    """Write parity.csv, which the page draws, and parity.svg."""
    rows = pd.concat(list(parts))
    rows.to_csv(HERE / "parity.csv", index=False, float_format="%.5g")
    picture(rows[rows["table"].isin(STEPS)]).savefig(HERE / "parity.svg", metadata={"Date": None})


def picture(rows: pd.DataFrame) -> Figure:
    """Draw whole training steps, predicted against measured, by source."""
    with matplotlib.rc_context(PLOT_STYLE):
        figure = Figure(figsize=(8.5, 5.2), layout="constrained")
        axes = figure.subplots()
        sources = rows["source"].value_counts().index
        for place, source in enumerate(reversed(sources)):
            rank = len(sources) - 1 - place
            chosen = rows[rows["source"] == source]
            error = (chosen["predicted"] / chosen["measured"] - 1).abs().mean()
            coloured = rank < COLOURED
            label = f"{source} ({100 * error:.0f} %)" if coloured else None
            axes.plot(
                chosen["measured"], chosen["predicted"], MARKERS[rank % len(MARKERS)], markersize=4, alpha=0.7,
                color=COLOUR_CYCLE[rank] if coloured else GREY, markeredgewidth=0, label=label,
            )  # fmt: skip
        ends = [rows[["measured", "predicted"]].min().min(), rows[["measured", "predicted"]].max().max()]
        axes.plot(ends, ends, "--", color=GREY, linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel="measured step time [ms]", ylabel="predicted step time [ms]")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())
        handles, labels = axes.get_legend_handles_labels()
        title = "source (mean error); others grey"
        axes.legend(handles[::-1], labels[::-1], title=title, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    return figure


if __name__ == "__main__":
    write(
        points(Path(file).stem.removeprefix("points_"), column, pd.read_csv(file, low_memory=False))
        for file, column in (argument.split(":") for argument in sys.argv[1:])
    )
