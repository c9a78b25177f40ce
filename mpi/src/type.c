/*
 * Datatypes as lists of blocks, by MPI_Type_get_contents. A list is made once and kept with the datatype as an
 * attribute. So it lives as long as the datatype, and a number that MPICH reuses has no old list.
 *
 * The order of the blocks is that of the type map. Adjacent neighbours in it are joined, and nothing is sorted. The
 * datatype constructors are those of MPI 4.0 and their forms for large counts. Tests: mpi/tests/views.c.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct list {
    struct block *blocks;
    int64_t count, room;
    bool failed;
    bool kinded, scaled; /* `kinds` is needed; some block's size differs from that in memory */
    uint8_t *kinds, kind;
    int64_t lb, ub; /* bounds of all added blocks */
    bool bounded;
};

/*
 * How predefined types are represented: as in memory (NULL), as in a file, or in memory with the kinds of their
 * numbers.
 */
struct mold {
    const struct datarep *rep;
    bool in_file;
};

static void add(struct list *list, int64_t offset, int64_t bytes) {
    if (bytes == 0 || list->failed)
        return;
    if (list->count > 0) {
        struct block *last = &list->blocks[list->count - 1];
        bool alike = !list->kinded || list->kinds[list->count - 1] == list->kind;
        if (last->offset + last->bytes == offset && alike) {
            last->bytes += bytes;
            return;
        }
    }
    if (list->count == list->room) {
        int64_t room = list->room == 0 ? 8 : list->room * 2;
        struct block *blocks = realloc(list->blocks, room * sizeof *blocks);
        if (blocks == NULL) {
            list->failed = true;
            return;
        }
        list->blocks = blocks;
        uint8_t *kinds = list->kinded ? realloc(list->kinds, room) : NULL;
        if (list->kinded && kinds == NULL) {
            list->failed = true;
            return;
        }
        list->kinds = kinds;
        list->room = room;
    }
    if (list->kinded)
        list->kinds[list->count] = list->kind;
    list->blocks[list->count++] = (struct block){offset, bytes};
}

/* Adds `count` copies of `flat`, the first at `base`, each of the others one extent further. */
static void repeat(struct list *list, const struct flat *flat, int64_t base, int64_t count) {
    if (count <= 0)
        return;
    int64_t first = base + flat->lb, last = first + (count - 1) * flat->extent;
    int64_t lb = first < last ? first : last, ub = (first < last ? last : first) + flat->extent;
    list->lb = !list->bounded || lb < list->lb ? lb : list->lb;
    list->ub = !list->bounded || ub > list->ub ? ub : list->ub;
    list->bounded = true;
    list->scaled = list->scaled || flat->scaled;
    if (flat->count == 0)
        return;
    if (flat->dense) {
        list->kind = flat->kinds != NULL ? flat->kinds[0] : 0;
        add(list, base + flat->blocks[0].offset, flat->size * count);
        return;
    }
    for (int64_t i = 0; i < count && !list->failed; i++)
        for (int64_t j = 0; j < flat->count; j++) {
            list->kind = flat->kinds != NULL ? flat->kinds[j] : 0;
            add(list, base + i * flat->extent + flat->blocks[j].offset, flat->blocks[j].bytes);
        }
}

static void discard(struct flat *flat) {
    if (flat == NULL || atomic_fetch_sub(&flat->types, 1) > 1)
        return;
    free(flat->blocks);
    free(flat->before);
    free(flat->kinds);
    free(flat);
}

/* The arguments that a datatype was made from, read one by one in the standard's order. */
struct contents {
    int combiner;
    int64_t types;
    int *integers, *integer;
    MPI_Aint *addresses, *address;
#if MPI_VERSION >= 4
    MPI_Count *larges, *large; /* for a form for large counts: counts and displacements */
#endif
    MPI_Datatype *inner;
};

static int64_t next_integer(struct contents *c) { return *c->integer++; }

