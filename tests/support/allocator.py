"""Environment of a process whose peak memory is measured."""

# glibc keeps freed blocks for later; with this threshold it returns them at once, so that the high-water mark is the
# largest amount of memory held at one time.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
