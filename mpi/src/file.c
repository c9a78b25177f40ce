/*
 * Views, hints and agreement between the ranks that opened a file together.
 */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

void view_free(struct view *view) {
    if (view->etype != MPI_DATATYPE_NULL && !type_is_predefined(view->etype))
        mpi.Type_free(&view->etype);
    if (view->filetype != MPI_DATATYPE_NULL && !type_is_predefined(view->filetype))
        mpi.Type_free(&view->filetype);
    if (view->own != NULL)
        flat_free(view->own);
    view->own = NULL;
}

int view_default(struct view *view, MPI_Comm comm) {
    *view = (struct view){.etype = MPI_BYTE, .filetype = MPI_BYTE, .etype_size = 1};
    return flat_of(MPI_BYTE, comm, &view->file);
}

int64_t view_offset(const struct view *view, int64_t position) {
    struct walk walk;
    int64_t bytes;
    if (view->file->size == 0)
        return view->disp;
    walk_start(&walk, view->file, view->disp, position);
    return walk_next(&walk, 1, &bytes);
}

/* The offset of byte `within` of copy `tile` of the type; false when it exceeds the largest offset. */
static bool view_place(const struct view *view, int64_t tile, int64_t within, int64_t *at) {
    int64_t start;
    return !__builtin_mul_overflow(tile, view->file->extent, &start) && !__builtin_add_overflow(start, within, &start) &&
           !__builtin_add_overflow(start, view->disp, at);
}

int view_span(const struct view *view, int64_t position, int64_t bytes, int64_t *first, int64_t *end) {
    const struct flat *flat = view->file;
    struct walk from, to;
    walk_start(&from, flat, view->disp, position);
    walk_start(&to, flat, view->disp, position + (bytes - 1));
    const struct block *head = &flat->blocks[from.index], *tail = &flat->blocks[to.index];
    int64_t start = head->offset + from.within, stop = tail->offset + to.within, last;
    if (!flat->apart) {
        /* Copies of the type overlap in their extents, so the whole first and last copies count. */
        start = flat->blocks[0].offset;
        stop = flat->blocks[flat->count - 1].offset + flat->blocks[flat->count - 1].bytes - 1;
    }
    return view_place(view, from.tile, start, first) && view_place(view, to.tile, stop, &last) &&
                   !__builtin_add_overflow(last, 1, end)
               ? MPI_SUCCESS
               : MPI_ERR_ARG;
}

int64_t view_run(const struct view *view) {
    return view->file->dense || view->file->count == 0 ? INT64_MAX : view->file->size / view->file->count;
}

