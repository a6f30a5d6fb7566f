"""``paleo estimate``: one configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from paleo.cli.application import NO, PREDICT, app
from paleo.cli.goal_options import Loss, NoiseScale, Target
from paleo.cli.long_run_options import (
    Checkpoint,
    Checkpointing,
    Failures,
    Restart,
    Spares,
    Storage,
    WithFailures,
)
from paleo.cli.options import AsJson, ModelName, Plot, RunOptions, SystemName, takes_run
from paleo.cli.output import draw, picture_path, show_document, warn
from paleo.cli.training_options import Epochs, Samples, TariffOptions, Tokens, takes_tariff

Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Sections and streams, too.")]


@app.command(rich_help_panel=PREDICT)
@takes_run
@takes_tariff
def estimate(
    model: ModelName,
    system: SystemName,
    options: RunOptions,
    rates: TariffOptions,
    epochs: Epochs = None,
    samples: Samples = None,
    tokens: Tokens = None,
    loss: Loss = None,
    target: Target = None,
    noise_scale: NoiseScale = None,
    goodput: WithFailures = False,
    failures: Failures = None,
    checkpoint: Checkpoint = None,
    checkpointing: Checkpointing = None,
    storage: Storage = None,
    restart: Restart = None,
    spares: Spares = None,
    as_json: AsJson = False,
    plot: Plot = None,
    verbose: Verbose = False,
) -> None:
    """One configuration: step time with its parts, memory, throughput; time, rent and energy of a training."""
    from paleo.predict import predict
    from paleo.report import documents, tables
    from paleo.report.blocks import Blocks
    from paleo.report.target import goodput_below, with_goodput
    from paleo.specs.hardware import load_system
    from paleo.specs.model import load_model
    from paleo.studies.advice import advise
    from paleo.studies.learning import Goal, amount_for
    from paleo.studies.long_run import LongRunOptions, failing
    from paleo.studies.training import amount, training

    path = picture_path(plot)
    network = load_model(model)
    step = predict(network, load_system(system), options.run())
    tokens_per_sample = step.graph.tokens_per_sample
    wanted = amount(network, epochs=epochs, samples=samples, tokens=tokens, tokens_per_sample=tokens_per_sample)
    goal = Goal(loss, target, noise_scale)
    wanted, notes = amount_for(step, goal, wanted)
    cost = None if wanted is None else training(step, wanted, rates.tariff())
    long = LongRunOptions(failures, checkpoint, checkpointing, storage, None, restart, spares)
    with_failures = failing(step, cost, long) if goodput or long != LongRunOptions() else None
    if path is not None:
        from paleo.report import plots

        draw(path, lambda: plots.estimate(step))
    changes, blocks = advise(step), Blocks(step)
    show_document(
        lambda: {**with_goodput(documents.estimate(step, cost, changes), with_failures), **blocks.documents()},
        lambda: blocks.below(goodput_below(tables.estimate(step, cost, changes, verbose=verbose), with_failures)),
        as_json,
    )
    warn((*(step.warnings if as_json else ()), *notes))
    if not step.memory.fits:
        raise typer.Exit(NO)
