/* Volumes, memory for them and asynchronous calls of forebay.h; a part of interface.c, which defines CHECK. */
/* Volumes: `v` of 4 MiB and `w` of 2 MiB, which the harness has made. */
static void volumes(forebay_pool *pool)
{
    enum { V = 4 << 20, W = 2 << 20 };
    forebay_volume *v = NULL, *both = NULL, *none = NULL, *reader = NULL, *thin = NULL;
    char out[100], in[100], words[256];
    struct forebay_run runs[] = {{4090, 30}, {0, 10}, {(1 << 20) - 5, 10}}, beyond = {V - 4, 10};
    uint64_t was = 9, *word;
    void *place = NULL;
    size_t follow = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i + 1);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_size(v) == V);
    CHECK(forebay_volume_open(pool, "none", O_RDWR, &none) == -ENOENT && none == NULL);
    CHECK(forebay_volume_open(pool, "v+1.7:w", O_RDWR, &none) == -EINVAL);
    CHECK(forebay_attach_error(words, sizeof words) > 0 && strstr(words, "specifier 2, `1.7`"));
    CHECK(forebay_volume_open(pool, "v", O_WRONLY, &none) == -EINVAL);
    CHECK(forebay_volume_open(pool, NULL, O_RDWR, &none) == -EFAULT && forebay_volume_open(pool, "v", O_RDWR, NULL) == -EFAULT);

    CHECK(forebay_volume_put(v, out, sizeof out, 5000) == 0 && forebay_volume_get(v, in, sizeof in, 5000) == 0);
    CHECK(memcmp(in, out, sizeof in) == 0);
    CHECK(forebay_volume_putv(v, out, 50, runs, 3) == 0 && forebay_volume_getv(v, in, 50, runs, 3) == 0);
    CHECK(memcmp(in, out, 50) == 0 && forebay_volume_get(v, in, 10, 0) == 0 && memcmp(in, out + 30, 10) == 0);
    CHECK(forebay_volume_put(v, out, 2, V - 1) == -ERANGE && forebay_volume_get(v, in, 1, V) == -ERANGE);
    CHECK(forebay_attach_error(words, sizeof words) == 0); /* not the reason of a call before */
    CHECK(forebay_volume_put(v, out, 1, -1) == -EINVAL && forebay_volume_put(v, NULL, 1, 0) == -EFAULT);
    CHECK(forebay_volume_putv(v, out, 10, &beyond, 1) == -ERANGE && forebay_volume_putv(v, out, 49, runs, 3) == -EINVAL);
    CHECK(forebay_volume_getv(v, in, 9, runs + 1, 1) == -EINVAL && forebay_volume_put(NULL, out, 1, 0) == -EFAULT);

    CHECK(forebay_volume_swap(v, 64, 40, &was) == 0 && was == 0);
    CHECK(forebay_volume_fetch_add(v, 64, 2, &was) == 0 && was == 40);
    CHECK(forebay_volume_cas(v, 64, 7, 8, &was) == 0 && was == 42);
    CHECK(forebay_volume_cas(v, 64, 42, 8, &was) == 0 && was == 42);
    CHECK(forebay_volume_cas(v, 65, 0, 0, &was) == -EINVAL && forebay_volume_swap(v, V, 0, &was) == -ERANGE && was == 42);
    CHECK(forebay_volume_fetch_add(v, 64, 1, NULL) == -EFAULT);
    CHECK(forebay_volume_fence(v) == 0 && forebay_volume_flush(v) == 0);
    CHECK(forebay_volume_discard(v, 0, 0) == -EOPNOTSUPP && forebay_volume_discard(v, 0, 4096) == -EOPNOTSUPP);
    CHECK(forebay_volume_open(pool, "thin", O_RDWR, &thin) == 0 && forebay_volume_size(thin) == (int64_t)1 << 40);
    CHECK(forebay_volume_put(thin, out, 10, (int64_t)1 << 39) == 0);
    CHECK(forebay_volume_get(thin, in, 12, ((int64_t)1 << 39) - 1) == 0 && in[0] == 0 && memcmp(in + 1, out, 10) == 0);
    CHECK(forebay_volume_discard(thin, 0, 0) == 0 && forebay_volume_discard(thin, (int64_t)1 << 39, 4096) == 0);
    CHECK(forebay_volume_get(thin, in, 12, (int64_t)1 << 39) == 0 && in[0] == 0 && in[9] == 0);
    CHECK(forebay_volume_discard(thin, ((int64_t)1 << 40) - 1, 2) == -ERANGE);
    CHECK(forebay_volume_swap(thin, 0, 1, &was) == -EOPNOTSUPP);
    CHECK(forebay_volume_map(thin, 0, &place, &follow) == -EOPNOTSUPP && forebay_volume_close(thin) == 0);
    CHECK(forebay_volume_map(v, 64, &place, &follow) == 0 && follow == V - 64);
    word = place;
    CHECK(word && *word == 8);
    CHECK(forebay_volume_map(v, V, &place, &follow) == -ERANGE);

    CHECK(forebay_volume_open(pool, "v", O_RDONLY, &reader) == 0);
    CHECK(forebay_volume_put(reader, out, 1, 0) == -EBADF && forebay_volume_swap(reader, 0, 1, &was) == -EBADF);
    CHECK(forebay_volume_get(reader, in, 10, 0) == 0 && memcmp(in, out + 30, 10) == 0);
    CHECK(forebay_volume_open(pool, "w+1:v", O_RDWR, &both) == 0 && forebay_volume_size(both) == 2 * W);
    CHECK(forebay_volume_put(both, out, 10, (1 << 20) - 5) == 0 && forebay_volume_get(v, in, 5, 0) == 0);
    CHECK(memcmp(in, out + 5, 5) == 0);

    /* A child has the volumes of its parent. */
    pid_t child = fork();
    if (child == 0)
        _exit(forebay_volume_fetch_add(v, 128, 5, &was) != 0 || forebay_volume_close(v) != 0);
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0 && forebay_volume_fetch_add(v, 128, 0, &was) == 0 && was == 5);
    CHECK(forebay_volume_close(v) == 0 && forebay_volume_close(both) == 0 && forebay_volume_close(reader) == 0);
    CHECK(forebay_volume_close(NULL) == -EFAULT);
}

