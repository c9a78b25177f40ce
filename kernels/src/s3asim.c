/*
 * S3aSim: a parallel search of sequences. Ranks stream the fragments of a database for each query, find results, and
 * write all results of a query to one file, in the order of their scores. See README.md.
 *
 * Number, scores and sizes of the results follow from the seed, so every rank can compute them for --verify.
 */
#include "kernel.h"

#include <inttypes.h>

enum { DATABASE_STREAM = 1, RESULT_STREAM = 2, DRAW_STREAM = 3 };
enum way { BY_POSIX, BY_CALL, BY_LIST, BY_COLLECTIVE };
enum writer { WORKERS, MASTER };

static uint64_t queries = 100, fragments = 16, fragment_bytes = 1 << 20, buffer_bytes = 256 << 10, most_results = 16;
static uint64_t least_bytes = 256, most_bytes = 4096, batch = 1, search_rate;
static int way = BY_POSIX, writer = WORKERS, part;

static const struct option options[] = {
    {"queries", COUNT, &queries, "N", "queries", 1, 1 << 24},
    {"fragments", COUNT, &fragments, "N", "fragments of the database; rank r has r, r + ranks, ...", 1, 1 << 20},
    {"fragment-size", SIZE, &fragment_bytes, "SIZE", "bytes of a fragment", 1, 0},
    {"buffer", SIZE, &buffer_bytes, "SIZE", "bytes of a read of the stream", 1, 1 << 30},
    {"results", COUNT, &most_results, "N", "a query has 0 to N results in a fragment", 1, 4096},
    {"least-size", SIZE, &least_bytes, "SIZE", "bytes of the smallest results", 1, 1 << 30},
    {"most-size", SIZE, &most_bytes, "SIZE", "bytes of the largest results", 1, 1 << 30},
    {"batch", COUNT, &batch, "N", "queries whose results are written together", 1, 1 << 20},
    {"search-rate", SIZE, &search_rate, "SIZE",
     "bytes that a rank searches in a second: it computes for so long; 0 is at once", 0, 0},
    {"api", CHOICE, &way, "posix|independent|list|collective",
     "how results are written: a POSIX call or an independent call each, one independent call with a view\n"
     "for all of a batch, or one collective call; the database is read by POSIX or independent calls", 0, 0},
    {"writer", CHOICE, &writer, "workers|master", "each rank writes what it found, or rank 0 writes everything", 0, 0},
    {"part", CHOICE, &part, "all|database|search|check",
     "database: make it alone; search: in a database that is there; check: verify files that are there", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

static const struct kernel kernel = {
    "s3asim",
    "streaming search of a database, sorted results",
    "Makes a database of random bytes in FILE.database. For each query every rank reads its fragments from begin to\n"
    "end; the results of all ranks are sorted by falling score and written to FILE.results. With --verify the\n"
    "database is compared while it is read, and the results are read back. Both files are removed, unless --keep is\n"
    "given.",
    "  mpirun -n 4 s3asim --verify /forebay/search\n"
    "  mpirun -n 8 s3asim --fragments 64 --fragment-size 16MiB --search-rate 1GiB --api collective /forebay/search\n"
    "  mpirun -n 4 s3asim --part database --fragments 64 /lustre/search\n"
    "  mpirun -n 4 s3asim --part search --fragments 64 --api list --batch 10 --keep --json /lustre/search",
    options,
};

enum { MAKE, STREAM, SEARCH, MERGE, WRITE, CHECK, PHASES };
static struct phase phases[PHASES] = {{.name = "database"}, {.name = "stream"}, {.name = "search"},
                                      {.name = "merge"},    {.name = "write"},  {.name = "check"}};

/* A result; its bytes in the file follow from its query, fragment and number. */
struct result {
    uint64_t score, fragment, number, bytes, offset;
};

static uint64_t draw(uint64_t query, uint64_t fragment, uint64_t what) {
    return mix(mix(settings.seed * 4 + DRAW_STREAM, query * fragments + fragment), what);
}

/* Appends what a query finds in a fragment. */
static void find(uint64_t query, uint64_t fragment, struct result *results, uint64_t *count) {
    uint64_t found = draw(query, fragment, 0) % (most_results + 1);
    for (uint64_t i = 0; i < found; i++)
        results[(*count)++] = (struct result){
            .score = draw(query, fragment, 1 + 2 * i) >> 40,
            .fragment = fragment,
            .number = i,
            .bytes = least_bytes + draw(query, fragment, 2 + 2 * i) % (most_bytes - least_bytes + 1),
        };
}

static void write_out(void *data, uint64_t query, const struct result *result) {
    uint64_t name = (query * fragments + result->fragment) * 4096 + result->number;
    pattern(data, result->bytes, mix(settings.seed * 4 + RESULT_STREAM, name), 0);
}

/* Highest score first; equal ones by fragment and number. */
static int by_score(const void *a, const void *b) {
    const struct result *x = a, *y = b;
    if (x->score != y->score)
        return x->score < y->score ? 1 : -1;
    if (x->fragment != y->fragment)
        return x->fragment < y->fragment ? -1 : 1;
    return (x->number > y->number) - (x->number < y->number);
}

/* Sorts a query's results and gives them their places from `offset` on; returns the end. */
static uint64_t place(struct result *results, uint64_t count, uint64_t offset) {
    qsort(results, count, sizeof *results, by_score);
    for (uint64_t i = 0; i < count; i++) {
        results[i].offset = offset;
        offset += results[i].bytes;
    }
    return offset;
}

static bool is_mine(const struct result *result) {
    return writer == MASTER ? rank == 0 : result->fragment % (uint64_t)ranks == (uint64_t)rank;
}

/* The interface of the database, and of the check. */
static enum access access_of(void) { return way == BY_POSIX ? POSIX : INDEPENDENT; }

static void make_database(const char *path) {
    struct file file;
    char *buffer = allocate(buffer_bytes);
    file_open(&file, MPI_COMM_WORLD, path, access_of(), CREATE, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    for (uint64_t f = (uint64_t)rank; f < fragments; f += (uint64_t)ranks)
        for (uint64_t at = 0; at < fragment_bytes; at += buffer_bytes) {
            uint64_t bytes = fragment_bytes - at < buffer_bytes ? fragment_bytes - at : buffer_bytes;
            pattern(buffer, bytes, settings.seed * 4 + DATABASE_STREAM, f * fragment_bytes + at);
            phase_start(&phases[MAKE]);
            file_write(&file, f * fragment_bytes + at, buffer, bytes);
            phase_stop(&phases[MAKE], bytes, 1);
        }
    if (settings.sync) {
        phase_start(&phases[MAKE]);
        file_sync(&file);
        phase_stop(&phases[MAKE], 0, 0);
    }
    file_close(&file);
    free(buffer);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Reads this rank's fragments from begin to end. */
static void stream(struct file *database, char *buffer, char *expected) {
    for (uint64_t f = (uint64_t)rank; f < fragments; f += (uint64_t)ranks)
        for (uint64_t at = 0; at < fragment_bytes; at += buffer_bytes) {
            uint64_t bytes = fragment_bytes - at < buffer_bytes ? fragment_bytes - at : buffer_bytes;
            uint64_t offset = f * fragment_bytes + at;
            if (settings.verify)
                memset(buffer, 0xee, bytes);
            phase_start(&phases[STREAM]);
            file_read(database, offset, buffer, bytes);
            phase_stop(&phases[STREAM], bytes, 1);
            if (settings.verify) {
                pattern(expected, bytes, settings.seed * 4 + DATABASE_STREAM, offset);
                verify(database->path, offset, expected, buffer, bytes);
            }
            if (search_rate > 0) {
                phase_start(&phases[SEARCH]);
                while (MPI_Wtime() - phases[SEARCH].started < (double)bytes / (double)search_rate)
                    ;
                phase_stop(&phases[SEARCH], 0, 1);
            }
        }
}

/* What all ranks have found for a query, on every rank. */
static struct result *exchange(const struct result *mine, uint64_t found, uint64_t *count) {
    int words = (int)(sizeof *mine / sizeof(uint64_t)), own = (int)found * words, all = 0;
    int *lengths = allocate((uint64_t)ranks * sizeof(int)), *starts = allocate((uint64_t)ranks * sizeof(int));
    MPI_Allgather(&own, 1, MPI_INT, lengths, 1, MPI_INT, MPI_COMM_WORLD);
    for (int r = 0; r < ranks; r++) {
        starts[r] = all;
        all += lengths[r];
    }
    *count = (uint64_t)(all / words);
    struct result *results = allocate(*count * sizeof *results);
    MPI_Allgatherv(mine, own, MPI_UINT64_T, results, lengths, starts, MPI_UINT64_T, MPI_COMM_WORLD);
    free(lengths);
    free(starts);
    return results;
}

/* Results that wait for the end of their batch. */
static struct {
    char *data;
    uint64_t *offsets, *lengths, count, bytes, room, data_room;
} held;

static void hold(uint64_t query, const struct result *result) {
    if (held.count == held.room) {
        held.room = held.room * 2 + 64;
        held.offsets = realloc(held.offsets, held.room * sizeof *held.offsets);
        held.lengths = realloc(held.lengths, held.room * sizeof *held.lengths);
    }
    if (held.bytes + result->bytes > held.data_room) {
        held.data_room = held.data_room * 2 + result->bytes;
        held.data = realloc(held.data, held.data_room);
    }
    if (held.offsets == NULL || held.lengths == NULL || held.data == NULL)
        fail("no memory for the results of %" PRIu64 " queries; write a smaller --batch", batch);
    write_out(held.data + held.bytes, query, result);
    held.offsets[held.count] = result->offset;
    held.lengths[held.count++] = result->bytes;
    held.bytes += result->bytes;
}

/* One call for all results of the batch: a view has their places. */
static void write_view(struct file *file) {
    MPI_Aint *places = allocate(held.count * sizeof *places);
    int *lengths = allocate(held.count * sizeof *lengths);
    for (uint64_t i = 0; i < held.count; i++) {
        places[i] = (MPI_Aint)held.offsets[i];
        lengths[i] = (int)held.lengths[i];
    }
    MPI_Datatype type = MPI_BYTE;
    if (held.count > 0) {
        MPI_Type_create_hindexed((int)held.count, lengths, places, MPI_BYTE, &type);
        MPI_Type_commit(&type);
    }
    MPI_Info info = file_hints();
    int code = MPI_File_set_view(file->mpi, 0, MPI_BYTE, type, "native", info);
    if (code != MPI_SUCCESS)
        fail("%s: MPI_File_set_view: %s", file->path, file_error(code));
    if (held.bytes > INT_MAX)
        fail("the results of a batch have more than 2 GiB; write a smaller --batch");
    file->access = way == BY_COLLECTIVE ? COLLECTIVE : INDEPENDENT;
    if (way == BY_COLLECTIVE || held.bytes > 0)
        file_write(file, 0, held.data, held.bytes);
    if (info != MPI_INFO_NULL)
        MPI_Info_free(&info);
    if (held.count > 0)
        MPI_Type_free(&type);
    free(places);
    free(lengths);
}

static void write_held(struct file *file) {
    phase_start(&phases[WRITE]);
    if (way >= BY_LIST)
        write_view(file);
    else
        for (uint64_t i = 0, at = 0; i < held.count; at += held.lengths[i++])
            file_write(file, held.offsets[i], held.data + at, held.lengths[i]);
    phase_stop(&phases[WRITE], held.bytes, way < BY_LIST ? held.count : way == BY_COLLECTIVE || held.count > 0);
    held.count = held.bytes = 0;
}

static void search(const char *database_path, const char *results_path) {
    struct file database, file;
    char *buffer = allocate(buffer_bytes), *expected = allocate(buffer_bytes);
    uint64_t own = (fragments + (uint64_t)ranks - 1) / (uint64_t)ranks, end = 0;
    struct result *mine = allocate(own * most_results * sizeof *mine);
    file_open(&database, MPI_COMM_WORLD, database_path, access_of(), READ, 0);
    file_open(&file, MPI_COMM_WORLD, results_path, access_of(), CREATE, 0);
    MPI_Barrier(MPI_COMM_WORLD);
    for (uint64_t query = 0; query < queries; query++) {
        uint64_t found = 0, count;
        stream(&database, buffer, expected);
        for (uint64_t f = (uint64_t)rank; f < fragments; f += (uint64_t)ranks)
            find(query, f, mine, &found);
        phase_start(&phases[MERGE]);
        struct result *results = exchange(mine, found, &count);
        end = place(results, count, end);
        phase_stop(&phases[MERGE], 0, 1);
        for (uint64_t i = 0; i < count; i++)
            if (is_mine(&results[i]))
                hold(query, &results[i]);
        free(results);
        if ((query + 1) % batch == 0 || query + 1 == queries)
            write_held(&file);
    }
    if (settings.sync) {
        phase_start(&phases[WRITE]);
        file_sync(&file);
        phase_stop(&phases[WRITE], 0, 0);
    }
    file_close(&database);
    file_close(&file);
    free(buffer);
    free(expected);
    free(mine);
    free(held.data);
    free(held.offsets);
    free(held.lengths);
    MPI_Barrier(MPI_COMM_WORLD);
}

/* Reads the results of every ranks-th query, wherever they came from. */
static void check(const char *path) {
    struct file file;
    struct result *results = allocate(fragments * most_results * sizeof *results);
    char *expected = allocate(most_bytes), *found = allocate(most_bytes);
    uint64_t end = 0;
    file_open(&file, MPI_COMM_WORLD, path, access_of(), READ, 0);
    for (uint64_t query = 0; query < queries; query++) {
        uint64_t count = 0;
        for (uint64_t f = 0; f < fragments; f++)
            find(query, f, results, &count);
        end = place(results, count, end);
        for (uint64_t i = 0; query % (uint64_t)ranks == (uint64_t)rank && i < count; i++) {
            write_out(expected, query, &results[i]);
            memset(found, 0xee, results[i].bytes);
            phase_start(&phases[CHECK]);
            file_read(&file, results[i].offset, found, results[i].bytes);
            phase_stop(&phases[CHECK], results[i].bytes, 1);
            verify(path, results[i].offset, expected, found, results[i].bytes);
        }
    }
    file_close(&file);
    free(results);
    free(expected);
    free(found);
    MPI_Barrier(MPI_COMM_WORLD);
}

int main(int argc, char **argv) {
    kernel_begin(argc, argv, &kernel);
    if (least_bytes > most_bytes)
        refuse("--least-size: %" PRIu64 " is more than --most-size %" PRIu64 "; write less", least_bytes, most_bytes);
    if (settings.verify && part == 1)
        refuse("--verify needs a part that reads; write --part all, search or check");
    if (part == 3 && !settings.verify)
        refuse("--part check does nothing without --verify; add it");
    if (fragments * most_results > INT_MAX / 8)
        refuse("--fragments x --results is too much; the most is %d", INT_MAX / 8);
    if (fragment_bytes > (uint64_t)INT64_MAX / fragments)
        refuse("--fragment-size: the database would be too large for a file; write less");

    char database[PATH_MAX], results[PATH_MAX];
    snprintf(database, sizeof database, "%s.database", settings.path);
    snprintf(results, sizeof results, "%s.results", settings.path);
    if (part == 0 || part == 1)
        make_database(database);
    if (part == 0 || part == 2)
        search(database, results);
    if (settings.verify)
        check(results);
    if (part != 1 && !settings.keep && rank == 0) {
        file_remove(database, access_of());
        file_remove(results, access_of());
    }
    int first = part == 2 ? STREAM : part == 3 ? CHECK : MAKE;
    int last = part == 1 ? STREAM : settings.verify ? PHASES : CHECK;
    return kernel_end(phases + first, last - first);
}
