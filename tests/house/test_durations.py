"""No test takes over 20 s, except those named here; tests/support/durations.py records the durations."""

from __future__ import annotations

import json

from tests.support import ROOT
from tests.support.durations import DURATIONS

LONG = {
    "tests/docs/test_debian.py::test_its_units_under_a_real_pid_1",
    "tests/docs/test_debian.py::test_installed_used_and_purged",
    "tests/docs/test_package.py::test_the_rest_works_without_pyfuse3",
    "tests/docs/test_typed.py::test_guides",
    "tests/docs/test_typed.py::test_page[05-spark]",
    "tests/http/test_durable_streams.py::test_its_own_tests",  # they wait for streams to expire
    "tests/interop/test_v9fs.py::test_v9fs",
    "tests/replica/test_copies.py::test_kills_and_takeovers_lose_nothing[faulty s3]",
    "tests/replica/test_faults.py::test_nothing_answered_is_lost_whatever_fails",
    "tests/replica/test_guide.py::test_three_machines",
    "tests/replica/test_power.py::test_a_power_cut_of_all_three_engines_loses_nothing_answered",
    "tests/ring/memory/test_sanitizers.py::test_under_sanitizers",
    "tests/server/test_full_disk.py::test_a_full_disk_refuses_who_publishes_through_a_ring_and_loses_nothing",
    "tests/server/test_standstills.py::test_others_are_served_between_portions[over_many_streams]",
    "tests/server/test_starvation.py::test_round_trips_go_on_beside_a_greedy_user[everything]",
    "tests/server/test_walk.py::test_no_request_holds_up_the_others",
    "tests/spark/test_archive.py::test_there_and_back",  # starts the Java
    "tests/spark/test_commands.py::test_a_command_says_how_far_it_is_and_ctrl_c_ends_it",
    "tests/spark/test_commands.py::test_a_task_that_fails_is_one_line_too",
    "tests/spark/test_connect.py::test_the_package_comes_from_the_client",
    "tests/spark/test_kills.py::test_kills",
    "tests/spark/test_two_drivers.py::test_two_drivers_with_one_checkpoint",
    "tests/spark_cluster/test_cluster.py::test_both_workers_read_what_only_the_driver_has",  # starts the cluster
    "tests/spark_cluster/test_programs.py::test_a_zip_that_goes_along",
    "tests/spark_cluster/test_programs.py::test_an_environment_that_goes_along",
    "tests/spark_cluster/test_programs.py::test_archive_and_verify",
}


def test_what_was_measured_is_there_and_short() -> None:
    found: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text())
    for name in [*found["groups"], *found["tests"]]:
        path = name.partition("::")[0]
        assert (ROOT / path).exists() or (ROOT / "tests" / path).is_dir(), f"{name} is gone: take it out of {DURATIONS}"
    assert found["tests"].keys() <= LONG, f"too long: {found['tests'].keys() - LONG}"