static int64_t next_count(struct contents *c) {
#if MPI_VERSION >= 4
    if (c->larges != NULL)
        return *c->large++;
#endif
    return *c->integer++;
}

static int64_t next_address(struct contents *c) {
#if MPI_VERSION >= 4
    if (c->larges != NULL)
        return *c->large++;
#endif
    return *c->address++;
}

static int make(MPI_Datatype type, const struct mold *mold, struct flat **out);

static int combiner_of(MPI_Datatype type) {
    int combiner;
#if MPI_VERSION >= 4
    MPI_Count a, b, c, d;
    mpi.Type_get_envelope(type, &a, &b, &c, &d, &combiner);
#else
    int a, b, c;
    mpi.Type_get_envelope(type, &a, &b, &c, &combiner);
#endif
    return combiner;
}

static bool is_by_range(int combiner) {
    return combiner == MPI_COMBINER_F90_REAL || combiner == MPI_COMBINER_F90_COMPLEX ||
           combiner == MPI_COMBINER_F90_INTEGER;
}

bool type_is_predefined(MPI_Datatype type) {
    int combiner = combiner_of(type);
    return combiner == MPI_COMBINER_NAMED || is_by_range(combiner);
}

static void contents_free(struct contents *c) {
    for (int64_t i = 0; i < c->types; i++)
        if (c->inner[i] != MPI_DATATYPE_NULL && !type_is_predefined(c->inner[i]))
            mpi.Type_free(&c->inner[i]);
    free(c->integers);
    free(c->addresses);
#if MPI_VERSION >= 4
    free(c->larges);
#endif
    free(c->inner);
}

static int contents_get(MPI_Datatype type, struct contents *c) {
    memset(c, 0, sizeof *c);
#if MPI_VERSION >= 4
    MPI_Count integers, addresses, larges, types;
    if (mpi.Type_get_envelope(type, &integers, &addresses, &larges, &types, &c->combiner) != MPI_SUCCESS)
        return MPI_ERR_TYPE;
#else
    int integers, addresses, types;
    if (mpi.Type_get_envelope(type, &integers, &addresses, &types, &c->combiner) != MPI_SUCCESS)
        return MPI_ERR_TYPE;
#endif
    if (c->combiner == MPI_COMBINER_NAMED)
        return MPI_SUCCESS;
    c->integer = c->integers = malloc((integers + 1) * sizeof(int));
    c->address = c->addresses = malloc((addresses + 1) * sizeof(MPI_Aint));
    c->inner = malloc((types + 1) * sizeof(MPI_Datatype));
    bool enough = c->integers != NULL && c->addresses != NULL && c->inner != NULL;
#if MPI_VERSION >= 4
    if (larges > 0) {
        c->large = c->larges = malloc(larges * sizeof(MPI_Count));
        enough = enough && c->larges != NULL;
    }
    if (enough && mpi.Type_get_contents(type, integers, addresses, larges, types, c->integers, c->addresses, c->larges,
                                        c->inner) == MPI_SUCCESS)
        c->types = types;
    else
        enough = false;
#else
    if (enough && mpi.Type_get_contents(type, integers, addresses, types, c->integers, c->addresses, c->inner) ==
                      MPI_SUCCESS)
        c->types = types;
    else
        enough = false;
#endif
    if (!enough) {
        contents_free(c);
        return MPI_ERR_NO_MEM;
    }
    return MPI_SUCCESS;
}

/* A dimension of an array: the selected indices, as runs. */
struct run {
    int64_t first, count;
};
struct dimension {
    int64_t size, runs;
    struct run *run;
};

/* Adds the elements of dimension `d` and those below. `order[0]` is the slowest. `index` counts elements. */
static void add_array(struct list *list, const struct flat *old, const struct dimension *dims, const int *order,
                      int d, int count, int64_t index) {
    const struct dimension *dim = &dims[order[d]];
    for (int64_t r = 0; r < dim->runs && !list->failed; r++) {
        if (d == count - 1) {
            repeat(list, old, (index * dim->size + dim->run[r].first) * old->extent, dim->run[r].count);
            continue;
        }
        for (int64_t i = 0; i < dim->run[r].count; i++)
            add_array(list, old, dims, order, d + 1, count, index * dim->size + dim->run[r].first + i);
    }
}

