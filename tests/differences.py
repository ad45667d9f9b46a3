"""Where other allocators than jemalloc 5.3 differ, and why: these tests must fail with them."""

from __future__ import annotations

from typing import NamedTuple


class Difference(NamedTuple):
    """Why tests fail, and what they must say when they do."""

    reason: str
    says: str  #: a regular expression
    tests: tuple[str, ...]  #: a name without parameters stands for the test with any
    always: bool = True  #: or only with some addresses, or orders of threads


# Kinds of the conformance suite.
GROWING = "anonymous", "memfd", "directory", "directory on tmpfs"
SHARED = "file", "file on tmpfs", "fixed, shared"
FIXED = (*SHARED, "fixed")
HUGE = "memfd of huge pages"
WITHOUT_LIBJEMALLOC = Difference(
    "needs no libjemalloc, which doctor would load",
    "should be reported as working|does not work",
    ("test_doctor.py::test_all_is_well", "test_doctor.py::test_without_room_for_the_library"),
)
TELLS_NOTHING = Difference(
    "tells nothing of free pages that it keeps",
    "otherwise they are kept for a while",
    ("test_arena.py::test_decay[None]", "test_arena.py::test_decay[1000]"),
)
RECORDS = Difference(
    "keeps records in the memory, which a peer here overwrites, or takes up all memory before it uses any again",
    "ended with -11|many blocks lie where others did",
    (
        "test_conformance.py::test_zeroes_where_others_wrote",
        "test_conformance.py::test_zeroes_with_all_memory_locked",
    ),
)
RECORDS_ON_A_DEVICE = Difference(
    "keeps records in the memory, and says so",
    "keeps records in the memory that it hands out",
    ("test_providers.py::test_memory_the_host_cannot_touch",),
)

REFUSES_ZERO = Difference(
    "with opt.zero, clears memory behind the hooks' back",
    "with opt.zero clears memory behind the hooks' back",
    (
        "test_blocks.py::test_zeroes_on_any_alignment[zero:true]",
        "test_blocks.py::test_zeroes_on_any_alignment[retain:false,zero:true]",
    ),
)
CLEARS_ITSELF = Difference(
    "jemhooks clears blocks itself, so that old bytes harm nobody; and has no threshold for large blocks",
    "not noticed",
    tuple(
        f"test_contract.py::test_fault_is_noticed[{fault}]"
        for fault in (
            "commit_keeps_stale-contract-true",
            "commit_keeps_stale-fixed-false",
            "give_back_trusted-contract-true",
            "mark_skipped-windows-true",
            "mark_skipped-storm-true",
            "oversize_default-contract-true",
        )
    ),
)

