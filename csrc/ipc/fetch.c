/* fetch.c - takes descriptors from another process: by pidfd_getfd(), which asks for the right to attach to it as a debugger, or
 * through /proc, which asks for the right to look at it.
 * No state: may be used from any thread.                                                                             */
#include "ipc.h"
#include "../error.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int by_pidfd(uint32_t pid, int fd) {
    int process = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (process < 0) {
        if (errno == EINVAL || errno == ENOENT) errno = ESRCH; /* no process has such a number; or it is a thread's */
        return -1;
    }
    int got = (int)syscall(SYS_pidfd_getfd, process, fd, 0), err = errno;
    close(process);
    errno = err;
    return got;
}

/* Not dup's: another open file description of the same file, which is as good. */
static int by_path(uint32_t pid, int fd) {
    char path[48];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
}

static void ptrace_scope(char *text, size_t room) {
    FILE *f = fopen("/proc/sys/kernel/yama/ptrace_scope", "re");
    if (!f || !fgets(text, (int)room, f)) snprintf(text, room, "not there");
    text[strcspn(text, "\n")] = 0;
    if (f) fclose(f);
}

int jh_ipc_fetch(uint32_t pid, int fd) {
    char scope[16];
    int got = by_pidfd(pid, fd), err = errno;
    if (got >= 0) return got;
    if (err == EPERM || err == ENOSYS) {
        got = by_path(pid, fd);
        if (got >= 0) return got;
        if (errno == ENOENT || errno == EMFILE || errno == ENFILE) err = errno == ENOENT ? EBADF : errno;
    }
    ptrace_scope(scope, sizeof scope);
    if (err == ESRCH)
        jh_fail(JEMHOOKS_ERROR_CLOSED, ESRCH, "opening memory of process %u: it has ended (or is in another PID namespace: then have the "
                "block sent over a Unix socket)", pid);
    else if (err == EBADF)
        jh_fail(JEMHOOKS_ERROR_CLOSED, ESTALE, "opening memory of process %u: it has no descriptor %d any more; its arena is gone, or "
                "another process has its number", pid, fd);
    else if (err == EMFILE || err == ENFILE)
        jh_fail(JEMHOOKS_ERROR_PROVIDER, err, "opening memory of process %u: %s; close some, or raise the limit (ulimit -n)", pid,
                strerror(err));
    else
        jh_fail(JEMHOOKS_ERROR_PROVIDER, EPERM, "opening memory of process %u: taking descriptor %d from it: %s; that needs the same user, or "
                "CAP_SYS_PTRACE, and pidfd_getfd also kernel.yama.ptrace_scope 0 (it is %s); otherwise have the block sent over a Unix "
                "socket", pid, fd, strerror(err), scope);
    return -1;
}
