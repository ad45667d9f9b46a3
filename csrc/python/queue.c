/* queue.c - events of regions, kept until Python asks for them.
 * Concurrency: a short lock guards the ring. It is filled inside hooks too, so its holder does nothing else. Runs without the
 * GIL.                                                                                                              */
#include "face.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

struct jh_queue {
    jemhooks_subscription *subscription;
    pthread_mutex_t lock;
    size_t room, first, count; /* of the ring, in events */
    uint64_t lost;
    jh_queue_event ring[];
};

static void put(void *self, const jemhooks_event *event) {
    jh_queue *q = self;
    pthread_mutex_lock(&q->lock);
    if (q->count < q->room) {
        jh_queue_event *e = &q->ring[(q->first + q->count++) % q->room];
        *e = (jh_queue_event){event->base, event->length, event->kind, ""};
        snprintf(e->arena, sizeof e->arena, "%s", jemhooks_arena_name(event->arena));
    } else {
        q->lost++;
    }
    pthread_mutex_unlock(&q->lock);
}

int jh_queue_open(jemhooks_arena *arena, unsigned kinds, size_t room, jh_queue **queue) {
    jh_queue *q = calloc(1, sizeof *q + room * sizeof q->ring[0]);
    if (!q) return -ENOMEM;
    pthread_mutex_init(&q->lock, NULL);
    q->room = room;
    int rc = jemhooks_subscribe(arena, kinds, put, q, &q->subscription);
    if (rc) free(q);
    else *queue = q;
    return rc;
}

int jh_queue_close(jh_queue *q) {
    int rc = jemhooks_unsubscribe(q->subscription);
    if (!rc) free(q);
    return rc;
}

size_t jh_queue_take(jh_queue *q, jh_queue_event *out, size_t most) {
    size_t n = 0;
    pthread_mutex_lock(&q->lock);
    for (; n < most && q->count; n++, q->count--) {
        out[n] = q->ring[q->first];
        q->first = (q->first + 1) % q->room;
    }
    pthread_mutex_unlock(&q->lock);
    return n;
}

void jh_queue_get_state(jh_queue *q, size_t *waiting, uint64_t *lost) {
    pthread_mutex_lock(&q->lock);
    *waiting = q->count;
    *lost = q->lost;
    pthread_mutex_unlock(&q->lock);
}