EXPECTED = {
    **dict.fromkeys(("jemalloc 5.0", "jemalloc 5.1", "jemalloc 5.2"), (REFUSES_ZERO, CLEARS_ITSELF)),
    "jemalloc 4": (
        REFUSES_ZERO,
        CLEARS_ITSELF,
        RECORDS_ON_A_DEVICE,
        RECORDS_ON_A_DEVICE._replace(
            tests=(
                "test_contract.py::test_fixed_ranges",
                "test_contract.py::test_own_providers",
                "test_contract.py::test_lookup",
            )
        ),
        Difference(
            "has chunk hooks, without this rule or without need of it; test_jemalloc_4 is about theirs",
            "not noticed|noticed for another reason",
            tuple(
                f"test_contract.py::test_fault_is_noticed[{fault}]"
                for fault in (
                    "dalloc_accepts-contract-true",
                    "dalloc_accepts-contract-false",
                    "commit_answered-contract-true",
                    "commit_fails-contract-true",
                    "split_refused-contract-false",
                    "purge_allowed-windows-true",
                    "growth_unlimited-contract-true",
                    "metadata_inside-contract-true",
                    "touch-fixed-true",
                    "unseeded-full-true",
                    "fork_in_growth-forking-false",
                )
            ),
        ),
        Difference(
            "has chunk hooks, which come to this less often; test_jemalloc_4 is about them",
            "not noticed|noticed for another reason",
            tuple(
                f"test_contract.py::test_fault_is_noticed[{fault}]"
                for fault in (
                    "decommit_refused-contract-true",
                    "decommit_refused-contract-false",
                    "merge_across-contract-false",
                )
            ),
            always=False,
        ),
        Difference(
            "keeps an empty chunk until another is, with its records, so that its region is idle later",
            "the region that became idle last was evicted first|left behind: 0 descriptors, 16384 bytes",
            ("test_contract.py::test_budgets", "test_examples.py::test_shared_kv"),
        ),
        Difference(
            "has no opt.retain",
            "Invalid conf pair: retain:false",
            ("test_blocks.py::test_zeroes_on_any_alignment[retain:false]",),
        ),
        Difference(
            "takes chunks of 2 MiB, on multiples of it, and none at the very start of another arena's block",
            "takes 2097152 bytes at a time|no room for|no memory for",
            (
                "test_conformance.py::test_an_arena_in_a_block",
                "test_conformance.py::test_shared_ranges_in_any_order",
                "test_errors.py::test_block_larger_than_its_provider",
                "test_ipc_refused.py::test_what_cannot_be_exported",
                "test_providers.py::test_fixed_memory_smaller_than_what_the_allocator_takes_at_a_time",
                "test_providers.py::test_fixed_old_bytes_are_cleared_unless_said_to_be_zero",
                "test_providers.py::test_nested",
                "test_providers.py::test_nested_three_deep",
                "test_providers.py::test_overlapping_ranges",
                "test_providers.py::test_several_ranges_are_a_region_each",
                "test_providers.py::test_several_ranges_of_which_one_is_wrong",
            ),
        ),
        Difference(
            "keeps 13 pages of records in each 2 MiB, so that beside them is room for one block of 1 MiB",
            "usable for blocks of",
            tuple(f"test_conformance.py::test_small_memory_can_be_used_to_the_end[{kind}]" for kind in (*FIXED, HUGE)),
        ),
        Difference(
            "has for that reason one block of 1 MiB in each 2 MiB",
            "mapped=132120576",
            ("test_full.py::test_full_as_it_grows", "test_full.py::test_filled_by_others_in_mid_life"),
            always=False,
        ),
        Difference(
            "needs no room for thread-local storage",
            "restart|should have a value for|the script ended with 1|LoadError|does not work",
            (
                "test_doctor.py::test_without_room_for_the_library",
                "test_loading.py::test_load_error_names_three_remedies_with_exact_values",
                "test_loading.py::test_each_named_remedy_works",
                "test_loading.py::test_load_fails_again_the_same_way",
                "test_run.py::test_bootstrap_restarts_once",
                "test_run.py::test_bootstrap_that_does_not_help_raises",
                "test_run.py::test_bootstrap_refuses",
                "test_run.py::test_bootstrap_refuses_a_program_on_standard_input",
                "test_run.py::test_bootstrap_refuses_interactively",
            ),
        ),
    ),
    "jemalloc 4.1": (
        Difference(
            "keeps its records of large blocks in small ones of the same arena",
            "and one region",
            ("test_arena.py::test_large_frees_stay",),
        ),
        Difference(
            "keeps its records of large blocks in small ones, which a peer here overwrites",
            "exit status -11",
            (
                "test_contract.py::test_storm",
                "test_contract.py::test_storm_under_a_small_budget",
                "test_contract.py::test_storm_with_pauses",
            ),
        ),
        Difference(
            "crashes in the storm without any fault",
            "noticed for another reason",
            tuple(
                f"test_contract.py::test_fault_is_noticed[{fault}]"
                for fault in ("mark_skipped-storm-true", "decommit_drops-storm-true")
            ),
            always=False,
        ),
        Difference(
            "never gives up its last chunk, with its records",
            "some kind of event did not come|the memory must be free again",
            ("test_events.py::test_a_life_in_order", "test_ipc_ends.py::test_the_importer_is_killed"),
        ),
        Difference(
            "cannot reset an arena, so that none is used again",
            "kB leaked",
            ("test_lifetimes.py::test_nothing_is_left_over_many_rounds",),
        ),
    ),
    "jemalloc 5.0.1": (
        Difference(
            "has no limit of growth",
            "not noticed|noticed for another reason",
            tuple(
                f"test_contract.py::test_fault_is_noticed[{fault}]"
                for fault in ("growth_unlimited-contract-true", "commit_fails-contract-true")
            ),
        ),
    ),
    "jemalloc 5.3.1": (
        Difference(
            "rounds a block of 64 KiB, padded by a page, up to 80 KiB",
            r"only 79\.\d% usable for blocks of 65536 bytes",
            tuple(f"test_conformance.py::test_small_memory_can_be_used_to_the_end[{kind}]" for kind in (*FIXED, HUGE)),
        ),
    ),
    "tbbmalloc": (
        WITHOUT_LIBJEMALLOC,
        TELLS_NOTHING,
        RECORDS,
        RECORDS_ON_A_DEVICE,
        Difference(
            "takes 1 MiB of memory and a page at a time, four times in a row",
            "takes 1052672 bytes at a time|no room for|no memory for|most of the range can be used",
            (
                *(f"test_conformance.py::test_blocks_are_apart[{kind}]" for kind in (*SHARED, HUGE)),
                "test_conformance.py::test_shared_ranges_in_any_order",
                "test_errors.py::test_block_larger_than_its_provider",
                "test_providers.py::test_fixed_range_is_used_and_never_beyond",
                "test_providers.py::test_fixed_old_bytes_are_cleared_unless_said_to_be_zero",
                "test_providers.py::test_nested",
                "test_providers.py::test_several_ranges_are_a_region_each",
                "test_providers.py::test_several_ranges_of_which_one_is_wrong",
            ),
        ),
        Difference(
            "wastes up to a quarter of the memory, with blocks of 4 KiB as with larger ones",
            "AssertionError: full|usable for blocks of 4096 bytes",
            (
                "test_conformance.py::test_free_but_dirty_pages_are_found",
                "test_conformance.py::test_small_memory_can_be_used_to_the_end",
            ),
        ),
        Difference(
            "has other size classes, and memory of its own besides that of blocks",
            "in the sizes that jemalloc gives|and one region|4 == 5",
            (
                "test_arena.py::test_account_in_bytes_and_counts",
                "test_arena.py::test_large_frees_stay",
                "test_null.py::test_counts_and_log",
            ),
        ),
        Difference(
            "has a limit of about 1,000 arenas",
            "the limit is named",
            ("test_arena.py::test_too_many_arenas_is_an_error_and_not_the_end",),
        ),
        Difference(
            "gives back no whole huge page",
            "what was freed is not in memory",
            ("test_conformance.py::test_free_pages_are_given_back[memfd of huge pages]",),
        ),
    ),
    "mimalloc": (
        WITHOUT_LIBJEMALLOC,
        RECORDS,
        RECORDS_ON_A_DEVICE,
        Difference(
            "a heap serves the thread that made it",
            "mimalloc heap|every thread gets its own|pop from empty list|BrokenBarrierError",
            (
                "test_arena.py::test_shards_share_one_arena",
                "test_concurrency.py::test_eager_registers_before_handing_out",
                "test_concurrency.py::test_eager_failures_among_threads",
                "test_concurrency.py::test_everything_at_once",
                "test_concurrency.py::test_close_in_the_middle_gives_closed_errors_only",
                "test_concurrency.py::test_close_from_many_threads_at_once",
                "test_fork.py::test_fork_while_threads_allocate",
                "test_leases.py::test_trim_beside_leases_and_frees",
                "test_regions.py::test_table_while_regions_are_made",
                "test_registrars_python.py::test_a_registrar_from_many_threads",
                "test_uring.py::test_threads",
            ),
        ),
        Difference(
            "a heap ends on the thread that made it, and range by range on multiples of 32 MiB",
            "mimalloc heap|most of the memory can be used",
            (
                "test_concurrency.py::test_registrar_closed_in_the_middle",
                "test_events.py::test_from_many_threads",
                *(f"test_conformance.py::test_out_of_memory[{kind}]" for kind in FIXED),
            ),
            always=False,
        ),
        Difference(
            "has 64 ranges of memory in a process",
            "mimalloc has 64 ranges|the limit is named",
            (
                "test_arena.py::test_many_arenas",
                "test_arena.py::test_too_many_arenas_is_an_error_and_not_the_end",
            ),
        ),
        Difference(
            "aligns to 16 MiB at most",
            "mimalloc aligns to 16 MiB at most",
            (
                "test_blocks.py::test_alignment[67108864]",
                "test_blocks.py::test_alignment_of_a_gibibyte",
                *(f"test_conformance.py::test_alignment[{kind}]" for kind in GROWING),
            ),
        ),
        Difference(
            "takes memory in pieces of 32 MiB, on multiples of it, and says so",
            "takes 33554432 bytes at a time|one region of 33554432 bytes|have at least 33554432|no room for|"
            "no memory for|to register 33554432 bytes|there was room, or something to evict",
            (
                "test_ahead.py::test_pinned_ahead_within_the_budget",
                "test_arena.py::test_a_failed_growth_does_not_grow_on",
                "test_budget.py::test_a_full_budget_says_who_holds_what_and_how_to_go_on",
                "test_budget.py::test_a_registrars_budget_is_over_all_its_arenas",
                "test_budget.py::test_one_budget_for_two_registrars",
                "test_budget.py::test_a_budget_outlives_its_arena_and_registrar",
                "test_budget.py::test_a_closed_arena_is_charged_until_its_last_block_dies",
                "test_budget.py::test_threads_share_a_small_budget",
                "test_budget.py::test_a_child_begins_with_an_empty_budget",
                *(f"test_conformance.py::test_blocks_are_apart[{kind}]" for kind in (*SHARED, HUGE)),
                *(f"test_conformance.py::test_generations_of_arenas_lose_nothing[{kind}]" for kind in SHARED),
                "test_conformance.py::test_an_arena_in_a_block",
                "test_conformance.py::test_shared_ranges_in_any_order",
                "test_errors.py::test_block_larger_than_its_provider",
                "test_errors.py::test_block_larger_than_a_registration",
                "test_events.py::test_a_cache_that_is_told_keeps_nothing_stale",
                "test_keys.py::test_a_refused_registration_is_reported_once",
                "test_lifetimes.py::test_arena_keeps_registrars_and_provider",
                "test_null.py::test_max_mr_size_bounds_regions",
                "test_null.py::test_rail_that_can_neither_be_made_nor_undone",
                "test_null.py::test_stranded_fixed_memory_is_kept",
                "test_policy.py::test_policy",
                "test_properties.py::test_any_number_is_found_or_not",
                "test_properties.py::test_anything",
                "test_providers.py::test_fixed_by_address_needs_no_object",
                "test_providers.py::test_fixed_old_bytes_are_cleared_unless_said_to_be_zero",
                "test_providers.py::test_fixed_range_is_used_and_never_beyond",
                "test_providers.py::test_nested",
                "test_providers.py::test_nested_three_deep",
                "test_providers.py::test_no_huge_pages_reserved",
                "test_providers.py::test_one_arena_at_a_time",
                "test_providers.py::test_overlapping_ranges",
                "test_providers.py::test_several_ranges_are_a_region_each",
                "test_providers.py::test_several_ranges_of_which_one_is_wrong",
                "test_providers.py::test_the_owner_cannot_take_the_memory_away",
                "test_registrars_python.py::test_limits_are_kept",
                "test_registrars_python.py::test_one_registrar_in_many_arenas_at_the_same_address",
                "test_registrars_python.py::test_register_raises",
                "test_uring.py::test_memlock_too_small",
            ),
        ),
        Difference(
            "has regions of 32 MiB, where the test expects several smaller ones",
            "",
            (
                "test_arena.py::test_regions_grow_up_to_region_max",
                "test_budget.py::test_a_lowered_limit_and_a_registrar_that_minds_being_called_from_a_free",
                "test_budget.py::test_a_lowered_limit_is_in_force_as_soon_as_something_may_go",
                "test_budget.py::test_a_python_registrar_is_not_called_from_a_free",
                "test_budget.py::test_an_eager_arena_refuses_the_allocation",
                "test_budget.py::test_idle_regions_make_room",
                "test_budget.py::test_leases_and_unleased",
                "test_budget.py::test_what_the_registrar_can_do_is_its_budget",
                *(
                    f"test_conformance.py::test_memory_that_stays_registered_is_not_used_again[{kind}]"
                    for kind in SHARED
                ),
                "test_conformance.py::test_small_memory_can_be_used_to_the_end",
                "test_fork.py::test_the_parents_pinned_pages_stay_right",
                "test_null.py::test_counts_and_log",
                "test_null.py::test_deregistration_that_fails",
                "test_null.py::test_fails_on_demand",
                "test_null.py::test_max_mr",
                "test_regions.py::test_region_of_an_object",
                "test_registrars_python.py::test_a_registrar_may_use_other_memory",
                "test_uring.py::test_memlock_too_small_eager",
                "test_uring.py::test_slots_run_out",
            ),
        ),
        Difference(
            "gives no memory back before the arena ends, and tells nothing of what is free",
            "what was freed is not in memory|not given back|otherwise they are kept|kind of event did|full|dirty",
            (
                *TELLS_NOTHING.tests,
                *(f"test_conformance.py::test_free_but_dirty_pages_are_found[{kind}]" for kind in (*FIXED, HUGE)),
                "test_conformance.py::test_free_pages_are_given_back",
                "test_events.py::test_a_life_in_order",
            ),
        ),
        Difference(
            "has other size classes",
            "in the sizes that jemalloc gives",
            ("test_arena.py::test_account_in_bytes_and_counts",),
        ),
    ),
    "direct": (
        WITHOUT_LIBJEMALLOC,
        Difference(
            "keeps no freed pages",
            "otherwise they are kept for a while|everything is dirty",
            (
                *TELLS_NOTHING.tests,
                *(f"test_conformance.py::test_free_but_dirty_pages_are_found[{kind}]" for kind in (*FIXED, HUGE)),
            ),
        ),
        Difference(
            "gives every block whole pages, without padding",
            "in the sizes that jemalloc gives|2 == 4",
            ("test_arena.py::test_account_in_bytes_and_counts", "test_null.py::test_counts_and_log"),
        ),
        Difference(
            "has no limit of 4,095 arenas",
            "the limit is named",
            ("test_arena.py::test_too_many_arenas_is_an_error_and_not_the_end",),
        ),
    ),
}


def expected(allocator: str, version: str) -> dict[str, Difference]:
    """By the test's file and name, for an allocator as configured, of the version that it says ("5.2.1")."""
    parts = version.partition("-")[0].split(".")
    keys = (allocator, *(f"{allocator} {'.'.join(parts[:n])}" for n in (1, 2, 3)))
    return {test: difference for key in keys for difference in EXPECTED.get(key, ()) for test in difference.tests}
