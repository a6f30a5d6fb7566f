"""Launch settings are the plan: what is written is read back as the same plan, field by field, for every launcher."""

from __future__ import annotations

import os
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from paleo.launch._base import LAUNCHERS, JobPlan, LaunchError, normalise_plan
from paleo.launch.jobs import launch_file_texts, read_launch_files
from paleo.network.graph import build_graph
from paleo.parallel.framework_checks import network_quantities
from paleo.specs.framework_capabilities import load_framework
from paleo.specs.model import load_model

QUICK, ALL = 30, 2000 if os.environ.get("PALEO_ALL_CASES") else 200
NETWORKS = ("llama3-8b", "llama2-70b", "mixtral-8x7b", "gpt3-175b", "qwen3-30b-a3b")


def powers(rng: random.Random, most: int) -> int:
    return 2 ** rng.randint(0, most)


def random_job(rng: random.Random, launcher: str) -> JobPlan | None:
    """A plan that the framework runs and its settings hold; None where a draw is none."""
    table = LAUNCHERS[launcher]
    framework, name = load_framework(table.framework), rng.choice(NETWORKS)
    graph = GRAPHS[name]
    facts, params = network_quantities(graph), graph.hyperparameters
    tp, cp, pp, vp = powers(rng, 3), rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
    ep = rng.choice((1, 2, 4, 8)) if facts["experts"] else 1
    dp, microbatch, passes = ep * powers(rng, 4), powers(rng, 2), powers(rng, 5)
    schedule = rng.choice((*framework.schedules.values, "1f1b"))
    vp = 2 if schedule in ("zb-v", "dualpipev") else vp
    job = JobPlan(
        model=name,
        seq=rng.choice((2048, 4096, 8192)),
        gpus=dp * tp * cp * pp,
        tp=tp,
        sp=rng.random() < 0.7,
        cp=cp,
        ulysses=rng.random() < 0.3,
        ep=ep,
        etp=rng.choice((0, 1, tp)),
        pp=pp,
        vp=vp,
        shard=rng.choice((1, 1, 1, 8)),
        zero=rng.choice(framework.zero.values),
        schedule=schedule,
        microbatch=microbatch,
        global_batch=microbatch * passes * dp,
        recompute=rng.choice(framework.recompute.values),
        dtype=rng.choice(framework.dtypes.values),
        recompute_layers=rng.choice((None, None, 3)),
        recompute_every=rng.choice((None, None, 2)),
        recompute_modules=rng.choice(((), ("core_attn",), ("layernorm", "moe_act"))),
        scaling=rng.choice((None, None, "delayed", "current", "mxfp8")),
        optimizer=rng.choice(framework.optimizers.values),
        offload=rng.choice(
            (
                (),
                (),
                ("optimizer",),
                ("gradients", "optimizer"),
                ("gradients", "optimizer", "parameters"),
                ("activations",),
            )
        ),
        overlapped=rng.random() < 0.7,
        lora=rng.choice((None, None, "16:all", "8:attention")),
        qlora=rng.random() < 0.2,
        expert_dispatch=rng.choice((None, None, "deepep", "nccl")) if facts["experts"] else None,
        shared_expert_overlap=rng.choice((None, True)),
        main_gradients=rng.choice((None, None, "narrow")),
        layers=facts["layers"],
        experts=facts["experts"],
        node=8,
        sizes=params,
    )
    if pp > 1 and vp > 1 and rng.random() < 0.3:
        even, pieces = facts["layers"] // (pp * vp), pp * vp
        job = replace(job, cut=tuple([even] * (pieces - 1) + [facts["layers"] - even * (pieces - 1)]))
    job = normalise_plan(
        replace(
            job, **{field: getattr(JobPlan(), field) for field in compared(job) if field not in table.translated_fields}
        )
    )
    if job.dp % ep or job.dp < 1:
        return None
    known = quantities_of(job, facts)
    return None if any(bool(refusal.condition.holds(known)) for refusal in framework.restrictions) else job


def compared(job: JobPlan) -> dict[str, object]:
    """The fields that make two plans equal."""
    return {entry.name: getattr(job, entry.name) for entry in fields(job) if entry.compare}


def quantities_of(job: JobPlan, facts: dict[str, int]) -> dict[str, object]:
    offloaded = {
        f"offload_{part}": int(part in job.offload) for part in ("optimizer", "gradients", "parameters", "activations")
    }
    return {
        **facts,
        **offloaded,
        "gpus": job.gpus,
        "dp": job.dp,
        "shard": job.shard,
        "tp": job.tp,
        "sp": int(job.sp),
        "cp": job.cp,
        "ulysses": int(job.ulysses),
        "ep": job.ep,
        "etp": job.etp,
        "pp": job.pp,
        "vp": job.vp,
        "zero": job.zero,
        "seq": job.seq,
        "schedule": job.schedule,
        "cut": int(job.cut is not None),
        "microbatch": job.microbatch,
        "microbatches": job.microbatches,
        "global_batch": job.global_batch,
        "overlapped": int(job.overlapped),
        "recompute": job.recompute,
        "partial": int(job.recompute_layers is not None),
        "dtype": job.dtype,
        "scaling": job.scaling or "none",
        "optimizer": job.optimizer,
        "architecture": "Blackwell",
    }


GRAPHS = {name: build_graph(load_model(name), batch=1) for name in NETWORKS}


def round_trips(name: str, count: int, folder: Path) -> tuple[int, int]:
    """Plans that were written and read back, and how many were asked for that no setting holds."""
    rng, launcher = random.Random(name), LAUNCHERS[name]
    written = impossible = 0
    while written < count:
        job = random_job(rng, name)
        if job is None:
            continue
        path = folder / f"job{launcher.suffixes[0]}"
        try:
            files = launch_file_texts(launcher, job, str(path))
        except LaunchError:
            impossible += 1
            assert impossible < 20 * count, f"{name} writes hardly any plan"
            continue
        for file, text in files.items():
            Path(file).write_text(text)
        read = read_launch_files(list(files), None if launcher.name != "trainer" else job.gpus)
        assert read.launcher == name
        changed = {
            key: (value, compared(read.plan)[key])
            for key, value in compared(job).items()
            if value != compared(read.plan)[key]
        }
        assert changed == {}, (changed, *files.values())
        assert read.unread_keys == (), read.unread_keys
        written += 1
    return written, impossible


@pytest.mark.slow
@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_settings_are_read_back_as_the_plan(name: str, tmp_path: Path) -> None:
    assert round_trips(name, QUICK, tmp_path)[0] == QUICK


@pytest.mark.parametrize("name", list(LAUNCHERS))
def test_many_plans_are_read_back(name: str, tmp_path: Path) -> None:
    assert round_trips(name, ALL, tmp_path)[0] == ALL


def test_a_plan_without_settings_is_an_error_and_no_other_plan() -> None:
    plan = normalise_plan(JobPlan("llama3-8b", 8192, 8, microbatch=1, global_batch=8, zero=1, layers=32))
    with pytest.raises(LaunchError, match=r"zero=1 as|would read"):
        LAUNCHERS["torchtitan"].settings_of_plan(plan)
