/*
 * The plugin of nbdkit that exports a volume by NBD: nbdkit forebay [volume=]NAME [pool=DIRECTORY]
 *
 * A request is a put or a get of libforebay.so, on the thread that nbdkit serves it with: any number at a time, of any
 * number of connections. A put is done when it returns, wherever its piece is. So a flush by one connection covers the
 * writes that others have had answered, as NBD_FLAG_CAN_MULTI_CONN promises.
 *
 * Tests: crates/cli/tests/volume_exports.rs.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 */
#define NBDKIT_API_VERSION 2

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <nbdkit-plugin.h>

#include "forebay.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

enum { WORDS_BYTES = 1024, ZERO_BYTES = 1 << 20 };

static char *directory;
static char *specifier;
static forebay_pool *pool;
/* Open as long as it is exported: nobody deletes it while no client is connected. */
static forebay_volume *exported;
static const char zeros[ZERO_BYTES];

/* A connection. */
struct connection {
    forebay_volume *volume;
    int is_writable;
};

/* Reports a failed call. Returns -1. */
static int failed(const char *what, int error)
{
    char words[WORDS_BYTES] = "";
    if (forebay_attach_error(words, sizeof words) == 0)
        nbdkit_error("cannot %s volume %s: %s", what, specifier, forebay_strerror(error));
    else
        nbdkit_error("cannot %s volume %s: %s", what, specifier, words);
    nbdkit_set_error(-error);
    return -1;
}

static int keep(char **place, char *value)
{
    if (value == NULL)
        return -1;
    free(*place);
    *place = value;
    return 0;
}

static char *copied(const char *value)
{
    char *copy = strdup(value);
    if (copy == NULL)
        nbdkit_error("cannot copy an argument: %m");
    return copy;
}

static int plugin_config(const char *key, const char *value)
{
    if (strcmp(key, "volume") == 0)
        return keep(&specifier, copied(value));
    if (strcmp(key, "pool") == 0)
        return keep(&directory, nbdkit_absolute_path(value));
    nbdkit_error("there is no parameter '%s': they are volume and pool", key);
    return -1;
}

static int plugin_config_complete(void)
{
    if (specifier != NULL)
        return 0;
    nbdkit_error("no volume is named: nbdkit forebay NAME");
    return -1;
}

static void plugin_unload(void)
{
    if (exported != NULL)
        forebay_volume_close(exported);
    free(specifier);
    free(directory);
}

/* Opens the volume, for reading alone where it may not be written. Returns -1 after a failure. */
static int opened(struct connection *c, int readonly)
{
    int error = readonly ? -EACCES : forebay_volume_open(pool, specifier, O_RDWR, &c->volume);
    c->is_writable = error == 0;
    if (error == -EACCES)
        error = forebay_volume_open(pool, specifier, O_RDONLY, &c->volume);
    return error < 0 ? failed("open", error) : 0;
}

/* nbdkit goes to the background before this. What cannot be exported is refused at the start. */
static int plugin_after_fork(void)
{
    struct connection c;
    int error = forebay_attach(directory, &pool);
    if (error < 0)
        return failed("attach to the pool of", error);
    if (opened(&c, 0) < 0)
        return -1;
    exported = c.volume;
    return 0;
}

static void *plugin_open(int readonly)
{
    struct connection *c = malloc(sizeof *c);
    if (c == NULL) {
        nbdkit_error("no memory for a connection: %m");
        return NULL;
    }
    if (opened(c, readonly) == 0)
        return c;
    free(c);
    return NULL;
}

static void plugin_close(void *handle)
{
    struct connection *c = handle;
    forebay_volume_close(c->volume);
    free(c);
}

static int64_t plugin_get_size(void *handle)
{
    struct connection *c = handle;
    int64_t bytes = forebay_volume_size(c->volume);
    return bytes < 0 ? failed("look at", (int)bytes) : bytes;
}

static int plugin_can_write(void *handle)
{
    struct connection *c = handle;
    return c->is_writable;
}

static int yes(void *handle)
{
    (void)handle;
    return 1;
}

static int no(void *handle)
{
    (void)handle;
    return 0;
}

/* The space of a volume is reserved, and nothing is trimmed, unless it is thin. */
static int plugin_can_trim(void *handle)
{
    struct connection *c = handle;
    return c->is_writable && forebay_volume_discard(c->volume, 0, 0) == 0;
}

static int plugin_pread(void *handle, void *to, uint32_t bytes, uint64_t offset, uint32_t flags)
{
    struct connection *c = handle;
    (void)flags;
    int error = forebay_volume_get(c->volume, to, bytes, (int64_t)offset);
    return error < 0 ? failed("read", error) : 0;
}

static int plugin_pwrite(void *handle, const void *from, uint32_t bytes, uint64_t offset, uint32_t flags)
{
    struct connection *c = handle;
    (void)flags;
    int error = forebay_volume_put(c->volume, from, bytes, (int64_t)offset);
    return error < 0 ? failed("write", error) : 0;
}

static int plugin_trim(void *handle, uint32_t bytes, uint64_t offset, uint32_t flags)
{
    struct connection *c = handle;
    (void)flags;
    int error = forebay_volume_discard(c->volume, (int64_t)offset, bytes);
    return error < 0 ? failed("trim", error) : 0;
}

static int plugin_zero(void *handle, uint32_t bytes, uint64_t offset, uint32_t flags)
{
    struct connection *c = handle;
    if (flags & NBDKIT_FLAG_MAY_TRIM && plugin_can_trim(handle))
        return plugin_trim(handle, bytes, offset, flags);
    if (flags & NBDKIT_FLAG_FAST_ZERO) {
        nbdkit_set_error(EOPNOTSUPP); /* as slow as a write */
        return -1;
    }
    while (bytes > 0) {
        uint32_t n = bytes < ZERO_BYTES ? bytes : ZERO_BYTES;
        int error = forebay_volume_put(c->volume, zeros, n, (int64_t)offset);
        if (error < 0)
            return failed("set zeros in", error);
        offset += n;
        bytes -= n;
    }
    return 0;
}

static int plugin_flush(void *handle, uint32_t flags)
{
    struct connection *c = handle;
    (void)flags;
    int error = forebay_volume_flush(c->volume);
    return error < 0 ? failed("flush", error) : 0;
}

static struct nbdkit_plugin plugin = {
    .name = "forebay",
    .longname = "Forebay volumes",
    .description = "Exports a volume of a Forebay pool: memory of one or several nodes.",
    .magic_config_key = "volume",
    .config_help = "[volume=]NAME      The volume, or a specifier: NODE:VOLUME+NODE:VOLUME (required).\n"
                   "pool=DIRECTORY     The directory of the pool (default: $FOREBAY_POOL).",
    .unload = plugin_unload,
    .config = plugin_config,
    .config_complete = plugin_config_complete,
    .after_fork = plugin_after_fork,
    .open = plugin_open,
    .close = plugin_close,
    .get_size = plugin_get_size,
    .can_write = plugin_can_write,
    .can_flush = yes,
    .can_zero = yes,
    .can_trim = plugin_can_trim,
    .can_multi_conn = yes,
    .is_rotational = no,
    .pread = plugin_pread,
    .pwrite = plugin_pwrite,
    .trim = plugin_trim,
    .zero = plugin_zero,
    .flush = plugin_flush,
};

NBDKIT_REGISTER_PLUGIN(plugin)
