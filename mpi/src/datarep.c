/*
 * Data representations of files: external32, and those that the program registered.
 *
 * A predefined datatype has an extent in the file, from a table or from the program's function. Derived datatypes are
 * made of predefined ones (type.c), so displacements that were given as counts use the extents in the file. Data are
 * converted in memory and moved as bytes. external32 is converted here, as MPI libraries differ in it, and some end the
 * process at an unknown type (docs/mpi.md).
 *
 * Representations are never removed, as MPI has no call for it. Locks: `lock` guards the growth of the list; no other
 * lock is taken while it is held.
 */
#include "driver.h"

#include <float.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct datarep {
    const struct datarep *next;
    char name[MPI_MAX_DATAREP_STRING + 1];
    struct conversions functions;
    MPI_Aint state; /* Fortran's extra state; Fortran functions get its address */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const struct datarep *_Atomic registered;
static const struct datarep external32 = {.name = "external32"};

static bool is_native(const char *name) { return strcasecmp(name, "native") == 0 || strcasecmp(name, "internal") == 0; }

int datarep_find(const char *name, const struct datarep **out) {
    *out = NULL;
    if (name == NULL)
        return MPI_ERR_ARG;
    if (is_native(name))
        return MPI_SUCCESS;
    if (strcasecmp(name, external32.name) == 0) {
        *out = &external32;
        return MPI_SUCCESS;
    }
    for (const struct datarep *rep = atomic_load(&registered); rep != NULL && *out == NULL; rep = rep->next)
        if (strcmp(name, rep->name) == 0)
            *out = rep;
    return *out != NULL ? MPI_SUCCESS : MPI_ERR_UNSUPPORTED_DATAREP;
}

int datarep_register(const char *name, const struct conversions *functions, const MPI_Aint *fortran_state) {
    const struct datarep *there;
    if (name == NULL || *name == 0 || strlen(name) > MPI_MAX_DATAREP_STRING || functions->extent == NULL)
        return MPI_ERR_ARG;
    struct datarep *rep = calloc(1, sizeof *rep);
    if (rep == NULL)
        return MPI_ERR_NO_MEM;
    strcpy(rep->name, name);
    rep->functions = *functions;
    if (fortran_state != NULL) {
        rep->state = *fortran_state;
        rep->functions.state = &rep->state;
    }
    pthread_mutex_lock(&lock);
    bool is_new = datarep_find(name, &there) != MPI_SUCCESS;
    if (is_new) {
        rep->next = atomic_load(&registered);
        atomic_store(&registered, rep);
    }
    pthread_mutex_unlock(&lock);
    if (!is_new)
        free(rep);
    return is_new ? MPI_SUCCESS : MPI_ERR_DUP_DATAREP;
}

const char *datarep_name(const struct datarep *rep) { return rep != NULL ? rep->name : "native"; }

bool datarep_converts(const struct datarep *rep, bool writes) {
    return rep == &external32 || (writes ? rep->functions.write : rep->functions.read) != NULL;
}

/* ---- external32 ---- */

/*
 * How a number is stored in external32: with the same bytes, swapped; with fewer bytes; or as another kind of number.
 * Kind 0 is none.
 */
enum { SWAP_1 = 1, SWAP_2, SWAP_4, SWAP_8, SWAP_16, LONG_4, UNSIGNED_LONG_4, WIDE_2, QUAD, KINDS };
static const struct {
    uint8_t memory, file;
} kinds[KINDS] = {
    [SWAP_1] = {1, 1},
    [SWAP_2] = {2, 2},
    [SWAP_4] = {4, 4},
    [SWAP_8] = {8, 8},
    [SWAP_16] = {16, 16},
    [LONG_4] = {sizeof(long), 4},
    [UNSIGNED_LONG_4] = {sizeof(long), 4},
    [WIDE_2] = {sizeof(wchar_t), 2},
    [QUAD] = {sizeof(long double), 16},
};
_Static_assert(sizeof(long) == 8 && sizeof(wchar_t) == 4 && sizeof(long double) == 16, "as x86-64 has them");