/* Memory of the pool and of the program for puts and gets. */
static void memory_for_transfers(forebay_pool *pool)
{
    enum { SIZE = 100000, PAGES = 102400, RANGES = 256, STARTED = 16 };
    forebay_volume *v = NULL;
    forebay_queue *queue = NULL;
    struct forebay_completion done[STARTED];
    static char own[SIZE];
    void *memory = NULL, *other = NULL, *all[RANGES];
    struct forebay_run runs[] = {{4096, 40000}, {200000, SIZE - 40000}};
    int error, started = 0;

    CHECK(forebay_alloc(NULL, SIZE, &memory) == -EFAULT && forebay_alloc(pool, SIZE, NULL) == -EFAULT);
    CHECK(forebay_alloc(pool, 0, &memory) == -EINVAL && memory == NULL);
    CHECK(forebay_alloc(pool, ((size_t)1 << 32) + 1, &memory) == -ENOMEM);
    CHECK(forebay_alloc(pool, SIZE_MAX, &memory) == -ENOMEM && memory == NULL);
    CHECK(forebay_alloc(pool, SIZE, &memory) == 0 && memory && (uintptr_t)memory % 4096 == 0);
    CHECK(forebay_alloc(pool, SIZE, &other) == 0 && other != memory && *(char *)other == 0);
    if (!memory || !other)
        return;

    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0);
    for (int i = 0; i < SIZE; i++)
        ((char *)memory)[i] = (char)(i * 7);
    CHECK(forebay_volume_put(v, memory, SIZE, 3) == 0 && forebay_volume_get(v, other, SIZE, 3) == 0);
    CHECK(memcmp(memory, other, SIZE) == 0);
    CHECK(forebay_volume_putv(v, memory, SIZE, runs, 2) == 0 && forebay_volume_getv(v, own, SIZE, runs, 2) == 0);
    CHECK(memcmp(memory, own, SIZE) == 0);
    /* The last byte of its last page, and the one behind it. */
    CHECK(forebay_volume_get(v, (char *)memory + 400, PAGES - 400, 0) == 0);
    CHECK(forebay_volume_get(v, (char *)memory + 400, PAGES - 399, 0) == -EFAULT);
    CHECK(forebay_volume_put(v, (char *)memory + PAGES - 1, 2, 0) == -EFAULT);
    CHECK(forebay_volume_getv(v, memory, 2 * SIZE, runs, 2) == -EFAULT);

    CHECK(forebay_register(NULL, own, SIZE) == -EFAULT && forebay_register(pool, NULL, SIZE) == -EFAULT);
    CHECK(forebay_register(pool, own, 0) == -EINVAL && forebay_register(pool, own, SIZE_MAX) == -EINVAL);
    CHECK(forebay_register(pool, (char *)memory + 5, 10) == -EEXIST);
    void *gone = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(gone, 65536);
    CHECK(forebay_register(pool, gone, 65536) == -EFAULT);
    CHECK(forebay_register(pool, own, SIZE) == 0 && forebay_register(pool, own + SIZE - 1, 2) == -EEXIST);
    CHECK(forebay_volume_put(v, own, SIZE, 9) == 0 && forebay_volume_get(v, other, SIZE, 9) == 0);
    CHECK(memcmp(own, other, SIZE) == 0);
    CHECK(forebay_free(own) == -EINVAL && forebay_unregister(memory) == -EINVAL);
    CHECK(forebay_unregister(own + 1) == -EINVAL && forebay_unregister(NULL) == -EFAULT);
    CHECK(forebay_unregister(own) == 0 && forebay_unregister(own) == -EINVAL);

    /* Memory of calls in progress is freed when they have ended, or is not freed. */
    CHECK(forebay_queue_create(0, &queue) == 0);
    for (; started < STARTED; started++)
        CHECK(forebay_volume_put_start(v, memory, SIZE, 4096, queue, NULL) == 0);
    CHECK(forebay_volume_put_start(v, memory, PAGES + 1, 0, queue, NULL) == -EFAULT);
    error = forebay_free(memory);
    CHECK(error == 0 || error == -EBUSY);
    for (int n = 1; started > 0 && n > 0; started -= n) {
        n = forebay_queue_wait(queue, done, STARTED, -1);
        for (int i = 0; i < n; i++)
            CHECK(done[i].result == 0);
    }
    CHECK(error == 0 || forebay_free(memory) == 0);
    CHECK(forebay_free(memory) == -EINVAL && forebay_free(NULL) == -EFAULT && forebay_free(&error) == -EINVAL);
    CHECK(forebay_free((char *)other + 4096) == -EINVAL && forebay_free(other) == 0);

    for (int i = 0; i < RANGES; i++)
        CHECK(forebay_alloc(pool, 1, &all[i]) == 0);
    CHECK(forebay_alloc(pool, 1, &other) == -EMFILE && forebay_register(pool, own, 1) == -EMFILE);
    for (int i = 0; i < RANGES; i++)
        CHECK(forebay_free(all[i]) == 0);
    CHECK(forebay_alloc(pool, 1, &other) == 0 && forebay_free(other) == 0);
    CHECK(forebay_queue_close(queue) == 0 && forebay_volume_close(v) == 0);
}