/* The runs of indices of a dimension that process `at` of `processes` has. `dim->run` is allocated with malloc. */
static bool distribute(struct dimension *dim, int64_t distribution, int64_t argument, int64_t processes, int64_t at) {
    if (distribution == MPI_DISTRIBUTE_NONE) {
        processes = 1;
        at = 0;
    }
    int64_t block = argument;
    if (distribution != MPI_DISTRIBUTE_CYCLIC && (argument == MPI_DISTRIBUTE_DFLT_DARG || processes == 1))
        block = (dim->size + processes - 1) / processes;
    else if (argument == MPI_DISTRIBUTE_DFLT_DARG)
        block = 1;
    if (block <= 0)
        block = 1;
    int64_t cycle = block * processes;
    dim->runs = 0;
    dim->run = malloc((dim->size / cycle + 1) * sizeof(struct run));
    if (dim->run == NULL)
        return false;
    for (int64_t first = at * block; first < dim->size; first += cycle) {
        int64_t left = dim->size - first;
        dim->run[dim->runs++] = (struct run){first, left < block ? left : block};
    }
    return true;
}

static bool add_subarray(struct list *list, const struct flat *old, struct contents *c, bool distributed) {
    enum { DIMENSIONS_MAX = 64 };
    struct dimension dims[DIMENSIONS_MAX] = {{0, 0, NULL}};
    int order[DIMENSIONS_MAX], count;
    int64_t values[3][DIMENSIONS_MAX], processes = 0, rank = 0, grid[DIMENSIONS_MAX];
    if (distributed) {
        processes = next_integer(c);
        rank = next_integer(c);
    }
    count = (int)next_integer(c);
    if (count < 1 || count > DIMENSIONS_MAX)
        return false;
    for (int i = 0; i < count; i++)
        dims[i].size = next_count(c);
    for (int which = 0; which < 2; which++)
        for (int i = 0; i < count; i++)
            values[which][i] = distributed ? next_integer(c) : next_count(c);
    for (int i = 0; distributed && i < count; i++)
        grid[i] = next_integer(c);
    bool fortran = next_integer(c) == MPI_ORDER_FORTRAN, good = true;
    for (int i = 0; i < count; i++)
        order[i] = fortran ? count - 1 - i : i;
    for (int i = 0; i < count && good; i++) {
        if (distributed) {
            processes /= grid[i] > 0 ? grid[i] : 1; /* the grid is always in C's order */
            int64_t at = processes > 0 ? rank / processes : 0;
            rank -= at * processes;
            good = distribute(&dims[i], values[0][i], values[1][i], grid[i], at);
        } else {
            dims[i].run = malloc(sizeof(struct run));
            good = dims[i].run != NULL;
            if (good)
                *dims[i].run = (struct run){values[1][i], values[0][i]};
            dims[i].runs = 1;
        }
    }
    if (good) {
        add_array(list, old, dims, order, 0, count, 0);
        list->lb = 0;
        list->ub = old->extent;
        for (int i = 0; i < count; i++)
            list->ub *= dims[i].size;
    }
    for (int i = 0; i < count; i++)
        free(dims[i].run);
    return good;
}

/* Called by datarep.c, which determines the kinds. */
static void add_leaf(void *list, int64_t offset, int64_t bytes, uint8_t kind) {
    ((struct list *)list)->kind = kind;
    add(list, offset, bytes);
}

