"""Environment of a process whose peak memory is measured."""

# glibc keeps freed blocks for later; this way it gives them back at once, and the high-water mark is that of what was
# held at one time.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
