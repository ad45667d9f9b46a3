typedef struct jemhooks_arena jemhooks_arena;
typedef struct jemhooks_registrar jemhooks_registrar;
typedef struct jemhooks_provider jemhooks_provider;
typedef struct jemhooks_budget jemhooks_budget;

const char *jemhooks_last_error(void);
int jemhooks_last_error_kind(void);
const char *jemhooks_version(void);
const char *jemhooks_build_config(void);
const char *jemhooks_allocator_version(void);
const char *jemhooks_allocator_file(void);
const char *jemhooks_allocator_options(void);
size_t jemhooks_stranded_bytes(void);
int jemhooks_notify_cache(const char *kind);
void jemhooks_set_error(const char *format, ...);

typedef struct { uint64_t addr, length, lkey, rkey, generation; } jemhooks_key;
typedef struct {
    uint64_t lkey, rkey, remote_base;
    void *handle;
    const void *packed;
    size_t packed_length;
} jemhooks_mr;
typedef struct { uint64_t max_mr_size, max_mr, pin_limit; } jemhooks_limits;
typedef struct {
    size_t size;
    const char *name;
    int (*register_memory)(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr);
    int (*deregister_memory)(void *self, jemhooks_mr *mr);
    void (*limits)(void *self, jemhooks_limits *limits);
    void (*close)(void *self);
    const void *interface;
    int not_in_free, populates, pins;
} jemhooks_registrar_ops;

int jemhooks_registrar_open(const char *kind, const void *config, jemhooks_registrar **registrar);
int jemhooks_registrar_create(const jemhooks_registrar_ops *ops, void *self, jemhooks_registrar **registrar);
void jemhooks_registrar_close(jemhooks_registrar *registrar);
jemhooks_budget *jemhooks_registrar_budget(jemhooks_registrar *registrar);
int jemhooks_registrar_set_budget(jemhooks_registrar *registrar, jemhooks_budget *budget);

typedef struct { size_t size; uint64_t pin_limit, max_regions, registered, peak, regions; } jemhooks_budget_info;
int jemhooks_budget_create(uint64_t pin_limit, uint64_t max_regions, jemhooks_budget **budget);
void jemhooks_budget_keep(jemhooks_budget *budget);
void jemhooks_budget_close(jemhooks_budget *budget);
int jemhooks_budget_set(jemhooks_budget *budget, uint64_t pin_limit, uint64_t max_regions);
int jemhooks_budget_get(jemhooks_budget *budget, jemhooks_budget_info *info);

typedef struct { size_t size, page_size; int transparent_huge, numa_node; } jemhooks_anonymous_config;
typedef struct { void *base; size_t length; } jemhooks_range;
typedef struct {
    size_t size;
    void *base;
    size_t length;
    int host_accessible, zeroed;
    const jemhooks_range *ranges;
    size_t range_count;
    int shared;
} jemhooks_fixed_config;
typedef struct { size_t size, page_size; } jemhooks_memfd_config;
typedef struct { size_t size; const char *path; size_t length; int overwrite; } jemhooks_file_config;
typedef struct { size_t size; const char *path; int shared; } jemhooks_devdax_config;
typedef struct {
    size_t size;
    const char *name;
    uint64_t page, total, free;
    int host_accessible, pinnable, gives_back, unmaps, divides, shares;
} jemhooks_provider_info;
int jemhooks_provider_anonymous(const jemhooks_anonymous_config *config, jemhooks_provider **provider);
int jemhooks_provider_fixed(const jemhooks_fixed_config *config, jemhooks_provider **provider);
int jemhooks_provider_memfd(const jemhooks_memfd_config *config, jemhooks_provider **provider);
int jemhooks_provider_file(const jemhooks_file_config *config, jemhooks_provider **provider);
int jemhooks_provider_devdax(const jemhooks_devdax_config *config, jemhooks_provider **provider);
int jemhooks_provider_get_info(jemhooks_provider *provider, jemhooks_provider_info *info);
void jemhooks_provider_close(jemhooks_provider *provider);

typedef struct {
    size_t size;
    const char *name;
    jemhooks_provider *provider;
    jemhooks_registrar *const *registrars;
    unsigned registrar_count;
    unsigned access;
    int policy;
    unsigned shards;
    size_t region_min, region_max;
    ssize_t dirty_decay_ms, muzzy_decay_ms;
    void *user;
    uint64_t pin_limit, max_regions;
    int64_t idle_ttl_ms;
    int evict, prepare, zero_on_free, rotate_keys;
} jemhooks_config;
jemhooks_budget *jemhooks_arena_budget(jemhooks_arena *arena);