int64_t view_bytes_before(const struct view *view, int64_t end) {
    const struct flat *flat = view->file;
    if (flat->size == 0 || end <= view->disp)
        return 0;
    int64_t within = end - view->disp, tile = 0;
    if (flat->extent > 0) {
        /* A type map may extend beyond its extent, so its bytes can be in tiles before the one that contains `end`. */
        int64_t reach = flat->blocks[flat->count - 1].offset + flat->blocks[flat->count - 1].bytes;
        tile = within / flat->extent;
        int64_t over = reach > flat->extent ? (reach - 1) / flat->extent : 0;
        tile = tile > over ? tile - over : 0;
    }
    int64_t bytes = tile * flat->size;
    for (;; tile++) {
        int64_t start, got = 0;
        if (__builtin_mul_overflow(tile, flat->extent, &start) || within - start <= flat->blocks[0].offset)
            return bytes;
        int64_t here = within - start;
        for (int64_t low = 0, high = flat->count; low < high;) {
            /* Blocks rise, so those before `low` begin before the end. */
            int64_t middle = (low + high) / 2;
            const struct block *block = &flat->blocks[middle];
            if (block->offset < here) {
                int64_t part = here - block->offset;
                got = flat->before[middle] + (part < block->bytes ? part : block->bytes);
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        bytes += got;
        if (flat->extent <= 0)
            return bytes;
    }
}

int agree(const struct file *file, int code, int64_t value) {
    int64_t mine[3] = {code, value, ~value}, all[3];
    if (file->size == 1)
        return code;
    if (mpi.Allreduce(mine, all, 3, MPI_INT64_T, MPI_MAX, file->comm) != MPI_SUCCESS)
        return MPI_ERR_INTERN;
    if (all[0] != MPI_SUCCESS)
        return (int)all[0];
    return all[1] == ~all[2] ? MPI_SUCCESS : MPI_ERR_NOT_SAME;
}

static const char *const hint_names[HINT_COUNT] = {
#define X(name) #name,
    HINTS(X)
#undef X
};

void hints_read(struct file *file, MPI_Info info, bool opening) {
    for (int i = 0; i < HINT_COUNT && info != MPI_INFO_NULL; i++) {
        /* The layout of a file is fixed when it is created. */
        if (!opening && (i == HINT_striping_factor || i == HINT_striping_unit))
            continue;
        /* MPICH ends a program whose value is longer than its buffer. A file keeps no value of that length. */
        char value[MPI_MAX_INFO_VAL + 1] = "";
        int found = 0;
        if (mpi.Info_get(info, hint_names[i], MPI_MAX_INFO_VAL, value, &found) == MPI_SUCCESS && found &&
            strlen(value) < HINT_BYTES)
            memcpy(file->hints[i], value, HINT_BYTES);
    }
}

MPI_Info hints_give(const struct file *file) {
    MPI_Info info = MPI_INFO_NULL;
    if (mpi.Info_create(&info) != MPI_SUCCESS)
        return MPI_INFO_NULL;
    for (int i = 0; i < HINT_COUNT; i++)
        if (file->hints[i][0] != 0)
            mpi.Info_set(info, hint_names[i], file->hints[i]);
    return info;
}

/* The driver's own handle of a datatype, which the program may free. */
static int keep(MPI_Datatype type, MPI_Datatype *out) {
    if (type_is_predefined(type)) {
        *out = type;
        return MPI_SUCCESS;
    }
    return mpi.Type_dup(type, out) == MPI_SUCCESS ? MPI_SUCCESS : MPI_ERR_TYPE;
}

/*
 * Checks an etype or file type, for a file that is open for writing or not: displacements do not fall and are not
 * negative, and written bytes do not overlap (MPI 4.0, 14.3). The error class is that of ROMIO.
 */
static int type_check(const struct flat *flat, bool writes) {
    return flat->rising && !(writes && flat->overlaps) ? MPI_SUCCESS : MPI_ERR_IO;
}

/* Checks that a file type consists of etypes of this size, with the sizes of both in the file. */
static int view_check(int64_t etype_size, const struct flat *flat) {
    if (etype_size <= 0 || flat->size % etype_size != 0)
        return MPI_ERR_ARG;
    /* Copies of it do not overlap. */
    return flat->size > 0 && flat->extent <= 0 ? MPI_ERR_ARG : MPI_SUCCESS;
}

static int64_t name_hash(const char *name) {
    uint32_t hash = 2166136261u;
    for (; *name != 0; name++)
        hash = (hash ^ (unsigned char)*name) * 16777619u;
    return hash >> 1;
}

static int view_make(struct file *file, struct view *view, MPI_Offset disp, MPI_Datatype etype, MPI_Datatype filetype,
                     const char *datarep) {
    const struct flat *flat = NULL, *of_etype = NULL;
    struct flat *own_etype = NULL;
    view->etype = view->filetype = MPI_DATATYPE_NULL;
    view->own = NULL;
    if (disp == MPI_DISPLACEMENT_CURRENT) {
        int64_t position = 0;
        if (!(file->amode & MPI_MODE_SEQUENTIAL) || !shared_there(file))
            return MPI_ERR_ARG;
        int code = shared_move(file, 0, &position);
        if (code != MPI_SUCCESS)
            return code;
        disp = view_offset(&file->view, position * file->view.etype_size);
    } else if (disp < 0 || (file->amode & MPI_MODE_SEQUENTIAL)) {
        return MPI_ERR_ARG;
    }
    int code = datarep_find(datarep, &view->rep);
    if (code == MPI_SUCCESS)
        code = flat_in_file(etype, view->rep, file->comm, &of_etype, &own_etype);
    if (code != MPI_SUCCESS)
        return code;
    bool writes = (file->amode & MPI_MODE_RDONLY) == 0;
    int64_t etype_size = of_etype->size;
    int of_etype_code = type_check(of_etype, writes);
    if (own_etype != NULL)
        flat_free(own_etype);
    code = flat_in_file(filetype, view->rep, file->comm, &flat, &view->own);
    if (code != MPI_SUCCESS)
        return code;
    code = of_etype_code != MPI_SUCCESS ? of_etype_code : type_check(flat, writes);
    if (code == MPI_SUCCESS)
        code = view_check(etype_size, flat);
    if (code == MPI_SUCCESS)
        code = keep(etype, &view->etype);
    if (code == MPI_SUCCESS)
        code = keep(filetype, &view->filetype);
    /* The flat form in memory lives as long as the copy of the datatype. */
    if (code == MPI_SUCCESS && view->own == NULL)
        code = flat_of(view->filetype, file->comm, &view->file);
    else
        view->file = view->own;
    if (code != MPI_SUCCESS)
        view_free(view);
    view->disp = disp;
    view->etype_size = etype_size;
    return code;
}

int file_set_view(struct file *file, MPI_Offset disp, MPI_Datatype etype, MPI_Datatype filetype, const char *datarep,
                  MPI_Info info) {
    struct view made;
    /* The shared pointer may be the start of the view. No rank reads it while another still moves it. */
    if ((file->amode & MPI_MODE_SEQUENTIAL) && file->size > 1) {
        shared_by_all(file);
        mpi.Barrier(file->comm);
    }
    int code = file->split != SPLIT_NONE ? MPI_ERR_OTHER : view_make(file, &made, disp, etype, filetype, datarep);
    bool has_types = code == MPI_SUCCESS;
    shared_prepare(file);
    pthread_mutex_lock(&file->lock);
    char hints[HINT_COUNT][HINT_BYTES];
    memcpy(hints, file->hints, sizeof hints);
    hints_read(file, info, false);
    bool hinted = memcmp(hints, file->hints, sizeof hints) != 0;
    pthread_mutex_unlock(&file->lock);
    /*
     * One exchange carries everything that the ranks need from each other, since programs may set a view for each
     * access.
     */
    int64_t value = has_types ? made.etype_size * 65599 + name_hash(datarep_name(made.rep)) : 0;
    struct {
        int64_t code, value, not_value, entangled, shortest, missed, hinted;
    } mine = {code, value, ~value, has_types && !made.file->apart, has_types ? -view_run(&made) : INT64_MIN,
              file->shared == NULL, hinted}, all = mine;
    int numbers = sizeof all / sizeof(int64_t);
    if (file->size > 1 && mpi.Allreduce(&mine, &all, numbers, MPI_INT64_T, MPI_MAX, file->comm) != MPI_SUCCESS)
        all.code = MPI_ERR_INTERN;
    if (all.code == MPI_SUCCESS && all.value != ~all.not_value)
        all.code = MPI_ERR_NOT_SAME;
    pthread_mutex_lock(&file->lock);
    if (all.code != MPI_SUCCESS) {
        memcpy(file->hints, hints, sizeof hints);
        pthread_mutex_unlock(&file->lock);
        if (has_types)
            view_free(&made);
        return (int)all.code;
    }
    struct view before = file->view;
    file->shortest_run = -all.shortest;
    file->apart = all.entangled == 0;
    file->view = made;
    file->position = 0;
    pthread_mutex_unlock(&file->lock);
    view_free(&before);
    if (all.hinted)
        mpi.Bcast(file->hints, sizeof file->hints, MPI_BYTE, 0, file->comm);
    return shared_turn(file, all.missed != 0);
}