/* A page that no thread may access until the test has released it: one that does waits. */
static struct {
    char *page;
    _Atomic int reached, released;
} held;

static void wait_at_page(int number, siginfo_t *info, void *context)
{
    (void)context;
    if ((char *)info->si_addr < held.page || (char *)info->si_addr >= held.page + 4096) {
        signal(number, SIG_DFL); /* another fault */
        return;
    }
    held.reached = 1;
    while (!held.released)
        usleep(100);
}

static void hold(char *page)
{
    held.page = page;
    held.reached = held.released = 0;
    if (mprotect(page, 4096, PROT_NONE) != 0)
        abort();
}

static void release(void)
{
    if (mprotect(held.page, 4096, PROT_READ | PROT_WRITE) != 0)
        abort();
    held.released = 1;
}

enum { PUT, GET, PUTV, GETV, KINDS, HELD_BYTES = 65536 };

struct held_call {
    int kind, result;
    forebay_volume *volume;
    char *memory;
};

static void *execute(void *argument)
{
    struct held_call *call = argument;
    struct forebay_run runs[] = {{4096, 40000}, {200000, HELD_BYTES - 40000}};

    switch (call->kind) {
    case PUT:
        call->result = forebay_volume_put(call->volume, call->memory, HELD_BYTES, 0);
        break;
    case GET:
        call->result = forebay_volume_get(call->volume, call->memory, HELD_BYTES, 0);
        break;
    case PUTV:
        call->result = forebay_volume_putv(call->volume, call->memory, HELD_BYTES, runs, 2);
        break;
    default:
        call->result = forebay_volume_getv(call->volume, call->memory, HELD_BYTES, runs, 2);
    }
    return NULL;
}