typedef struct {
    uint64_t base, length, committed, lkey, rkey, remote_base, generation;
    uint32_t state, leases;
} jemhooks_region_info;
typedef struct {
    size_t size;
    uint64_t regions, mapped, committed, registered, registered_peak, registrations, deregistrations,
        registration_failures, active, dirty, muzzy, abandoned, allocated, hits, evictions, retries, registering_ns,
        durations[16];
} jemhooks_stats;
int jemhooks_trim(jemhooks_arena *arena, size_t *released);
int jemhooks_regions(jemhooks_arena *arena, jemhooks_region_info *info, size_t *count);
int jemhooks_get_stats(jemhooks_arena *arena, jemhooks_stats *stats);
int jemhooks_wait_ready(jemhooks_arena *arena);
int jemhooks_revoke(jemhooks_arena *arena);
int jemhooks_get_keys(size_t n, const uint64_t *addresses, jemhooks_key *keys, size_t *done);

/* ipc */
typedef struct { unsigned char bytes[64]; } jemhooks_ipc_handle;
typedef struct {
    void *base;
    size_t length;
    int writable;
    void *region;
    size_t region_length;
    void *mapping;
} jemhooks_ipc_block;
typedef struct { size_t size; uint64_t exported, exporters, opened, cached, hits, misses, cache_limit; } jemhooks_ipc_stats;
int jemhooks_ipc_export(const void *p, size_t length, unsigned flags, jemhooks_ipc_handle *handle);
int jemhooks_ipc_open(const jemhooks_ipc_handle *handle, unsigned flags, jemhooks_ipc_block *block);
void jemhooks_ipc_close(jemhooks_ipc_block *block);
int jemhooks_ipc_alive(const jemhooks_ipc_block *block);
int jemhooks_ipc_send(int socket, const void *p, size_t length, unsigned flags, int timeout_ms);
int jemhooks_ipc_receive(int socket, unsigned flags, int timeout_ms, jemhooks_ipc_block *block);
int jemhooks_ipc_get_stats(jemhooks_ipc_stats *stats);
void jemhooks_ipc_set_cache(size_t mappings);

/* face.h */
typedef struct jh_face jh_face;
typedef struct {
    uint64_t current_bytes, current_count, peak_bytes, peak_count, total_bytes, total_count;
} jh_face_stats;
int jh_face_open(jemhooks_config *config, int deferred, uintptr_t owner, jh_face **face);
int jh_face_close(jh_face *face);
int jh_face_enter(jh_face *face, int hold);
void jh_face_leave(jh_face *face);
int jh_face_finish(jh_face *face);
jh_face *jh_face_next(void);
void jh_face_forget(void);
void jh_face_defer(jh_face *face);
void jh_face_abandon(jh_face *face);
jemhooks_arena *jh_face_arena(jh_face *face);
uintptr_t jh_face_alloc(jh_face *face, size_t size, size_t alignment, int zero);
void jh_face_free(void *block);
void jh_face_leave_region(void *user);
void jh_face_get_stats(const jh_face *face, jh_face_stats *stats);
int jh_face_key(uintptr_t address, jemhooks_key *key);
int jh_face_rail_key(uintptr_t address, unsigned rail, jemhooks_key *key);
uint64_t jh_face_packed_keys(uintptr_t address);
int jh_face_packed_key(uintptr_t address, unsigned rail, void *buffer, size_t *length);
int jh_face_lease(uintptr_t address, jemhooks_key *key);
int jh_face_unlease(uintptr_t address);
int jh_face_region(uintptr_t address, jemhooks_region_info *info, uintptr_t *user, uintptr_t *arena);
typedef struct { uint64_t addr; uint32_t length, lkey; } jh_face_sge;
int jh_face_sges(jh_face *face, unsigned rail, size_t n, const uint64_t *addresses, const uint64_t *lengths, jh_face_sge *sges,
                 size_t *done);
typedef struct jh_queue jh_queue;
typedef struct { uint64_t base, length; int kind; char arena[64]; } jh_queue_event;
int jh_queue_open(jemhooks_arena *arena, unsigned kinds, size_t room, jh_queue **queue);
int jh_queue_close(jh_queue *queue);
size_t jh_queue_take(jh_queue *queue, jh_queue_event *out, size_t most);
void jh_queue_get_state(jh_queue *queue, size_t *waiting, uint64_t *lost);
int jh_bench_blocks(size_t size, size_t iterations, int rounds, double *ns);
int jh_bench_tail(jemhooks_arena *arena, size_t size, size_t buffers, double *ns);
int jh_bench_lookups(size_t regions, size_t iterations, int rounds, double *ns, size_t *made);

