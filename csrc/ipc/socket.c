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
    int64_t left = end < 0 ? -1 : end - now_ms();
    struct pollfd p = {socket, events, 0};
    int n = poll(&p, 1, left < 0 && end >= 0 ? 0 : (int)left);
    return n > 0 ? 0 : n ? -errno : -ETIMEDOUT;
}

/* What came along with a message: our two descriptors, or others, which are closed. */
static void take_descriptors(struct msghdr *message, jh_descriptors *fds) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (!i && fds->ledger < 0) fds->ledger = fd;
            else if (i == 1 && fds->memory < 0) fds->memory = fd;
            else close(fd);
        }
    }
}

/* One piece of the 64 bytes; the descriptors go with the first. How many bytes, or -errno. */
static ssize_t piece(int socket, bool receive, struct iovec *bytes, jh_descriptors *fds) {
    union {
        struct cmsghdr head;
        char room[256]; /* others' messages, such as credentials, may come along */
    } control;
    struct msghdr message = {.msg_iov = bytes, .msg_iovlen = 1};
    memset(&control, 0, sizeof control);
    if (!receive) {
        if (fds) {
            message.msg_control = &control;
            message.msg_controllen = CMSG_SPACE(sizeof *fds);
            control.head = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof *fds), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
            memcpy(CMSG_DATA(&control.head), fds, sizeof *fds);
        }
        ssize_t sent = sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        return sent < 0 ? -errno : sent;
    }
    message.msg_control = &control;
    message.msg_controllen = sizeof control;
    ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0) return -errno;
    jh_descriptors none = {-1, -1};
    take_descriptors(&message, fds ? fds : &none);
    if (!fds && none.ledger >= 0) close(none.ledger);
    if (!fds && none.memory >= 0) close(none.memory);
    if (!n) return -EPIPE;
    if (fds && (fds->ledger < 0 || fds->memory < 0)) return message.msg_flags & MSG_CTRUNC ? -EMFILE : -EPROTO; /* where none is free */
    return n;
}

/* Sends or receives the 64 bytes. 0 or -errno; -EINTR only before anything has gone. */
static int transfer(int socket, bool receive, jemhooks_ipc_handle *handle, jh_descriptors *fds, int timeout_ms) {
    int64_t end = timeout_ms < 0 ? -1 : now_ms() + timeout_ms;
    int domain = 0;
    socklen_t size = sizeof domain;
    if (socket < 0) return -EBADF;
    if (getsockopt(socket, SOL_SOCKET, SO_DOMAIN, &domain, &size)) return -errno;
    if (domain != AF_UNIX) return -EAFNOSUPPORT;
    for (size_t done = 0; done < sizeof *handle;) {
        struct iovec bytes = {handle->bytes + done, sizeof *handle - done};
        int rc = wait_for(socket, receive ? POLLIN : POLLOUT, end);
        if (rc == -EINTR && done) continue;
        if (rc) return rc;
        ssize_t n = piece(socket, receive, &bytes, done ? NULL : fds);
        if (n == -EAGAIN || n == -EINTR) continue;
        if (n < 0) return (int)n;
        done += (size_t)n;
    }
    return 0;
}

static int failed(const char *call, int socket, int rc) {
    const char *remedy = "; give a connected Unix socket";
    if (rc == -EPROTO) remedy = "; something else was received: send and receive in turns";
    else if (rc == -EMFILE) remedy = "; raise the limit (ulimit -n)";
    else if (rc == -EPIPE || rc == -ECONNRESET) remedy = "; the peer has closed it";
    else if (rc == -ETIMEDOUT || rc == -EINTR) remedy = "";
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
