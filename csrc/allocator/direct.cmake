# Our own, which needs nothing.
set(allocator_sources allocator/direct.c)
set(allocator_rpath)
set(allocator_found "no allocator but its own")
