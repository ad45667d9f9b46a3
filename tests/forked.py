"""For scripts that fork: children that end, and say how."""

from __future__ import annotations

# Needs os and sys.
FORK = """
    def fork(child):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                child()
                status = 0
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        return pid

    def wait(pid):
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, f"the child ended with {status}"

    def refused(kind, call):
        try:
            call()
        except kind as e:
            return str(e)
        raise AssertionError(f"{call} was not refused")
"""