/* The standard's table, by the names of datatypes. An entry is `parts` numbers of one kind, and possibly an int. */
static const struct named {
    const char *name;
    uint8_t kind, parts, int_at;
} named[] = {
    {"MPI_PACKED", SWAP_1, 1, 0},
    {"MPI_BYTE", SWAP_1, 1, 0},
    {"MPI_CHAR", SWAP_1, 1, 0},
    {"MPI_UNSIGNED_CHAR", SWAP_1, 1, 0},
    {"MPI_SIGNED_CHAR", SWAP_1, 1, 0},
    {"MPI_WCHAR", WIDE_2, 1, 0},
    {"MPI_SHORT", SWAP_2, 1, 0},
    {"MPI_UNSIGNED_SHORT", SWAP_2, 1, 0},
    {"MPI_INT", SWAP_4, 1, 0},
    {"MPI_UNSIGNED", SWAP_4, 1, 0},
    {"MPI_LONG", LONG_4, 1, 0},
    {"MPI_UNSIGNED_LONG", UNSIGNED_LONG_4, 1, 0},
    {"MPI_LONG_LONG", SWAP_8, 1, 0},
    {"MPI_LONG_LONG_INT", SWAP_8, 1, 0},
    {"MPI_UNSIGNED_LONG_LONG", SWAP_8, 1, 0},
    {"MPI_FLOAT", SWAP_4, 1, 0},
    {"MPI_DOUBLE", SWAP_8, 1, 0},
    {"MPI_LONG_DOUBLE", QUAD, 1, 0},
    {"MPI_C_BOOL", SWAP_1, 1, 0},
    {"MPI_INT8_T", SWAP_1, 1, 0},
    {"MPI_INT16_T", SWAP_2, 1, 0},
    {"MPI_INT32_T", SWAP_4, 1, 0},
    {"MPI_INT64_T", SWAP_8, 1, 0},
    {"MPI_UINT8_T", SWAP_1, 1, 0},
    {"MPI_UINT16_T", SWAP_2, 1, 0},
    {"MPI_UINT32_T", SWAP_4, 1, 0},
    {"MPI_UINT64_T", SWAP_8, 1, 0},
    {"MPI_AINT", SWAP_8, 1, 0},
    {"MPI_COUNT", SWAP_8, 1, 0},
    {"MPI_OFFSET", SWAP_8, 1, 0},
    {"MPI_C_COMPLEX", SWAP_4, 2, 0},
    {"MPI_C_FLOAT_COMPLEX", SWAP_4, 2, 0},
    {"MPI_C_DOUBLE_COMPLEX", SWAP_8, 2, 0},
    {"MPI_C_LONG_DOUBLE_COMPLEX", QUAD, 2, 0},
    {"MPI_CXX_BOOL", SWAP_1, 1, 0},
    {"MPI_CXX_FLOAT_COMPLEX", SWAP_4, 2, 0},
    {"MPI_CXX_DOUBLE_COMPLEX", SWAP_8, 2, 0},
    {"MPI_CXX_LONG_DOUBLE_COMPLEX", QUAD, 2, 0},
    {"MPI_CHARACTER", SWAP_1, 1, 0},
    {"MPI_LOGICAL", SWAP_4, 1, 0},
    {"MPI_INTEGER", SWAP_4, 1, 0},
    {"MPI_REAL", SWAP_4, 1, 0},
    {"MPI_DOUBLE_PRECISION", SWAP_8, 1, 0},
    {"MPI_COMPLEX", SWAP_4, 2, 0},
    {"MPI_DOUBLE_COMPLEX", SWAP_8, 2, 0},
    {"MPI_INTEGER1", SWAP_1, 1, 0},
    {"MPI_INTEGER2", SWAP_2, 1, 0},
    {"MPI_INTEGER4", SWAP_4, 1, 0},
    {"MPI_INTEGER8", SWAP_8, 1, 0},
    {"MPI_INTEGER16", SWAP_16, 1, 0},
    {"MPI_REAL2", SWAP_2, 1, 0},
    {"MPI_REAL4", SWAP_4, 1, 0},
    {"MPI_REAL8", SWAP_8, 1, 0},
    {"MPI_REAL16", SWAP_16, 1, 0},
    {"MPI_COMPLEX8", SWAP_4, 2, 0},
    {"MPI_COMPLEX16", SWAP_8, 2, 0},
    {"MPI_COMPLEX32", SWAP_16, 2, 0},
    {"MPI_2INT", SWAP_4, 2, 0},
    {"MPI_2INTEGER", SWAP_4, 2, 0},
    {"MPI_2REAL", SWAP_4, 2, 0},
    {"MPI_2DOUBLE_PRECISION", SWAP_8, 2, 0},
    {"MPI_FLOAT_INT", SWAP_4, 2, 0},
    {"MPI_DOUBLE_INT", SWAP_8, 1, 8},
    {"MPI_LONG_INT", LONG_4, 1, 8},
    {"MPI_SHORT_INT", SWAP_2, 1, 4},
    {"MPI_LONG_DOUBLE_INT", QUAD, 1, 16},
};