/* registrars written in Python */
extern "Python" int jh_py_register(void *self, void *address, size_t length, unsigned access, jemhooks_mr *mr);
extern "Python" int jh_py_deregister(void *self, jemhooks_mr *mr);
extern "Python" void jh_py_limits(void *self, jemhooks_limits *limits);
extern "Python" void jh_py_close(void *self);

/* null */
typedef struct {
    size_t size;
    uint64_t max_mr, max_mr_size, fail_at, fail_deregister_at;
    int fail_errno, fail_deregister_errno, remote_offset;
    ...;
} jemhooks_null_config;
typedef struct {
    uint64_t sequence, address, length, lkey;
    uint32_t op, access;
    int32_t result;
    ...;
} jemhooks_null_call;
typedef struct {
    size_t size;
    uint64_t registers, deregisters, live, live_bytes, live_peak, errors;
} jemhooks_null_stats;
int jemhooks_null_get_stats(jemhooks_registrar *registrar, jemhooks_null_stats *stats);
int jemhooks_null_get_calls(jemhooks_registrar *registrar, jemhooks_null_call *calls, size_t *count);
int jemhooks_null_fail(jemhooks_registrar *registrar, int op, uint64_t nth, int error);

/* uring */
typedef struct { size_t size; unsigned slots; } jemhooks_uring_config;
typedef struct { int fd; uint32_t slot; uint64_t base, address, length, file_offset; } jemhooks_uring_transfer;
int64_t jemhooks_uring_read(jemhooks_registrar *registrar, const jemhooks_uring_transfer *transfer);
int64_t jemhooks_uring_write(jemhooks_registrar *registrar, const jemhooks_uring_transfer *transfer);

/* ucx */
typedef struct { size_t size; struct ucp_context *context; } jemhooks_ucx_config;
typedef struct { size_t size; struct ucp_context *context; char version[32]; int32_t own, shared; } jemhooks_ucx_info;
int jemhooks_ucx_get_info(jemhooks_registrar *registrar, jemhooks_ucx_info *info);
int jemhooks_ucx_detach(jemhooks_registrar *registrar);

/* verbs */
typedef struct { size_t size; const char *device; ...; } jemhooks_verbs_config;
typedef struct {
    size_t size;
    uint64_t max_mr_size, max_mr;
    char device[64];
    int32_t atomics, on_demand, fork;
    uint32_t ports;
    ...;
} jemhooks_verbs_info;
int jemhooks_verbs_get_info(jemhooks_registrar *registrar, jemhooks_verbs_info *info);

/* fabric */
typedef struct {
    size_t size;
    const char *provider, *node, *service, *domain;
    unsigned max_outstanding;
} jemhooks_fabric_config;
typedef struct {
    size_t size;
    char provider[64], domain[64];
    uint64_t mr_mode, max_msg_size, mr_key_size, max_mr;
    uint32_t version;
    int32_t manual_progress, virtual_addresses, packed_keys;
    uint32_t max_outstanding, outstanding;
} jemhooks_fabric_info;
int jemhooks_fabric_get_info(jemhooks_registrar *registrar, jemhooks_fabric_info *info);
int jemhooks_fabric_address(jemhooks_registrar *registrar, void *buffer, size_t *length);
int jemhooks_fabric_connect(jemhooks_registrar *registrar, const void *address, size_t length, uint64_t *peer);
int jemhooks_fabric_put(jemhooks_registrar *registrar, uint64_t peer, const void *local, uint64_t lkey, size_t length,
                        uint64_t remote, uint64_t rkey, uint64_t *ticket);
int jemhooks_fabric_get(jemhooks_registrar *registrar, uint64_t peer, void *local, uint64_t lkey, size_t length,
                        uint64_t remote, uint64_t rkey, uint64_t *ticket);
int jemhooks_fabric_wait(jemhooks_registrar *registrar, uint64_t ticket, int timeout_ms);
int jemhooks_fabric_forget(jemhooks_registrar *registrar, uint64_t ticket);
int jemhooks_fabric_progress(jemhooks_registrar *registrar, int timeout_ms);
