/* The driver's imports: functions and objects of the loaded MPI library, libforebay.so, and the environment. */
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct native mpi;
#ifdef OPEN_MPI
struct native_objects native_objects;
#endif
struct forebay forebay;

static char library[4096 + 32];
static char prefix[4096];
static char volume_prefixes[1024]; /* further names before a colon, separated by commas */
static bool wants_debug;
static pthread_once_t attach_once = PTHREAD_ONCE_INIT;
static forebay_pool *attached;

bool native_find(void *handle) {
    bool found = true;
#define NAMED(field, name) found = (*(void **)&mpi.field = dlsym(handle, "PMPI_" name)) != NULL && found;
#define X(name) NAMED(name, #name)
    NATIVE_FUNCTIONS(X)
#undef X
#if MPI_VERSION >= 4
    NAMED(Type_get_envelope, "Type_get_envelope_c")
    NAMED(Type_get_contents, "Type_get_contents_c")
#else
    NAMED(Type_get_envelope, "Type_get_envelope")
    NAMED(Type_get_contents, "Type_get_contents")
#endif
#ifdef OPEN_MPI
    NAMED(Errhandler_f2c, "Errhandler_f2c")
    NAMED(Type_c2f, "Type_c2f")
    /* A program that uses such an object contains a copy of it, made by the linker, and the library uses that copy. */
#define X(name)                                                                                                        \
    native_objects.name = dlsym(RTLD_DEFAULT, #name);                                                                  \
    if (native_objects.name == NULL)                                                                                   \
        native_objects.name = dlsym(handle, #name);                                                                    \
    found = native_objects.name != NULL && found;
    NATIVE_OBJECTS(X)
#undef X
#endif
    return found;
}

/* The prefix without empty components and without a slash at its end. */
static void read_prefix(void) {
    const char *wanted = getenv("FOREBAY_PREFIX");
    if (wanted == NULL || *wanted == 0)
        wanted = "/forebay";
    size_t bytes = 0;
    while (*wanted != 0 && bytes + 2 < sizeof prefix) {
        while (*wanted == '/')
            wanted++;
        if (*wanted == 0)
            break;
        prefix[bytes++] = '/';
        while (*wanted != 0 && *wanted != '/' && bytes + 1 < sizeof prefix)
            prefix[bytes++] = *wanted++;
    }
    prefix[bytes] = 0;
}

void forebay_found_at(const char *directory) {
    snprintf(library, sizeof library, "%slibforebay.so", directory);
    read_prefix();
    const char *more = getenv("FOREBAY_MPI_PREFIX");
    snprintf(volume_prefixes, sizeof volume_prefixes, "%s", more != NULL ? more : "");
    const char *wanted = getenv("FOREBAY_MPI_DEBUG");
    wants_debug = wanted != NULL && *wanted != 0 && strcmp(wanted, "0") != 0;
}

bool debug(void) { return wants_debug; }

static void attach(void) {
    /*
     * A process has one libforebay.so: the one that it has loaded already, for example because the program is linked
     * with it; otherwise the one beside this library.
     */
    const char *used = "the libforebay.so that the process has loaded";
    void *handle = dlopen("libforebay.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (handle == NULL) {
        dlerror();
        used = library;
        handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    }
    if (handle == NULL) {
        fprintf(stderr, "forebay: %s\n", dlerror());
        return;
    }
    bool found = true;
#define X(name) found = (*(void **)&forebay.name = dlsym(handle, "forebay_" #name)) != NULL && found;
    FOREBAY_FUNCTIONS(X)
#undef X
    if (!found) {
        fprintf(stderr, "forebay: %s is of another build than the MPI driver; install both together\n", used);
        return;
    }
    if (forebay.attach(NULL, &attached) < 0) {
        char words[1024] = "";
        forebay.attach_error(words, sizeof words);
        fprintf(stderr, "forebay: %s\n", words);
    }
}

forebay_pool *forebay_attached(void) {
    pthread_once(&attach_once, attach);
    return attached;
}

/* Copies an absolute path without empty components and "."; false with "..", which only a path walk can resolve. */
static bool normalise(const char *path, char *out, size_t room) {
    size_t bytes = 0;
    while (*path != 0) {
        while (*path == '/')
            path++;
        size_t length = strcspn(path, "/");
        if (length == 2 && path[0] == '.' && path[1] == '.')
            return false;
        if (length > 0 && !(length == 1 && path[0] == '.')) {
            if (bytes + length + 2 > room)
                return false;
            out[bytes++] = '/';
            memcpy(out + bytes, path, length);
            bytes += length;
        }
        path += length;
    }
    out[bytes] = 0;
    return true;
}

/* What follows `forebay:`, or a prefix of FOREBAY_MPI_PREFIX, with or without its colon there; NULL for other names. */
static const char *after_prefix(const char *name) {
    size_t bytes = strcspn(name, ":");
    if (name[bytes] != ':')
        return NULL;
    if (bytes == 7 && memcmp(name, "forebay", 7) == 0)
        return name + bytes + 1;
    for (const char *at = volume_prefixes; *at != 0;) {
        size_t length = strcspn(at, ","), named = length > 0 && at[length - 1] == ':' ? length - 1 : length;
        if (named > 0 && named == bytes && memcmp(at, name, bytes) == 0)
            return name + bytes + 1;
        at += length + (at[length] != 0);
    }
    return NULL;
}

/* The path in the pool of a name under the pool's prefix; NULL for other names. */
static const char *pool_path(const char *name, char *room) {
    char absolute[8300];
    if (prefix[0] == 0)
        return NULL;
    if (*name != '/') {
        /* The name of a file system at the front, as in ROMIO, is ignored. */
        const char *colon = strchr(name, ':');
        if (colon != NULL && colon[1] == '/' && memchr(name, '/', colon - name) == NULL)
            name = colon + 1;
    }
    if (*name != '/') {
        char here[4096];
        if (getcwd(here, sizeof here) == NULL || strncmp(here, prefix, strlen(prefix)) != 0)
            return NULL;
        snprintf(absolute, sizeof absolute, "%s/%s", here, name);
        name = absolute;
    }
    size_t bytes = strlen(prefix);
    if (!normalise(name, room, 4096) || strncmp(room, prefix, bytes) != 0)
        return NULL;
    return room[bytes] == '/' ? room + bytes : room[bytes] == 0 ? "/" : NULL;
}

enum place place_of(const char *name, char *room, const char **where) {
    *where = after_prefix(name);
    if (*where != NULL)
        return **where == '/' ? IN_POOL : IN_VOLUME; /* no specifier begins with a slash */
    *where = pool_path(name, room);
    return *where != NULL ? IN_POOL : OUTSIDE;
}
