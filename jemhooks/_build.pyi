"""How this jemhooks was configured; CMake writes the module."""

VERSION: str
BUILD_CONFIG: str
JEMALLOC_VERSION: str
JEMALLOC_LIBDIR: str