static const struct named *find_named(MPI_Datatype type) {
    char name[MPI_MAX_OBJECT_NAME] = "";
    int bytes = 0;
    if (mpi.Type_get_name(type, name, &bytes) != MPI_SUCCESS)
        return NULL;
    for (size_t i = 0; i < sizeof named / sizeof named[0]; i++)
        if (strcmp(name, named[i].name) == 0)
            return &named[i];
    return NULL;
}

/* Fortran's types by precision and range have the lengths that the standard specifies (MPI 3.1, 17.1.9). */
static bool find_by_range(const struct by_range *asked, struct named *out) {
    int64_t p = asked->precision, r = asked->range;
    int bytes;
    if (asked->combiner == MPI_COMBINER_F90_INTEGER)
        bytes = r > 38 ? 0 : r > 18 ? 16 : r > 9 ? 8 : r > 4 ? 4 : r > 2 ? 2 : 1;
    else
        bytes = p > 33 || r > 4931 ? 0 : p > 15 || r > 307 ? 16 : p > 6 || r > 37 ? 8 : 4;
    int parts = asked->combiner == MPI_COMBINER_F90_COMPLEX ? 2 : 1;
    if (bytes * parts != asked->size)
        return false; /* its length in memory differs, by an option of the compiler */
    uint8_t kind = SWAP_1;
    while (kinds[kind].memory < bytes)
        kind++;
    if (kind == SWAP_16 && asked->combiner != MPI_COMBINER_F90_INTEGER && p <= LDBL_DIG) {
#ifdef OPEN_MPI
        kind = QUAD; /* Open MPI treats such a type as C's long double */
#else
        return false; /* either a long double or a quadruple, depending on the compiler */
#endif
    }
    *out = (struct named){"", kind, (uint8_t)parts, 0};
    return true;
}

static int find(MPI_Datatype type, struct named *out) {
    struct by_range asked;
    int code = by_range_of(type, &asked);
    if (code != MPI_SUCCESS)
        return code;
    if (asked.combiner != MPI_COMBINER_NAMED)
        return find_by_range(&asked, out) ? MPI_SUCCESS : MPI_ERR_CONVERSION;
    const struct named *found = find_named(type);
    if (found == NULL)
        return MPI_ERR_CONVERSION;
    *out = *found;
    return MPI_SUCCESS;
}

int datarep_extent(const struct datarep *rep, MPI_Datatype type, int64_t *extent) {
    if (rep == &external32) {
        struct named found;
        int code = find(type, &found);
        if (code == MPI_SUCCESS)
            *extent = kinds[found.kind].file * found.parts + (found.int_at > 0 ? 4 : 0);
        return code;
    }
    MPI_Aint answer = -1;
    int code = MPI_SUCCESS;
    const struct conversions *own = &rep->functions;
    if (own->kind == CONVERSIONS_FORTRAN) {
        MPI_Fint number = datatype_c2f(type), its_code = MPI_SUCCESS;
        ((void (*)(MPI_Fint *, MPI_Aint *, void *, MPI_Fint *))own->extent)(&number, &answer, own->state, &its_code);
        code = its_code;
    } else {
        code = ((MPI_Datarep_extent_function *)own->extent)(type, &answer, own->state);
    }
    *extent = answer;
    return code == MPI_SUCCESS && answer >= 0 ? MPI_SUCCESS : MPI_ERR_CONVERSION;
}

int datarep_leaves(MPI_Datatype type, leaf_function *add, void *list) {
    struct named found;
    int code = find(type, &found);
    if (code != MPI_SUCCESS)
        return code;
    add(list, 0, kinds[found.kind].memory * found.parts, found.kind);
    if (found.int_at > 0)
        add(list, found.int_at, sizeof(int), SWAP_4);
    return MPI_SUCCESS;
}

static void turn(char *to, const char *from, int bytes) {
    for (int i = 0; i < bytes; i++)
        to[i] = from[bytes - 1 - i];
}

static int number_to_file(uint8_t kind, char *to, const char *from) {
    long whole;
    uint32_t half;
    switch (kind) {
    case LONG_4:
    case UNSIGNED_LONG_4:
        memcpy(&whole, from, sizeof whole);
        half = (uint32_t)whole;
        turn(to, (const char *)&half, 4);
        /* A value that does not fit is reported, not cut off. */
        return whole == (kind == LONG_4 ? (long)(int32_t)half : (long)half) ? MPI_SUCCESS : MPI_ERR_CONVERSION;
    case WIDE_2:
        memcpy(&half, from, sizeof half);
        to[0] = (char)(half >> 8);
        to[1] = (char)half;
        return half <= UINT16_MAX ? MPI_SUCCESS : MPI_ERR_CONVERSION;
    case QUAD: {
        long double number;
        memcpy(&number, from, sizeof number);
        __float128 quad = number;
        turn(to, (const char *)&quad, 16);
        return MPI_SUCCESS;
    }
    default:
        turn(to, from, kinds[kind].file);
        return MPI_SUCCESS;
    }
}