static int add_derived(struct list *list, MPI_Datatype type, const struct mold *mold) {
    struct contents c;
    int code = contents_get(type, &c);
    if (code != MPI_SUCCESS)
        return code;
    struct flat *old = NULL;
    if (c.combiner != MPI_COMBINER_STRUCT && c.types > 0)
        code = make(c.inner[0], mold, &old);
    int64_t count = 0;
    bool good = code == MPI_SUCCESS;
    if (good)
        switch (c.combiner) {
        case MPI_COMBINER_DUP:
            repeat(list, old, 0, 1);
            break;
        case MPI_COMBINER_RESIZED:
            repeat(list, old, 0, 1);
            list->lb = next_address(&c);
            list->ub = list->lb + next_address(&c);
            break;
        case MPI_COMBINER_CONTIGUOUS:
            repeat(list, old, 0, next_count(&c));
            break;
        case MPI_COMBINER_VECTOR:
        case MPI_COMBINER_HVECTOR: {
            count = next_count(&c);
            int64_t length = next_count(&c);
            int64_t stride = c.combiner == MPI_COMBINER_VECTOR ? next_count(&c) * old->extent : next_address(&c);
            for (int64_t i = 0; i < count; i++)
                repeat(list, old, i * stride, length);
            break;
        }
        case MPI_COMBINER_INDEXED:
        case MPI_COMBINER_HINDEXED: {
            count = next_count(&c);
            int64_t *lengths = malloc((count + 1) * sizeof *lengths);
            good = lengths != NULL;
            for (int64_t i = 0; i < count && good; i++)
                lengths[i] = next_count(&c);
            for (int64_t i = 0; i < count && good; i++) {
                bool counted = c.combiner == MPI_COMBINER_INDEXED;
                repeat(list, old, counted ? next_count(&c) * old->extent : next_address(&c), lengths[i]);
            }
            free(lengths);
            break;
        }
        case MPI_COMBINER_INDEXED_BLOCK:
        case MPI_COMBINER_HINDEXED_BLOCK: {
            count = next_count(&c);
            int64_t length = next_count(&c);
            bool counted = c.combiner == MPI_COMBINER_INDEXED_BLOCK;
            for (int64_t i = 0; i < count; i++)
                repeat(list, old, counted ? next_count(&c) * old->extent : next_address(&c), length);
            break;
        }
        case MPI_COMBINER_STRUCT: {
            count = next_count(&c);
            int64_t *lengths = malloc((count + 1) * sizeof *lengths);
            good = lengths != NULL;
            for (int64_t i = 0; i < count && good; i++)
                lengths[i] = next_count(&c);
            for (int64_t i = 0; i < count && good; i++) {
                struct flat *member = NULL;
                code = make(c.inner[i], mold, &member);
                good = code == MPI_SUCCESS;
                if (good)
                    repeat(list, member, next_address(&c), lengths[i]);
                discard(member);
            }
            free(lengths);
            break;
        }
        case MPI_COMBINER_SUBARRAY:
            good = add_subarray(list, old, &c, false);
            break;
        case MPI_COMBINER_DARRAY:
            good = add_subarray(list, old, &c, true);
            break;
        default:
            code = MPI_ERR_TYPE;
        }
    discard(old);
    contents_free(&c);
    if (code != MPI_SUCCESS)
        return code;
    return good && !list->failed ? MPI_SUCCESS : MPI_ERR_NO_MEM;
}

int by_range_of(MPI_Datatype type, struct by_range *out) {
    struct contents c;
    MPI_Count size = 0;
    int code = contents_get(type, &c);
    if (code != MPI_SUCCESS)
        return code;
    *out = (struct by_range){.combiner = c.combiner};
    if (is_by_range(c.combiner)) {
        out->precision = c.combiner == MPI_COMBINER_F90_INTEGER ? 0 : next_integer(&c);
        out->range = next_integer(&c);
    }
    if (c.combiner != MPI_COMBINER_NAMED)
        contents_free(&c);
    code = mpi.Type_size_x(type, &size);
    out->size = size;
    return code == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_TYPE;
}

