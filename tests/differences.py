"""Where another allocator than jemalloc is different, and why: these tests must fail with it. See ci/allocators.

A name without parameters stands for the test with any.
"""

from __future__ import annotations

KEEPS_NOTHING = "keeps no freed pages"
WHOLE_PAGES = "gives every block whole pages"
RECORDS = "keeps records in the memory, which a peer here overwrites, and takes up all memory before it uses any again"
IN_MIBS = "takes 1 MiB of memory and a page at a time, four times in a row"

EXPECTED = {
    "jemalloc": {},
    "tbbmalloc": {
        "test_arena.py::test_account_in_bytes_and_counts": "has other size classes",
        "test_arena.py::test_large_frees_stay": "has memory of its own besides that of large blocks",
        "test_arena.py::test_decay[None]": "tells nothing of its free pages",
        "test_arena.py::test_decay[1000]": "tells nothing of its free pages",
        "test_arena.py::test_too_many_arenas_is_an_error_and_not_the_end": "has a limit of about 1,000 arenas",
        "test_conformance.py::test_blocks_are_apart[file]": IN_MIBS,
        "test_conformance.py::test_blocks_are_apart[file on tmpfs]": IN_MIBS,
        "test_conformance.py::test_blocks_are_apart[fixed, shared]": IN_MIBS,
        "test_conformance.py::test_blocks_are_apart[memfd of huge pages]": IN_MIBS,
        "test_conformance.py::test_free_but_dirty_pages_are_found": "puts a block of 12,000 bytes into 16 KiB",
        "test_conformance.py::test_free_pages_are_given_back[memfd of huge pages]": "gives back no whole huge page",
        "test_conformance.py::test_shared_ranges_in_any_order": IN_MIBS,
        "test_conformance.py::test_small_memory_can_be_used_to_the_end": "wastes a quarter of it with blocks of 4 KiB",
        "test_conformance.py::test_zeroes_where_others_wrote": RECORDS,
        "test_conformance.py::test_zeroes_while_forked_children_live": RECORDS,
        "test_conformance.py::test_zeroes_with_all_memory_locked": RECORDS,
        "test_doctor.py::test_all_is_well": "needs no libjemalloc, which doctor would load",
        "test_doctor.py::test_without_room_for_the_library": "needs no libjemalloc",
        "test_errors.py::test_block_larger_than_its_provider": IN_MIBS,
        "test_null.py::test_counts_and_log": "has a region for its own records",
        "test_providers.py::test_fixed_range_is_used_and_never_beyond": IN_MIBS,
        "test_providers.py::test_fixed_old_bytes_are_cleared_unless_said_to_be_zero": IN_MIBS,
        "test_providers.py::test_memory_the_host_cannot_touch": "keeps records in the memory, and says so",
        "test_providers.py::test_nested": IN_MIBS,
        "test_providers.py::test_several_ranges_are_a_region_each": IN_MIBS,
        "test_providers.py::test_several_ranges_of_which_one_is_wrong": IN_MIBS,
    },
    "direct": {
        "test_arena.py::test_account_in_bytes_and_counts": WHOLE_PAGES,
        "test_arena.py::test_decay[None]": KEEPS_NOTHING,
        "test_arena.py::test_decay[1000]": KEEPS_NOTHING,
        "test_arena.py::test_too_many_arenas_is_an_error_and_not_the_end": "has no limit of 4,095 arenas",
        **{
            f"test_conformance.py::test_free_but_dirty_pages_are_found[{kind}]": KEEPS_NOTHING
            for kind in ("file", "file on tmpfs", "fixed", "fixed, shared", "memfd of huge pages")
        },
        "test_doctor.py::test_all_is_well": "needs no libjemalloc, which doctor would load",
        "test_doctor.py::test_without_room_for_the_library": "needs no libjemalloc",
        "test_null.py::test_counts_and_log": "puts two blocks of 1 MiB into a region of 2 MiB, without padding",
    },
}
