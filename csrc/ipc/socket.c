/* socket.c - a handle and its descriptors over a Unix socket.
 * No state: may be used from any thread, one at a time for each direction of a socket.                               */
#include "ipc.h"
#include "../error.h"

#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Waits until the socket is ready; `end` -1: for ever. 0 or -errno. */
static int wait_for(int socket, short events, int64_t end) {
    for (;;) {
        int64_t left = end < 0 ? -1 : end - now_ms();
        struct pollfd p = {socket, events, 0};
        int n = end >= 0 && left < 0 ? 0 : poll(&p, 1, (int)left);
        if (n > 0) return 0;
        if (!n) return -ETIMEDOUT;
        if (errno != EINTR) return -errno;
    }
}

/* Sends or receives the 64 bytes; descriptors go with the first. 0 or -errno. */
static int transfer(int socket, bool receive, jemhooks_ipc_handle *handle, jh_descriptors *fds, int timeout_ms) {
    int64_t end = timeout_ms < 0 ? -1 : now_ms() + timeout_ms;
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof *fds)];
    } control;
    for (size_t done = 0; done < sizeof *handle;) {
        struct iovec bytes = {handle->bytes + done, sizeof *handle - done};
        struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
        if (!done) {
            memset(&control, 0, sizeof control);
            message.msg_control = &control;
            message.msg_controllen = sizeof control;
        }
        if (!done && !receive) {
            control.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof *fds), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
            memcpy(CMSG_DATA(&control.head), fds, sizeof *fds);
        }
        int rc = wait_for(socket, receive ? POLLIN : POLLOUT, end);
        if (rc) return rc;
        ssize_t n = receive ? recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT) : sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (n < 0) return -errno;
        if (!n) return -EPIPE;
        const struct cmsghdr *c = receive && !done ? CMSG_FIRSTHDR(&message) : NULL;
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof *fds))
            memcpy(fds, CMSG_DATA(c), sizeof *fds);
        else if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(int)))
            memcpy(&fds->ledger, CMSG_DATA(c), sizeof(int));
        if (receive && (fds->ledger < 0 || fds->memory < 0))
            return message.msg_flags & MSG_CTRUNC ? -EMFILE : -EPROTO; /* where no descriptor is free the kernel leaves them out */
        done += (size_t)n;
    }
    return 0;
}

static int failed(const char *call, int socket, int rc) {
    const char *remedy = rc == -EPROTO ? "; something else was received: send and receive in turns" :
                         rc == -EMFILE ? "; raise the limit (ulimit -n)" :
                         rc == -EPIPE  ? "; the peer has closed it" :
                         rc == -ENOTSOCK || rc == -EOPNOTSUPP || rc == -EINVAL ? "; give a connected Unix socket" : "";
    return jh_fail(JEMHOOKS_ERROR_TRANSFER, -rc, "%s: socket %d: %s%s", call, socket, strerror(-rc), remedy);
}

int jemhooks_ipc_send(int socket, const void *p, size_t length, unsigned flags, int timeout_ms) {
    jemhooks_ipc_handle handle;
    jh_descriptors fds;
    int rc = jh_ipc_export(p, length, flags, &handle, &fds);
    if (rc) return rc;
    rc = transfer(socket, false, &handle, &fds, timeout_ms);
    return rc ? failed("jemhooks_ipc_send", socket, rc) : 0;
}

int jemhooks_ipc_receive(int socket, unsigned flags, int timeout_ms, jemhooks_ipc_block *block) {
    jemhooks_ipc_handle handle;
    jh_descriptors fds = {-1, -1};
    if (!block) return jh_fail(JEMHOOKS_ERROR_CONFIG, EINVAL, "jemhooks_ipc_receive: nowhere to put the block (NULL)");
    int rc = transfer(socket, true, &handle, &fds, timeout_ms);
    rc = rc ? failed("jemhooks_ipc_receive", socket, rc) : jh_ipc_open(&handle, flags, fds, block);
    int err = errno;
    if (fds.ledger >= 0) close(fds.ledger);
    if (fds.memory >= 0) close(fds.memory);
    errno = err;
    return rc;
}
