/*
 * libforebay_mpi.so, which `forebay run` preloads. At a program's first MPI-IO call it finds out which MPI the program
 * has, loads the driver for it from beside this library, and fills the slots through which entries.S jumps.
 *
 * A program without MPI, or without MPI-IO, pays for loading a library of a few pages. This file uses no type of an
 * MPI. It searches the MPI among the loaded libraries, as Python loads it where dlsym(RTLD_DEFAULT) does not find it.
 * Without a driver all calls go to the MPI library, and a line on standard error gives the reason: at the start of a
 * program that is linked with its MPI, and once for each node.
 *
 * Threads: pthread_once makes the choice once. Tests: mpi/tests.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calls.h"
#include "table.h"

typedef void (*slot)(void);

#define BOTH(name) "MPI_" #name, "PMPI_" #name,
#define LARGE(name) "MPI_" #name "_c", "PMPI_" #name "_c",
#define ONE(name) #name,
static const char *const names[] = {FOREBAY_ALWAYS(BOTH) FOREBAY_ON_FILE(BOTH) FOREBAY_COUNTED(LARGE)
                                        LARGE(File_get_type_extent) LARGE(Register_datarep)
                                            FOREBAY_FORTRAN(ONE) FOREBAY_FORTRAN_DATAREP(ONE)};
enum { COUNT = sizeof names / sizeof names[0] };

/* Until the driver is loaded, no first argument counts as a file of Forebay. */
uintptr_t forebay_mpi_first = 0, forebay_mpi_extent = 0;
slot forebay_mpi_driver[COUNT];
extern slot forebay_mpi_native[COUNT];
slot forebay_mpi_choose(size_t index);

static pthread_once_t once = PTHREAD_ONCE_INIT;
/* The driver's table; NULL without a driver. */
static const struct forebay_mpi_table *table;
/* The target of each call whose first argument is not a file of Forebay. */
static slot chosen[COUNT];

static void absent(void) {
    static const char words[] = "forebay: the program made a call of MPI-IO that no library of this process has\n";
    fputs(words, stderr);
    abort();
}

/* A loaded MPI. */
struct found {
    void *handle;
    char family[16]; /* "openmpi" or "mpich"; empty when it is neither */
    char version[8192];
};

static void look(struct found *found, void *handle) {
    int (*get_version)(char *, int *) = (int (*)(char *, int *))dlsym(handle, "PMPI_Get_library_version");
    if (get_version == NULL)
        return;
    int (*initialized)(int *) = (int (*)(int *))dlsym(handle, "PMPI_Initialized");
    int is_initialized = 0, bytes = 0;
    if (initialized != NULL)
        initialized(&is_initialized);
    /* If a process has two, the initialized one is used. */
    if (found->handle != NULL && !is_initialized)
        return;
    found->handle = handle;
    memset(found->version, 0, sizeof found->version);
    get_version(found->version, &bytes);
    found->version[sizeof found->version - 1] = 0;
    const char *family = "";
    if (strncmp(found->version, "Open MPI", 8) == 0)
        family = "openmpi";
    else if (strstr(found->version, "MPICH") != NULL || strstr(found->version, "Intel") != NULL)
        family = "mpich";
    snprintf(found->family, sizeof found->family, "%s", family);
}

enum { LIBRARIES_MAX = 16 };
struct names {
    const char *start; /* prefix of the names to find */
    int count;
    char path[LIBRARIES_MAX][4096];
};

static int note_library(struct dl_phdr_info *info, size_t size, void *data) {
    (void)size;
    struct names *list = data;
    const char *base = strrchr(info->dlpi_name, '/');
    base = base != NULL ? base + 1 : info->dlpi_name;
    if (strncmp(base, list->start, strlen(list->start)) == 0 && list->count < LIBRARIES_MAX && strlen(info->dlpi_name) < sizeof list->path[0])
        strcpy(list->path[list->count++], info->dlpi_name);
    return 0;
}