/* A predefined type: one block, except for the pairs of C, which have gaps. */
static void add_predefined(struct list *list, MPI_Datatype type, int64_t size) {
    int64_t value = 0, second = 0;
#define PAIR(name, c_type)                                                                                             \
    if (type == name) {                                                                                                \
        struct pair {                                                                                                  \
            c_type value;                                                                                              \
            int index;                                                                                                 \
        };                                                                                                             \
        value = sizeof(c_type);                                                                                        \
        second = offsetof(struct pair, index);                                                                         \
    }
    PAIR(MPI_SHORT_INT, short)
    PAIR(MPI_DOUBLE_INT, double)
    PAIR(MPI_LONG_INT, long)
    PAIR(MPI_LONG_DOUBLE_INT, long double)
#undef PAIR
    if (value == 0) {
        add(list, 0, size);
        return;
    }
    add(list, 0, value);
    add(list, second, sizeof(int));
}

static int finish(struct flat *flat, struct list *list) {
    flat->count = list->count;
    flat->blocks = list->blocks;
    flat->before = malloc((list->count + 1) * sizeof *flat->before);
    if (flat->before == NULL)
        return MPI_ERR_NO_MEM;
    int64_t sum = 0;
    flat->rising = true;
    int64_t end = 0;
    for (int64_t i = 0; i < list->count; i++) {
        flat->before[i] = sum;
        sum += list->blocks[i].bytes;
        flat->overlaps = flat->overlaps || (i > 0 && list->blocks[i].offset < end);
        end = list->blocks[i].offset + list->blocks[i].bytes;
        int64_t least = i == 0 ? 0 : list->blocks[i - 1].offset;
        flat->rising = flat->rising && list->blocks[i].offset >= least;
    }
    flat->apart = !flat->overlaps && flat->rising && (list->count == 0 || end - list->blocks[0].offset <= flat->extent);
    flat->size = sum;
    flat->dense = list->count == 1 && flat->extent == sum;
    return MPI_SUCCESS;
}

static int add_in_file(struct list *list, MPI_Datatype type, const struct mold *mold, const struct flat *memory) {
    int64_t extent = 0;
    int code = datarep_extent(mold->rep, type, &extent);
    if (code != MPI_SUCCESS)
        return code;
    add(list, 0, extent);
    list->lb = 0;
    list->ub = extent;
    list->scaled = extent != memory->size || extent != memory->extent;
    return MPI_SUCCESS;
}

static int make(MPI_Datatype type, const struct mold *mold, struct flat **out) {
    MPI_Count lb = 0, extent = 0, size = 0;
    if (mpi.Type_get_extent_x(type, &lb, &extent) != MPI_SUCCESS || mpi.Type_size_x(type, &size) != MPI_SUCCESS)
        return MPI_ERR_TYPE;
    struct flat *flat = calloc(1, sizeof *flat);
    if (flat == NULL)
        return MPI_ERR_NO_MEM;
    atomic_store(&flat->types, 1);
    flat->lb = lb;
    flat->extent = extent;
    bool in_file = mold != NULL && mold->in_file;
    struct list list = {.kinded = mold != NULL && !in_file};
    int code = MPI_SUCCESS;
    flat->size = size;
    if (!type_is_predefined(type))
        code = add_derived(&list, type, mold);
    else if (in_file)
        code = add_in_file(&list, type, mold, flat);
    else if (mold != NULL)
        code = datarep_leaves(type, add_leaf, &list);
    else
        add_predefined(&list, type, size);
    if (in_file) {
        flat->lb = list.lb;
        flat->extent = list.ub - list.lb;
        flat->scaled = list.scaled;
    }
    flat->kinds = list.kinds;
    if (code == MPI_SUCCESS && list.failed)
        code = MPI_ERR_NO_MEM;
    if (code == MPI_SUCCESS)
        code = finish(flat, &list);
    else
        free(list.blocks);
    if (code != MPI_SUCCESS) {
        discard(flat);
        return code;
    }
    *out = flat;
    return MPI_SUCCESS;
}

