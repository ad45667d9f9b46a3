/* shard.c - a shard: one jemalloc arena over a space, from its making to its end.
 * jemalloc 5 makes and destroys arenas. jemalloc 4 cannot destroy one: when it is empty it is reset, gives its chunks back, and is kept
 * for the next shard. 4.1 has no reset and remembers one chunk; such an arena is never used again.
 * Concurrency: a shard is made and ended by one thread; `lock` guards the list of empty arenas.                     */
#include "jemalloc.h"
#include "../../error.h"
#include "../../fault.h"

#include <string.h>

#define NEVER ((size_t)1 << 40) /* an oversize threshold that no allocation reaches; 0 would not switch it off */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned empty[JH_ARENAS], empties; /* jemalloc arenas that can be used again */

static void in_child(void) {
    pthread_mutex_init(&lock, NULL);
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(NULL, NULL, in_child);
}

static int create_extents(jh_shard *shard) {
    struct { /* arena_config_t of 5.3 */
        jh_extent_hooks *hooks;
        bool metadata_use_hooks;
    } ext = {&shard->hooks, false};
    size_t size = sizeof shard->index;
    shard->hooks = jh_extent_hooks_5;
    if (jh_jemalloc.metadata_apart)
        return je_mallctl("experimental.arenas_create_ext", &shard->index, &size, &ext, sizeof ext);
    return je_mallctl("arenas.create", &shard->index, &size, &ext.hooks, sizeof ext.hooks);
}

static int create_chunks(jh_shard *shard) {
    size_t size = sizeof shard->index;
    pthread_mutex_lock(&lock);
    bool found = empties;
    if (found) shard->index = empty[--empties];
    pthread_mutex_unlock(&lock);
    int rc = found ? 0 : je_mallctl("arenas.extend", &shard->index, &size, NULL, 0);
    if (!rc && shard->index >= JH_ARENAS) rc = EAGAIN;
    if (rc) return rc;
    jh_chunk_hooks hooks = jh_chunk_hooks_4; /* which jemalloc copies */
    jh_chunk_hooks_bind(shard->index, shard);
    return -jh_ctl_arena(JH_CTL_CHUNK_HOOKS, shard->index, NULL, NULL, &hooks, sizeof hooks);
}

/* Sets a control of the shard's arena; a jemalloc that lacks it is as good. 0 or an error, recorded. */
static int set(const jh_shard *shard, enum jh_ctl ctl, const char *what, int64_t value) {
    int rc = jh_ctl_arena(ctl, shard->index, NULL, NULL, &value, sizeof value); /* all are size_t or ssize_t */
    if (!rc || rc == -ENOENT) return 0;
    return jh_fail(JEMHOOKS_ERROR_CONFIG, -rc, "arena '%s': jemalloc does not take %lld as %s: %s", shard->space->rails.name,
                   (long long)value, what, strerror(-rc));
}

/* jemalloc 4 decays in seconds, or, by default, not at all: heap.c then purges. Its arena may have been another one's, with other times. */
static int set_seconds(const jh_shard *shard, int64_t ms) {
    bool standard = ms == JEMHOOKS_DECAY_DEFAULT;
    if (!jh_jemalloc.decays)
        return set(shard, JH_CTL_DIRTY_MULT, "lg_dirty_mult", ms < 0 && !standard ? -1 : jh_ctl_option("opt.lg_dirty_mult", -1));
    return set(shard, JH_CTL_DECAY_TIME, "decay_time", standard ? jh_ctl_option("opt.decay_time", -1) : ms < 0 ? -1 : (ms + 999) / 1000);
}

static int adjust(const jh_shard *shard, const jemhooks_config *config) {
    int64_t dirty = config->dirty_decay_ms, muzzy = config->muzzy_decay_ms;
    int rc = 0;
    if (!JH_FAULT(oversize_default)) rc = set(shard, JH_CTL_OVERSIZE, "oversize_threshold", NEVER);
    if (!rc && !JH_FAULT(growth_unlimited)) rc = set(shard, JH_CTL_GROW_LIMIT, "retain_grow_limit", (int64_t)config->region_max);
    if (!rc && jh_jemalloc.chunk) return set_seconds(shard, dirty);
    if (!rc && dirty != JEMHOOKS_DECAY_DEFAULT) rc = set(shard, JH_CTL_DIRTY_DECAY, "dirty_decay_ms", dirty);
    if (!rc && muzzy != JEMHOOKS_DECAY_DEFAULT) rc = set(shard, JH_CTL_MUZZY_DECAY, "muzzy_decay_ms", muzzy);
    return rc;
}

int jh_shard_start(jh_shard *shard, jh_space *space, const jemhooks_config *config) {
    shard->space = space;
    atomic_init(&shard->chunks, 0);
    atomic_init(&shard->bound, jh_jemalloc.bounds_growth ? SIZE_MAX : config->region_max);
    int rc = jh_jemalloc.chunk ? create_chunks(shard) : create_extents(shard);
    if (rc)
        return jh_fail(JEMHOOKS_ERROR_MEMORY, rc, "arena '%s': jemalloc cannot make another arena: %s; it has at most 4,095",
                       space->rails.name, strerror(rc));
    rc = adjust(shard, config);
    if (rc) jh_shard_end(shard);
    return rc;
}

/* jemalloc 4 puts the chunks that this empties aside, as dirty again; and it stops early if another thread is purging. */
void jh_shard_purge(const jh_shard *shard) {
    enum { MOST = 8 };
    unsigned turns = 0;
    jh_this_runs = true;
    do jh_ctl_arena(JH_CTL_PURGE, shard->index, NULL, NULL, NULL, 0);
    while (jh_jemalloc.chunk && ++turns < MOST && (jh_ctl_epoch(), jh_ctl_stat(JH_CTL_PDIRTY, shard->index)));
    jh_this_runs = false;
}

static int end_chunks(jh_shard *shard) {
    unsigned threads = 0;
    size_t size = sizeof threads;
    jh_ctl_epoch();
    if (!jh_ctl_arena(JH_CTL_THREADS, shard->index, &threads, &size, NULL, 0) && threads) return -EBUSY;
    jh_shard_purge(shard); /* a reset would go on counting dirty runs; and 4.1 then has no reason to look at its last chunk */
    if (!jh_ctl_arena(JH_CTL_RESET, shard->index, NULL, NULL, NULL, 0)) jh_shard_purge(shard);
    jh_chunk_hooks_bind(shard->index, NULL);
    pthread_mutex_lock(&lock);
    if (!atomic_load(&shard->chunks)) empty[empties++] = shard->index;
    pthread_mutex_unlock(&lock);
    return 0;
}

int jh_shard_end(jh_shard *shard) {
    if (jh_jemalloc.chunk) return end_chunks(shard);
    return jh_ctl_arena(JH_CTL_DESTROY, shard->index, NULL, NULL, NULL, 0) ? -EBUSY : 0;
}