/* An MPI that is loaded as a library. */
static void find_linked(struct found *found) {
    static struct names list; /* too large for a stack; zeros take no space in the library's file */
    list.start = "libmpi";
    list.count = 0;
    dl_iterate_phdr(note_library, &list);
    for (int i = 0; i < list.count; i++) {
        void *handle = dlopen(list.path[i], RTLD_LAZY | RTLD_NOLOAD);
        if (handle != NULL)
            look(found, handle);
    }
}

static void find_mpi(struct found *found) {
    find_linked(found);
    if (found->handle == NULL)
        look(found, dlopen(NULL, RTLD_LAZY)); /* the MPI may be linked into the program itself */
}

/* True if this process runs under `forebay run` and the driver is not disabled. */
static bool is_wanted(void) {
    const char *disabled = getenv("FOREBAY_DISABLE"), *pool = getenv("FOREBAY_POOL");
    return pool != NULL && (disabled == NULL || *disabled == 0 || strcmp(disabled, "0") == 0);
}

/* Reports why there is no driver: once in a process, and by one rank of a node, as the others have the same reason. */
static void say_absence(const struct found *found, const char *why) {
    static const char *const ranks[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PMIX_LOCAL_RANK",
                                        "SLURM_LOCALID"};
    static bool is_said;
    for (size_t i = 0; i < sizeof ranks / sizeof ranks[0] && !is_said; i++) {
        const char *rank = getenv(ranks[i]);
        is_said = rank != NULL && strcmp(rank, "0") != 0;
    }
    if (!is_said)
        fprintf(stderr,
                "forebay: warning: there is no driver for this program's MPI (%.*s): %s: it uses its own MPI-IO\n",
                (int)strcspn(found->version, ",\n"), found->version, why);
    is_said = true;
}

/* The directory of this library, with a slash at its end, and the driver in it. */
static void paths(const struct found *found, char directory[4096], char path[4200]) {
    Dl_info here;
    strcpy(directory, "./");
    if (dladdr((void *)paths, &here) != 0 && here.dli_fname != NULL && strlen(here.dli_fname) < 4096) {
        const char *slash = strrchr(here.dli_fname, '/');
        if (slash != NULL)
            snprintf(directory, 4096, "%.*s", (int)(slash + 1 - here.dli_fname), here.dli_fname);
    }
    snprintf(path, 4200, "%slibforebay_mpi_%s.so", directory, found->family);
}

static const struct forebay_mpi_table *load(const struct found *found) {
    char directory[4096], path[4200];
    if (!is_wanted())
        return NULL;
    if (found->family[0] == 0) {
        if (found->handle != NULL)
            say_absence(found, "Forebay has drivers for Open MPI and for MPIs of MPICH's kind");
        return NULL;
    }
    paths(found, directory, path);
    void *driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (driver == NULL) {
        say_absence(found, dlerror());
        return NULL;
    }
    forebay_mpi_driver_function *entry = (forebay_mpi_driver_function *)dlsym(driver, "forebay_mpi_driver");
    const struct forebay_mpi_table *answer = entry != NULL ? entry(found->handle, directory) : NULL;
    if (answer == NULL || answer->version != FOREBAY_MPI_TABLE_VERSION) {
        char why[4300];
        snprintf(why, sizeof why, "%s does not fit this MPI or this build", path);
        say_absence(found, why);
        return NULL;
    }
    return answer;
}

/*
 * The report comes at the start of a program that is linked with an MPI, even if the program does all its input and
 * output by other calls: the user may assume that Forebay serves its MPI-IO. A program that loads its MPI later gets
 * the report at its first call.
 */
__attribute__((constructor)) static void start(void) {
    static struct found found;
    char directory[4096], path[4200];
    if (!is_wanted())
        return;
    find_linked(&found);
    if (found.handle == NULL)
        return;
    paths(&found, directory, path);
    if (found.family[0] == 0)
        load(&found);
    else if (access(path, R_OK) != 0)
        say_absence(&found, "it is not beside libforebay_mpi.so (make build makes it where that MPI's compiler is)");
}

