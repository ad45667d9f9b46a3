"""Where another allocator than jemalloc is different, and why: these tests must fail with it. See ci/allocators."""

from __future__ import annotations

KEEPS_NOTHING = "keeps no freed pages"
WHOLE_PAGES = "gives every block whole pages"

EXPECTED = {
    "jemalloc": {},
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