static int keyval = MPI_KEYVAL_INVALID;
static pthread_once_t keyval_once = PTHREAD_ONCE_INIT;
/* Held while a datatype is flattened, so that two threads with the same new datatype do not both give it a list. */
static pthread_mutex_t flattening = PTHREAD_MUTEX_INITIALIZER;

static int forget(MPI_Datatype type, int key, void *value, void *extra) {
    (void)type, (void)key, (void)extra;
    discard(value);
    return MPI_SUCCESS;
}

/* A copy of a datatype, such as a view keeps, uses the same list. */
static int share(MPI_Datatype type, int key, void *extra, void *value, void *out, int *flag) {
    (void)type, (void)key, (void)extra;
    struct flat *flat = value;
    atomic_fetch_add(&flat->types, 1);
    *(void **)out = flat;
    *flag = 1;
    return MPI_SUCCESS;
}

static void make_keyval(void) { mpi.Type_create_keyval(share, forget, &keyval, NULL); }

/* Predefined types live as long as the process. These are the last few that a thread used. */
enum { NAMED_MAX = 4 };
static _Thread_local struct {
    MPI_Datatype type;
    const struct flat *flat;
} named[NAMED_MAX];
static _Thread_local unsigned named_next;

/* Gives a datatype its list, unless another thread was faster. */
static int flatten(MPI_Datatype type, struct flat **out) {
    int found = 0;
    if (mpi.Type_get_attr(type, keyval, out, &found) == MPI_SUCCESS && found)
        return MPI_SUCCESS;
    int code = make(type, NULL, out);
    if (code != MPI_SUCCESS)
        return code;
    if (mpi.Type_set_attr(type, keyval, *out) == MPI_SUCCESS)
        return MPI_SUCCESS;
    discard(*out);
    return MPI_ERR_TYPE;
}

int flat_of(MPI_Datatype type, MPI_Comm comm, const struct flat **out) {
    for (int i = 0; i < NAMED_MAX; i++)
        if (named[i].flat != NULL && named[i].type == type) {
            *out = named[i].flat;
            return MPI_SUCCESS;
        }
    if (type == MPI_DATATYPE_NULL)
        return MPI_ERR_TYPE;
    pthread_once(&keyval_once, make_keyval);
    struct flat *flat = NULL;
    int found = 0;
    if (mpi.Type_get_attr(type, keyval, &flat, &found) == MPI_SUCCESS && found) {
        *out = flat;
        return MPI_SUCCESS;
    }
    bool lasting = type_is_predefined(type);
    if (!lasting) {
        /* The only call by which an MPI shows whether a type is committed. */
        char nothing[16];
        int position = 0;
        if (mpi.Pack(nothing, 0, type, nothing, sizeof nothing, &position, comm) != MPI_SUCCESS)
            return MPI_ERR_TYPE;
    }
    pthread_mutex_lock(&flattening);
    int code = flatten(type, &flat);
    pthread_mutex_unlock(&flattening);
    if (code != MPI_SUCCESS)
        return code;
    if (lasting) {
        named[named_next % NAMED_MAX].type = type;
        named[named_next++ % NAMED_MAX].flat = flat;
    }
    *out = flat;
    return MPI_SUCCESS;
}

int flat_in_file(MPI_Datatype type, const struct datarep *rep, MPI_Comm comm, const struct flat **out, struct flat **own) {
    *own = NULL;
    int code = flat_of(type, comm, out);
    if (code != MPI_SUCCESS || rep == NULL)
        return code;
    struct mold mold = {rep, true};
    code = make(type, &mold, own);
    if (code != MPI_SUCCESS)
        return code;
    if ((*own)->scaled) {
        *out = *own;
        return MPI_SUCCESS;
    }
    discard(*own);
    *own = NULL;
    return MPI_SUCCESS;
}

int flat_leaves(MPI_Datatype type, struct flat **out) {
    struct mold mold = {NULL, false};
    return make(type, &mold, out);
}

void flat_free(struct flat *flat) { discard(flat); }