static void choose(void) {
    static struct found found;
    find_mpi(&found);
    table = load(&found);
    for (size_t i = 0; i < COUNT; i++) {
        /* The next definition in search order comes first, as it may be that of a profiling tool. */
        void *native = dlsym(RTLD_NEXT, names[i]);
        if (native == NULL && found.handle != NULL)
            native = dlsym(found.handle, names[i]);
        chosen[i] = native != NULL ? (slot)native : absent;
        forebay_mpi_driver[i] = chosen[i];
        if (table == NULL || native == NULL)
            continue;
        for (const struct forebay_mpi_call *call = table->calls; call->name != NULL; call++)
            if (strcmp(call->name, names[i]) == 0 || (names[i][0] == 'P' && strcmp(call->name, names[i] + 1) == 0))
                forebay_mpi_driver[i] = call->function;
        for (const struct forebay_mpi_always *call = table->always; call->name != NULL; call++)
            if (strcmp(call->name, names[i]) == 0) {
                *call->native = chosen[i];
                forebay_mpi_driver[i] = chosen[i] = call->function;
            }
    }
    if (table != NULL) {
        forebay_mpi_first = table->first;
        __atomic_store_n(&forebay_mpi_extent, table->extent, __ATOMIC_RELEASE);
    }
    for (size_t i = 0; i < COUNT; i++)
        __atomic_store_n(&forebay_mpi_native[i], chosen[i], __ATOMIC_RELEASE);
}

slot forebay_mpi_choose(size_t index) {
    pthread_once(&once, choose);
    return chosen[index];
}

typedef int look_function(const char *path, int *format);

__attribute__((visibility("default"))) look_function ncmpi_inq_file_format;

/* PnetCDF's own function in a loaded library or its dependencies; NULL if only this library's is there. */
static look_function *look_in(const char *library) {
    void *handle = library != NULL ? dlopen(library, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    if (handle == NULL)
        return NULL;
    void *found = dlsym(handle, "ncmpi_inq_file_format");
    dlclose(handle); /* the caller of this function keeps the library loaded */
    Dl_info ours, its;
    if (found == NULL || dladdr((void *)look_in, &ours) == 0 || dladdr(found, &its) == 0 || its.dli_fbase == ours.dli_fbase)
        return NULL;
    return (look_function *)found;
}

/*
 * The same where dlsym(RTLD_NEXT) does not search: PnetCDF was loaded later, and only its loader can find it. The
 * function is in the caller, which is PnetCDF or a module that contains it, or in a library named PnetCDF. Each of them
 * may be unloaded again.
 */
static look_function *find_pnetcdf(void *caller) {
    Dl_info its;
    look_function *found = dladdr(caller, &its) != 0 ? look_in(its.dli_fname) : NULL;
    struct names *list = found == NULL ? calloc(1, sizeof *list) : NULL;
    if (list != NULL) {
        list->start = "libpnetcdf";
        dl_iterate_phdr(note_library, list);
    }
    for (int i = 0; list != NULL && found == NULL && i < list->count; i++)
        found = look_in(list->path[i]);
    free(list);
    return found;
}

/* `ncmpi_open` first examines a file by this call: see pnetcdf.c. */
int ncmpi_inq_file_format(const char *path, int *format) {
    static const int UNKNOWN_ERROR = -204; /* PnetCDF's NC_EFILE */
    static _Atomic(void *) known;
    void *next = known;
    if (next == NULL)
        known = next = dlsym(RTLD_NEXT, "ncmpi_inq_file_format");
    look_function *native = next != NULL ? (look_function *)next : find_pnetcdf(__builtin_return_address(0));
    if (native == NULL) {
        fputs("forebay: the PnetCDF by which the program opens a file was not found: the open fails\n", stderr);
        return UNKNOWN_ERROR;
    }
    pthread_once(&once, choose);
    return table != NULL ? table->pnetcdf_look(path, format, native) : native(path, format);
}