static void number_from_file(uint8_t kind, char *to, const char *from) {
    uint32_t half;
    long whole;
    switch (kind) {
    case LONG_4:
    case UNSIGNED_LONG_4:
        turn((char *)&half, from, 4);
        whole = kind == LONG_4 ? (long)(int32_t)half : (long)half;
        memcpy(to, &whole, sizeof whole);
        return;
    case WIDE_2:
        half = (uint32_t)(uint8_t)from[0] << 8 | (uint8_t)from[1];
        memcpy(to, &half, sizeof half);
        return;
    case QUAD: {
        __float128 quad;
        turn((char *)&quad, from, 16);
        long double number = (long double)quad;
        memset(to, 0, 16);
        memcpy(to, &number, 10); /* the other bytes are padding */
        return;
    }
    default:
        turn(to, from, kinds[kind].file);
    }
}

/* Converts all numbers within the given bytes of the file; `done` is the number of bytes in memory. */
static int convert_leaves(const struct flat *leaves, bool to_file, char *memory, int64_t count, char *file, int64_t bytes,
                          int64_t *done) {
    int code = MPI_SUCCESS;
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < leaves->count; j++) {
            uint8_t kind = leaves->kinds[j];
            char *at = memory + i * leaves->extent + leaves->blocks[j].offset;
            for (int64_t left = leaves->blocks[j].bytes; left > 0; left -= kinds[kind].memory) {
                if (bytes < kinds[kind].file)
                    return code;
                int one = MPI_SUCCESS;
                if (to_file)
                    one = number_to_file(kind, file, at);
                else
                    number_from_file(kind, at, file);
                code = one != MPI_SUCCESS ? one : code;
                file += kinds[kind].file;
                bytes -= kinds[kind].file;
                at += kinds[kind].memory;
                *done += kinds[kind].memory;
            }
        }
    return code;
}

/* ---- both kinds of representation ---- */

MPI_Fint datatype_c2f(MPI_Datatype type) {
#ifdef OPEN_MPI
    return mpi.Type_c2f(type);
#else
    return (MPI_Fint)type;
#endif
}

static int convert_by_program(const struct conversions *own, bool to_file, void *memory, int64_t count, MPI_Datatype type,
                              void *file) {
    void (*function)(void) = to_file ? own->write : own->read;
    int code = MPI_SUCCESS;
    if (own->kind == CONVERSIONS_FORTRAN) {
        MPI_Fint number = datatype_c2f(type), its_count = (MPI_Fint)count, its_code = MPI_SUCCESS;
        MPI_Offset position = 0;
        if (count > INT_MAX)
            return MPI_ERR_COUNT;
        ((void (*)(void *, MPI_Fint *, MPI_Fint *, void *, MPI_Offset *, void *, MPI_Fint *))function)(
            memory, &number, &its_count, file, &position, own->state, &its_code);
        code = its_code;
#if MPI_VERSION >= 4
    } else if (own->kind == CONVERSIONS_LARGE) {
        code = ((MPI_Datarep_conversion_function_c *)function)(memory, type, count, file, 0, own->state);
#endif
    } else {
        if (count > INT_MAX)
            return MPI_ERR_COUNT;
        code = ((MPI_Datarep_conversion_function *)function)(memory, type, (int)count, file, 0, own->state);
    }
    return code == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_CONVERSION;
}

int datarep_convert(const struct datarep *rep, bool to_file, void *memory, int64_t count, MPI_Datatype type, int64_t item,
                    void *file, int64_t bytes, int64_t *done) {
    *done = 0;
    if (rep != &external32) {
        /* Only whole items, since the program's functions convert only those. */
        const struct flat *flat;
        int code = flat_of(type, MPI_COMM_SELF, &flat);
        count = bytes / item;
        if (code == MPI_SUCCESS && count > 0)
            code = convert_by_program(&rep->functions, to_file, memory, count, type, file);
        if (code == MPI_SUCCESS)
            *done = count * flat->size;
        return code;
    }
    struct flat *leaves;
    int code = flat_leaves(type, &leaves);
    if (code != MPI_SUCCESS)
        return code;
    code = convert_leaves(leaves, to_file, memory, count, file, bytes, done);
    flat_free(leaves);
    return code;
}