/* As a callback, takes an I/O thread of the library until the test has released the page. */
static void wait_for_release(void *state, int64_t result)
{
    (void)result;
    *(_Atomic int *)state += 1;
    while (!held.released)
        usleep(100);
}

/* Memory counts as used for as long as a call on it runs, or waits for an I/O thread. */
static void memory_of_calls(forebay_pool *pool)
{
    enum { IO_THREADS = 4 };
    struct sigaction action = {.sa_sigaction = wait_at_page, .sa_flags = SA_SIGINFO}, before;
    struct forebay_completion done;
    forebay_volume *v = NULL;
    forebay_queue *queue = NULL;
    forebay_file *file = NULL;
    void *memory = NULL;
    char *own = mmap(NULL, HELD_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static _Atomic int waiting;

    waiting = 0;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &before);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_queue_create(0, &queue) == 0);
    CHECK(forebay_alloc(pool, HELD_BYTES, &memory) == 0 && forebay_register(pool, own, HELD_BYTES) == 0);
    CHECK(forebay_file_open(pool, "held", O_RDWR | O_CREAT, 0600, 1, 4096, &file) == 0);
    for (int i = 0; i < 2 * KINDS; i++) {
        struct held_call call = {i % KINDS, 1, v, i < KINDS ? memory : own};
        pthread_t thread;

        hold(call.memory + 2 * 4096);
        if (pthread_create(&thread, NULL, execute, &call) != 0)
            abort();
        while (!held.reached)
            usleep(100);
        CHECK((i < KINDS ? forebay_free(memory) : forebay_unregister(own)) == -EBUSY);
        release();
        pthread_join(thread, NULL);
        CHECK(call.result == 0);
    }
    sigaction(SIGSEGV, &before, NULL);

    held.released = 0;
    for (int i = 0; i < IO_THREADS; i++)
        CHECK(forebay_file_write_start(file, own, 1, i, wait_for_release, &waiting, NULL) == 0);
    while (waiting < IO_THREADS)
        usleep(100);
    CHECK(forebay_volume_put_start(v, memory, HELD_BYTES, 0, queue, NULL) == 0);
    CHECK(forebay_volume_get_start(v, own, HELD_BYTES, 0, queue, NULL) == 0);
    CHECK(forebay_free(memory) == -EBUSY && forebay_unregister(own) == -EBUSY);
    held.released = 1;
    for (int i = 0; i < 2; i++)
        CHECK(forebay_queue_wait(queue, &done, 1, -1) == 1 && done.result == 0);
    CHECK(forebay_free(memory) == 0 && forebay_unregister(own) == 0);
    CHECK(forebay_queue_close(queue) == 0 && forebay_volume_close(v) == 0 && forebay_file_close(file) == 0);
    munmap(own, HELD_BYTES);
}

