"""What the adapter pool and its CPU cache promise, sentence by sentence, and the tests that hold
them to it. ``TestPoolMachine`` and ``TestInstance`` hold every sentence about slots and the tier at
once: a brute-force pool, which shares no code with the product, foretells each decision.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

POOL: dict[str, tuple[str, ...]] = {
    "A request takes its adapter's slot at its first admit and holds it until it is removed.": (
        "TestPoolMachine",
        "test_ingest_and_remove_are_idempotent_and_leave_nothing",
        "test_a_preempted_row_keeps_its_slot_and_enters_again_at_its_arrival_place",
    ),
    "A slot nobody holds keeps its weights as a cache until the least recently used goes.": (
        "TestSlotTable",
        "test_rollback_keeps_an_installed_adapter_resident_and_unheld",
    ),
    "Least recently used goes by a clock that admits move, never by a wall clock.": (
        "test_victims_follow_the_clock_of_admits_and_no_other",
        "TestSlotTable",
    ),
    "When all rows hold slots an admit takes no lock and no collective.": (
        "test_a_step_of_base_rows_and_seated_rows_takes_no_lock_and_no_agreement",
        "test_all_misses_of_a_step_take_one_agreement_and_seated_rows_none",
    ),
    "Rows whose adapter is resident take its slot before any victim is picked.": (
        "test_resident_rows_take_their_slots_before_any_victim_is_picked",
    ),
    "All misses of a step go through one agreement.": (
        "test_all_misses_of_a_step_take_one_agreement_and_seated_rows_none",
    ),
    "Rows of adapters that failed anywhere fail before any slot is handed out.": (
        "test_failed_rows_before_and_after_a_counted_row_leave_it_the_one_free_slot",
        "test_a_read_that_failed_on_one_rank_fails_its_rows_on_all_and_takes_no_slot",
    ),
    "A failed row is dead on every rank until its remove, and names rank and cause.": (
        "test_a_row_failed_by_an_agreement_stays_dead_though_its_adapter_comes_in_later",
        "test_a_failed_row_names_the_rank_that_failed_and_its_cause",
    ),
    "A step is refused only when more misses survive than there are victims.": (
        "test_more_survivors_than_victims_refuse_the_step_and_rollback_gives_everything_back",
        "test_failed_rows_before_and_after_a_counted_row_leave_it_the_one_free_slot",
    ),
    "A second agreement follows exactly when some rank still read a survivor.": (
        "test_a_copy_still_being_read_is_waited_for_and_agreed_on_once_more",
        "TestPoolMachine",
    ),
    "Each rank waits for its copy outside the lock, and no landing needs its main thread.": (
        "test_a_landing_while_the_main_thread_sits_in_the_fence_ends_the_admit_that_waits_for_it",
    ),
    "What fails at the second agreement leaves its victim resident; no survivor's slot moves.": (
        "test_a_read_that_fails_while_waited_for_leaves_its_victim_resident_and_no_slot_moves",
        "test_failures_at_the_second_agreement_hand_their_victims_to_nobody",
    ),
    "Ranks in different admits, or with other weights, are caught in the agreement.": (
        "test_ranks_in_admits_of_different_steps_stop",
        "test_ranks_that_miss_different_adapters_stop",
        "test_other_weights_on_one_of_four_ranks_fail_that_adapters_rows_alone",
    ),
    "Targets an adapter lacks are zeros after its install: nothing of the evicted one is left.": (
        "test_an_evicted_adapter_leaves_nothing_behind",
    ),
    "A rollback gives back what the admit took; a loaded adapter stays resident, unheld.": (
        "test_rollback_keeps_an_installed_adapter_resident_and_unheld",
        "test_more_survivors_than_victims_refuse_the_step_and_rollback_gives_everything_back",
    ),
    "Reservations count distinct adapters and outlive the holder they leaned on.": (
        "test_reservations_count_distinct_adapters_and_outlive_the_holder_they_leaned_on",
        "TestPoolMachine",
    ),
    "A reservation wants the copy in on every rank, resident or not, and pins no slot.": (
        "test_a_request_on_a_resident_adapter_without_a_host_copy_waits_for_it_while_a_miss_goes_"
        "ahead",
    ),
    "A failed re-read of a resident adapter may run on its slot, unless a miss evicts it first.": (
        "test_a_failed_read_of_a_resident_adapter_may_still_run_on_its_slot",
        "test_a_failed_reread_of_a_resident_adapter_fails_its_row_once_a_miss_has_evicted_it",
    ),
    "A failed copy is dropped on every rank in order; the next ingest holds and reads anew.": (
        "test_a_failed_copy_is_dropped_everywhere_and_a_later_request_reads_it_anew",
        "test_a_failure_on_a_follower_alone_takes_a_second_ingest_before_the_admit_with_it",
        "test_a_failure_on_a_follower_alone_ends_every_request_ingested_before_it_is_ordered",
    ),
    "A report or a copy for a hold that no longer stands is ignored.": (
        "test_a_stale_report_after_a_drop_and_a_new_hold_is_ignored",
        "test_a_stale_report_after_a_drop_and_a_new_hold_admits_nobody",
        "test_a_read_that_lands_for_a_hold_that_no_longer_stands_is_kept_nowhere",
    ),
    "A body that came before its order may start a read and nothing else.": (
        "test_bodies_that_come_before_their_order_start_a_read_and_nothing_else",
        "test_an_early_read_is_adopted_by_its_hold_and_reported_only_then",
    ),
    "A load is checked on a thread of its own and keeps no copy.": (
        "test_a_load_is_checked_on_a_thread_of_its_own_and_keeps_no_copy",
        "test_checks_that_hang_keep_no_read_waiting",
    ),
    "A name is served from its commit on; an aborted load leaves nothing.": (
        "test_a_served_name_is_refused_a_second_load_and_may_be_loaded_again_after_its_unload",
        "test_an_aborted_load_leaves_nothing",
    ),
    "An unload lets live requests finish, and makes no slot a likelier victim.": (
        "test_an_unload_under_live_requests_waits_for_them_and_makes_no_slot_likelier_a_victim",
        "test_unloading_two_hundred_adapters_leaves_what_one_leaves",
    ),
    "A name loaded anew never serves the old weights.": (
        "test_adapters_loaded_under_one_name_never_serve_each_others_weights",
    ),
    "A delta wants a plan of its own step and thread; base_only adds nothing.": (
        "test_a_delta_without_a_plan_refuses",
        "test_a_delta_on_a_thread_that_did_not_plan_refuses",
        "test_base_only_adds_nothing_and_gives_the_plan_back",
    ),
}

STORE: dict[str, tuple[str, ...]] = {
    "A copy is laid out like a slot: ranks padded with zeros, scaling folded in before one cast.": (
        "test_ranks_are_padded_with_zeros_to_the_slots_rank",
        "test_scaling_is_folded_into_b_before_the_one_cast",
    ),
    "A rank keeps its own slices only.": (
        "test_shards_reassemble_to_the_adapter_also_where_kv_heads_are_replicated",
    ),
    "A copy is never written once it is put.": (
        "test_host_copies_are_the_same_after_many_installs",
        "test_installs_copy_and_never_change_the_host_copy",
    ),
    "A hold drops the least recent that is not kept, and is FULL when nothing may go.": (
        "test_holding_past_the_capacity_is_full_when_all_are_kept",
        "test_several_small_adapters_are_dropped_for_one_large_one",
    ),
    "What is held follows from the ordered calls alone, and is never more than the capacity.": (
        "TestTierMembership",
        "TestPoolMachine",
        "TestInstance",
    ),
    "Kept is the longest prefix of live requests' adapters that fits together.": (
        "test_a_younger_request_never_keeps_an_older_ones_adapter_out",
        "test_what_does_not_fit_ends_the_kept_prefix_also_for_smaller_ones_behind_it",
        "test_requests_past_the_kept_prefix_wait_and_are_read_when_a_remove_lets_them_in",
        "test_a_row_whose_copy_left_the_kept_prefix_is_not_in_until_it_is_read_again",
    ),
    "A burst on a thousand adapters stays within the bound, and every request gets there.": (
        "test_a_thousand_queued_requests_on_a_thousand_adapters_stay_within_the_bound",
        "test_a_burst_on_a_thousand_adapters_stays_within_the_bound_and_every_request_gets_there",
    ),
    "Reads in flight, and copies an install still uses, count.": (
        "test_a_read_in_flight_for_a_dropped_hold_counts_until_it_ends",
        "test_a_copy_an_install_still_uses_counts_after_its_drop",
        "test_an_early_read_counts_and_goes_first_when_a_hold_needs_its_room",
    ),
    "put keeps a copy only while its hold stands.": (
        "test_a_read_that_lands_for_a_hold_that_no_longer_stands_is_kept_nowhere",
        "test_a_read_past_its_deadline_is_a_failure_and_its_late_copy_is_thrown_away",
    ),
    "A digest is the same on every rank; weights that hash otherwise than pinned are refused.": (
        "test_the_digest_is_the_same_on_every_rank_of_every_tp",
        "test_weights_that_hash_otherwise_than_pinned_are_refused",
    ),
    "From the start the first configured adapters are held, in config order.": (
        "test_after_start_the_first_configured_adapters_are_held_in_order",
    ),
    "A bad configured adapter stops the start, preloaded or not.": (
        "test_a_bad_configured_adapter_stops_the_start_and_all_are_named",
    ),
}


@pytest.fixture(scope="module")
def names() -> set[str]:
    """Every test function and machine under ``tests``."""
    found: set[str] = set()
    for file in Path(__file__).parents[1].rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("promises", [POOL, STORE], ids=["pool", "store"])
def test_every_promise_has_a_test(promises: dict[str, tuple[str, ...]], names: set[str]) -> None:
    missing = {test for tests in promises.values() for test in tests} - names
    assert not missing
    assert all(tests for tests in promises.values())
