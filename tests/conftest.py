"""What all tests share: quick, repeatable hypothesis runs, and the measured tables beside the checkout, where they
are."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from paleo.cli.process import GC_THRESHOLD
from paleo.tables.validation import FileReport, validate_file

settings.register_profile("paleo", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("paleo")
#: Objects made between collections of garbage: as for commands. At Python's 700 collections take a sixth of the suite.
gc.set_threshold(GC_THRESHOLD, 50, 100)

#: Tables are as wide as in a pipe, whatever the width of the terminal that a test worker was told of.
os.environ.pop("COLUMNS", None)

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of measured tables and hardware facts; tests that ask for it are skipped by name without it."""
    if not (SHARED / "measurements").is_dir():
        pytest.skip(f"{SHARED} is not here")
    return SHARED


@pytest.fixture(scope="session")
def validated(shared: Path) -> Callable[[str], FileReport]:
    """Predictions of all rows of a measured table, made once for all tests of a worker; tests of one table form a
    `group`."""
    return cache(lambda table: validate_file(shared / "measurements" / table))


#: Files whose tests share a fit, a table or a study that takes seconds: one worker runs them all, so that it is made
#: once.
TOGETHER = {
    "test_compression_rows",
    "test_consistency_rows",
    "test_contributing",
    "test_explorer",
    "test_fit_links",
    "test_fit_software",
    "test_flop_counter_language",
    "test_placement_rows",
    "test_report_page",
    "test_search",
    "test_step_tables",
}
#: Files whose tests share what the first of their parameters names, up to a dash: a measured table, a network.
BY_PARAMETER = {"test_kernel_tables", "test_predictions"}


#: Files of slow tests, and slow tests of other files: `make test-all` runs them, `make test` leaves them out.
SLOW_FILES = {
    "test_bounded_search",
    "test_compression_rows",
    "test_contributing",
    "test_docs",
    "test_explorer",
    "test_fit_links",
    "test_fit_software",
    "test_flop_counter_language",
    "test_flop_counter_vision",
    "test_imported_configurations",
    "test_imported_modules",
    "test_inputs",
    "test_mutations",
    "test_notebooks",
    "test_one_new_file",
    "test_packaging",
    "test_placement_rows",
    "test_replay_errors",
    "test_step_tables",
    "test_stories",
}
SLOW_TESTS = {
    "test_a_cluster_makes_the_same_table_though_a_worker_dies",
    "test_a_cold_worker_of_eight_threads_loses_no_row",
    "test_a_fit_writes_a_calibration_that_predicts_its_table",
    "test_a_handful_of_rows_is_fitted_whole_and_says_so",
    "test_a_search_asks_for_the_same_step",
    "test_a_scheduler_that_dies_is_one_sentence_and_the_parts_are_kept",
    "test_arrays_equal_single_predictions",
    "test_commands_under_a_comparison_of_plans_show_the_same_steps",
    "test_every_strategy_and_every_network_is_among_the_cases",
    "test_eight_cold_threads_predict_the_same",
    "test_every_spoilt_cell_of_more_rows",
    "test_explanation_names_the_next_and_the_interval",
    "test_fewest_gpus_and_least_cost_over_several_counts",
    "test_fits_are_deterministic",
    "test_fits_of_tables_with_a_spoilt_cell",
    "test_finished_fits_are_kept_when_a_later_one_is_stopped",
    "test_injected_faults_are_named",
    "test_lower_bound_on_any_two_level_network",
    "test_measured_watts_of_training_steps",
    "test_memory_of_the_search_is_small",
    "test_no_strategy_that_fits_beats_the_first_plan",
    "test_other_families_of_a_file_are_kept",
    "test_other_families_are_built_by_the_library_and_traced",
    "test_pipelines_with_sharded_parameters_are_searched_where_they_are_stated",
    "test_plans_have_not_moved",
    "test_processes_make_the_same_bytes",
    "test_rows_that_validate_leaves_out_are_left_out_of_a_fit",
    "test_shipped_calibrations_are_those_that_the_tables_give",
    "test_sparse_sums_on_index_sets",
    "test_the_cheapest_that_is_in_time_comes_first",
    "test_the_first_plan_leaves_room_whether_or_not_a_training_is_priced",
    "test_the_site_is_built_without_a_warning",
    "test_the_whole_path_on_a_cpu",
    "test_many_plans_are_read_back",
    "test_where_nothing_is_in_time_a_larger_count_is_named",
}
#: Tests with many cases: `make test` runs every nth of them, the rest are slow; odd steps reach each value of each
#: parameter.
EVERY_NTH = {
    "test_a_repeat_counts_as_much_as_its_copies": 4,
    "test_a_spoilt_cell_leaves_out_its_row_alone": 3,
    "test_a_schedule_without_closed_forms_behaves_as_with_them": 3,
    "test_every_schedule_holds_for_every_family": 5,
    "test_faster_hardware_never_slows_a_step": 5,
    "test_first_questions_fit_where_states_do": 3,
    "test_no_contention_makes_a_step_longer_than_taking_turns": 3,
    "test_no_price_is_below_the_bound_that_is_stated": 5,
    "test_settings_are_read_back_as_the_plan": 3,
    "test_steps_have_not_moved": 3,
    "test_the_launch_line_of_every_network_is_read_with_the_formats_of_the_plan": 5,
    "test_the_parts_of_a_step_are_the_step": 2,
    "test_work_is_linear_in_the_batch_and_parameters_are_not": 3,
}


def group(nodeid: str) -> str:
    """What one worker runs with a test: its file, its file and parameter, or nothing but itself.

    >>> group("tests/unit/test_fit_links.py::test_a_fit"), group("tests/unit/test_units.py::test_bytes[1]")
    ('test_fit_links', 'tests/unit/test_units.py::test_bytes[1]')
    """
    path, _, name = nodeid.partition("::")
    file = Path(path).stem
    if file in BY_PARAMETER:
        return file + name.partition("[")[2].partition("-")[0]
    return file if file in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each `group` to one worker. The groups of xdist itself do nothing under pytest 9.2, whose tests keep their
    names."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests; skip tests marked ``shared``, each by its name, where the folder is absent."""
    seen: Counter[str] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        if item.path.stem in SLOW_FILES or name in SLOW_TESTS or seen[name] % EVERY_NTH.get(name, 1):
            item.add_marker(pytest.mark.slow)
        seen[name] += 1
    if not SHARED.is_dir():
        for item in items:
            if item.get_closest_marker("shared"):
                item.add_marker(pytest.mark.skip(reason="needs ../shared"))