/* Asynchronous calls end once each, with the result of the call, in a queue that waits or spins. */
static void asynchronous(forebay_pool *pool, int flags)
{
    enum { V = 4 << 20, CALLS = 64, BYTES = 50000 };
    static char out[CALLS * BYTES], in[CALLS * BYTES];
    struct forebay_completion done[CALLS];
    forebay_volume *v = NULL, *reader = NULL;
    forebay_queue *queue = NULL, *none = NULL;
    int ended[CALLS] = {0}, count = 0, n;
    uint64_t sum = 0, was = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i * 7 + (size_t)flags);
    CHECK(forebay_queue_create(8, &none) == -EINVAL && none == NULL && forebay_queue_create(flags, NULL) == -EFAULT);
    CHECK(forebay_queue_create(flags, &queue) == 0);
    struct pollfd event = {.fd = forebay_queue_descriptor(queue), .events = POLLIN};
    CHECK(poll(&event, 1, 0) == 0 && forebay_queue_wait(queue, done, CALLS, -1) == 0);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_open(pool, "v", O_RDONLY, &reader) == 0);
    for (int i = 0; i < CALLS; i++)
        CHECK(forebay_volume_put_start(v, out + i * BYTES, BYTES, 4096 + i * BYTES, queue, &ended[i]) == 0);
    while (count < CALLS) {
        CHECK(poll(&event, 1, 60000) == 1);
        CHECK((n = forebay_queue_wait(queue, done, 3, -1)) >= 1 && n <= 3);
        for (int i = 0; i < n; i++) {
            CHECK(done[i].result == 0);
            ++*(int *)done[i].state;
        }
        if (n <= 0)
            break;
        count += n;
    }
    for (int i = 0; i < CALLS; i++)
        CHECK(ended[i] == 1);
    CHECK(poll(&event, 1, 0) == 0 && forebay_queue_wait(queue, done, CALLS, 0) == 0);
    CHECK(forebay_volume_get(v, in, sizeof in, 4096) == 0 && memcmp(in, out, sizeof in) == 0);
    memset(in, 0, sizeof in);
    for (int i = 0; i < CALLS; i++)
        CHECK(forebay_volume_get_start(reader, in + i * BYTES, BYTES, 4096 + i * BYTES, queue, NULL) == 0);
    for (count = 0; count < CALLS && (n = forebay_queue_wait(queue, done, CALLS, 60000)) > 0; count += n)
        ;
    CHECK(count == CALLS && memcmp(in, out, sizeof in) == 0);

    CHECK(forebay_volume_swap(v, 0, 0, &was) == 0);
    for (int i = 0; i < 32; i++)
        CHECK(forebay_volume_fetch_add_start(v, 0, 1, queue, NULL) == 0);
    for (count = 0; count < 32 && (n = forebay_queue_wait(queue, done, CALLS, -1)) > 0; count += n)
        for (int i = 0; i < n; i++)
            sum += done[i].was;
    CHECK(count == 32 && sum == 31 * 32 / 2);
    CHECK(forebay_volume_cas_start(v, 0, 32, 5, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == 0 && done[0].was == 32);
    CHECK(forebay_volume_swap_start(v, 0, 6, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].was == 5 && forebay_volume_fetch_add(v, 0, 0, &was) == 0 && was == 6);

    /* A call that fails completes, with the error. */
    CHECK(forebay_volume_put_start(v, out, 2, V - 1, queue, out) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -ERANGE && done[0].state == out);
    CHECK(forebay_volume_put_start(reader, out, 1, 0, queue, in) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -EBADF && done[0].state == in);
    CHECK(forebay_volume_swap_start(v, 4, 0, queue, NULL) == 0 && forebay_queue_wait(queue, done, 1, -1) == 1);
    CHECK(done[0].result == -EINVAL);
    CHECK(forebay_volume_put_start(v, NULL, 1, 0, queue, NULL) == -EFAULT);
    CHECK(forebay_volume_put_start(v, out, 1, -1, queue, NULL) == -EINVAL);
    CHECK(forebay_volume_put_start(v, out, 1, 0, NULL, NULL) == -EFAULT);
    CHECK(forebay_queue_wait(queue, NULL, 1, 0) == -EFAULT && forebay_queue_wait(queue, done, 0, 0) == -EINVAL);

    /* To close the volume and the queue does not take the memory from a call. */
    CHECK(forebay_volume_put_start(v, out + 5, sizeof out - 5, 0, queue, NULL) == 0);
    CHECK(forebay_volume_close(v) == 0 && forebay_queue_close(queue) == 0 && forebay_queue_close(NULL) == -EFAULT);
    CHECK(forebay_volume_get(reader, in, sizeof in - 5, 0) == 0 && memcmp(in, out + 5, sizeof in - 5) == 0);
    CHECK(forebay_volume_close(reader) == 0);
}

