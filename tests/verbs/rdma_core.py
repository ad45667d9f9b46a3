"""rdma-core's own pyverbs tests, as Debian's python3-pyverbs ships them, as they are or with memory from arenas.

    rdma_core.py FOLDER plain|arena MODULE…

With "arena", the MR that the tests import from pyverbs is replaced by a class that allocates its buffer from an arena
and takes lkey and rkey from jemhooks.key(); no MR of pyverbs' own is made. Prints, as JSON, the outcome of each test
and how many keys were given out.
"""

from __future__ import annotations

import json
import sys
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
)

import jemhooks as jh

ACCESS = (
    (IBV_ACCESS_LOCAL_WRITE, jh.Access.LOCAL_WRITE),
    (IBV_ACCESS_REMOTE_READ, jh.Access.REMOTE_READ),
    (IBV_ACCESS_REMOTE_WRITE, jh.Access.REMOTE_WRITE),
    (IBV_ACCESS_REMOTE_ATOMIC, jh.Access.REMOTE_ATOMIC),
    (IBV_ACCESS_RELAXED_ORDERING, jh.Access.RELAXED_ORDERING),
)
arenas: dict[tuple[Any, int], jh.Arena] = {}
given = 0


class ArenaMR:
    """Looks like pyverbs.mr.MR, as far as those tests look."""

    def __init__(self, pd: Any, length: int, access: int, address: int | None = None) -> None:
        global given
        assert address is None, "memory of the test's own"
        flags = jh.Access(0)
        for theirs, ours in ACCESS:
            flags |= ours if access & theirs else 0
            access &= ~theirs
        if access:
            raise unittest.SkipTest(f"arenas have no access {access:#x}")
        where = (pd, int(flags))
        if where not in arenas:
            arenas[where] = jh.Arena(jh.Verbs(pd=pd), access=flags)
        self._memory = arenas[where].zeros(length, "u1")
        self.buf, self.length, self.lkey, self.rkey, _ = jh.key(self._memory)
        given += 1

    def write(self, data: Any, length: int, offset: int = 0) -> None:
        data = data.encode() if isinstance(data, str) else bytes(data)
        self._memory[offset : offset + length] = memoryview(data)[:length]

    def read(self, length: int, offset: int) -> bytes:
        return bytes(self._memory[offset : offset + length])

    def close(self) -> None:
        pass


def tests_of(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from tests_of(item)
        else:
            yield item


def main(folder: str, mode: str, modules: list[str]) -> None:
    sys.path[:0] = [folder, folder + "/tests"]
    sys.argv = ["tests", "--dev", "rxe0"]
    from args_parser import parser

    parser.parse_args()
    outcomes: dict[str, str] = {}

    class Result(unittest.TestResult):
        def addSuccess(self, test: unittest.TestCase) -> None:
            outcomes[test.id()] = "passed"

        def addSkip(self, test: unittest.TestCase, reason: str) -> None:
            outcomes[test.id()] = "skipped"

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            outcomes[test.id()] = f"failed: {err[1]!r}"

        def addError(self, test: unittest.TestCase, err: Any) -> None:
            outcomes[test.id()] = f"failed: {err[1]!r}"

    warnings.simplefilter("ignore")
    suite = unittest.defaultTestLoader.loadTestsFromNames([f"tests.{m}" for m in modules])
    for module in list(sys.modules.values()):
        if mode == "arena" and module.__name__.startswith("tests.") and hasattr(module, "MR"):
            module.MR = ArenaMR
    for test in tests_of(suite):
        if mode == "arena" and test.id().endswith("bind_mw"):
            outcomes[test.id()] = "left out"  # binds a window to an MR of pyverbs, as an object
        else:
            test.run(Result())
    for arena in arenas.values():
        arena.close()
    print(json.dumps({"outcomes": outcomes, "keys": given}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