/* The file in a volume, by the functions on files. */
static void volume_files(forebay_pool *pool)
{
    enum { V = 4 << 20, W = 2 << 20 };
    forebay_file *file = NULL, *same = NULL, *none = NULL, *joined = NULL;
    forebay_volume *v = NULL;
    char out[100], in[100] = "", words[256];
    struct iovec parts[] = {{out, 30}, {out + 30, 70}}, into[] = {{in, 99}, {in + 99, 1}};
    struct forebay_run runs[] = {{5000, 60}, {100, 40}}, beyond = {V - 99, 100};
    uint64_t number = 0, again = 0, group = 0;
    uint32_t count = 0, unit = 0;

    for (size_t i = 0; i < sizeof out; i++)
        out[i] = (char)(i + 1);
    CHECK(forebay_volume_open(pool, "v", O_RDWR, &v) == 0 && forebay_volume_get(v, in, 10, 0) == 0);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, &file) == 0 && forebay_file_size(file) == 0);
    CHECK(forebay_file_pread(file, in, 10, 0) == 0); /* puts move no end */
    CHECK(forebay_file_truncate(file, V) == 0 && forebay_file_truncate(file, 0) == 0);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_CREAT | O_EXCL, &none) == -EEXIST && none == NULL);
    CHECK(forebay_volume_file_open(pool, "none", O_RDWR | O_CREAT, &none) == -ENOENT);
    CHECK(forebay_attach_error(words, sizeof words) > 0 && strstr(words, "no volume `none`"));
    CHECK(forebay_volume_file_open(pool, "1.7:v", O_RDWR, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDONLY | O_CREAT, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_APPEND, &none) == -EINVAL);
    CHECK(forebay_volume_file_open(pool, NULL, O_RDWR, &none) == -EFAULT);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, NULL) == -EFAULT && none == NULL);

    CHECK(forebay_file_write_runs(file, parts, 2, runs, 2) == 100 && forebay_file_size(file) == 5060);
    CHECK(forebay_file_read_runs(file, into, 2, runs, 2) == 100 && memcmp(in, out, 100) == 0);
    CHECK(forebay_volume_get(v, in, 60, 5000) == 0 && memcmp(in, out, 60) == 0);
    CHECK(forebay_file_write_runs(file, parts, 2, &beyond, 1) == -ENOSPC && forebay_file_size(file) == 5060);
    CHECK(forebay_file_truncate(file, V + 1) == -ENOSPC && forebay_file_allocate(file, V + 1) == -ENOSPC);
    CHECK(forebay_file_write_runs(file, parts, 2, runs, 1) == -EINVAL);
    CHECK(forebay_file_pwrite(file, out, 10, 5055) == 10 && forebay_file_size(file) == 5065);
    CHECK(forebay_file_pread(file, in, 100, 5060) == 5 && memcmp(in, out + 5, 5) == 0);
    CHECK(forebay_file_pwritev(file, parts, 2, 6000) == 100 && forebay_file_preadv(file, into, 2, 5950) == 100);
    CHECK(in[0] == 0 && in[49] == 0 && memcmp(in + 50, out, 50) == 0);
    CHECK(forebay_file_allocate(file, 7000) == 0 && forebay_file_size(file) == 7000 && forebay_file_sync(file) == 0);
    CHECK(forebay_file_seek_data(file, 100) == 100 && forebay_file_seek_hole(file, 100) == 7000);
    CHECK(forebay_file_seek_data(file, 7000) == -ENXIO && forebay_file_seek_hole(file, 7000) == -ENXIO);
    CHECK(forebay_file_punch(file, 6010, 1 << 20) == 0 && forebay_file_size(file) == 7000);
    CHECK(forebay_file_pread(file, in, 100, 6000) == 100 && memcmp(in, out, 10) == 0 && in[10] == 0 && in[99] == 0);
    CHECK(forebay_file_advise(file, FOREBAY_SEQUENTIAL) == 0 && forebay_file_advise(file, 77) == -EINVAL);
    CHECK(forebay_file_fd(file) == -EOPNOTSUPP && forebay_file_elsewhere(file) == 0);
    CHECK(forebay_file_group_make(file, 0, &group) == -EOPNOTSUPP && group == 0);
    CHECK(forebay_file_layout(file, &count, &unit) == 0 && count == 1 && unit == 1 << 20);

    forebay_request *request = NULL;
    CHECK(forebay_file_write_start(file, out, 100, 8000, NULL, NULL, &request) == 0);
    CHECK(forebay_request_wait(request) == 100 && forebay_file_size(file) == 8100);
    CHECK(forebay_file_read_start(file, in, 100, 8050, NULL, NULL, &request) == 0);
    CHECK(forebay_request_wait(request) == 50 && memcmp(in, out + 50, 50) == 0);

    CHECK(forebay_volume_file_open(pool, "v", O_RDONLY, &same) == 0 && forebay_file_size(same) == 8100);
    CHECK(forebay_file_number(file, &number) == 0 && forebay_file_number(same, &again) == 0 && number == again);
    CHECK(forebay_file_number(file, NULL) == -EFAULT);
    CHECK(forebay_file_pwrite(same, out, 1, 0) == -EBADF && forebay_file_truncate(same, 0) == -EBADF);
    CHECK(forebay_volume_file_open(pool, "w+v", O_WRONLY | O_CREAT | O_EXCL, &joined) == 0);
    CHECK(forebay_file_number(joined, &again) == 0 && number != again);
    CHECK(forebay_file_pread(joined, in, 1, 0) == -EBADF && forebay_file_pwrite(joined, out, 2, 2 * W - 2) == 2);
    CHECK(forebay_file_close(joined) == 0 && forebay_volume_file_open(pool, "w", O_RDONLY, &joined) == 0);
    CHECK(forebay_file_size(joined) == W); /* the end is behind this volume alone */
    CHECK(forebay_file_close(joined) == 0 && forebay_file_close(same) == 0);

    CHECK(forebay_volume_file_open(pool, "v", O_RDWR | O_TRUNC, &same) == 0 && forebay_file_size(file) == 0);
    CHECK(forebay_volume_get(v, in, 100, 8000) == 0 && in[0] == 0 && in[99] == 0);
    CHECK(forebay_file_close(same) == 0 && forebay_file_close(file) == 0 && forebay_volume_close(v) == 0);
    CHECK(forebay_volume_file_unlink(pool, "v") == 0 && forebay_volume_file_unlink(pool, "v") == -ENOENT);
    CHECK(forebay_volume_file_unlink(pool, NULL) == -EFAULT && forebay_volume_file_unlink(pool, "") == -EINVAL);
    CHECK(forebay_volume_file_open(pool, "v", O_RDWR, &none) == -ENOENT && none == NULL);
}
