/* See kernel.h. Test: crates/cli/tests/kernels.rs. */
#include "kernel.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <unistd.h>

int rank, ranks;
struct settings settings = {.seed = 1};

static const struct kernel *kernel;
static uint64_t verified_bytes, differences;

static const struct option shared_options[] = {
    {"verify", FLAG, &settings.verify, NULL, "compare all data that are read with what was written; not timed", 0, 0},
    {"keep", FLAG, &settings.keep, NULL, "keep the files at the end", 0, 0},
    {"sync", FLAG, &settings.sync, NULL, "end each writing phase with fsync or MPI_File_sync, timed", 0, 0},
    {"seed", COUNT, &settings.seed, "N", "contents and random orders follow from it", 0, 0},
    {"hints", TEXT, &settings.hints, "NAME=VALUE,...", "hints for MPI-IO, such as cb_buffer_size=1048576", 0, 0},
    {"json", FLAG, &settings.json, NULL, "print the results as one JSON object", 0, 0},
    {NULL, FLAG, NULL, NULL, NULL, 0, 0},
};

/* ---- ends ---- */

/* A launcher may end the job with the first rank that fails: all output is written before any rank ends. */
static void end_mpi(void) {
    fflush(stdout);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
}

static _Noreturn void end_all(int status) {
    end_mpi();
    exit(status);
}

_Noreturn void refuse(const char *format, ...) {
    if (rank == 0) {
        char text[1024];
        va_list words;
        va_start(words, format);
        vsnprintf(text, sizeof text, format, words);
        va_end(words);
        fprintf(stderr, "%s: %s\n", kernel->name, text);
    }
    end_all(STATUS_USAGE);
}

_Noreturn void fail(const char *format, ...) {
    char text[PATH_MAX + 1024];
    va_list words;
    va_start(words, format);
    vsnprintf(text, sizeof text, format, words);
    va_end(words);
    fprintf(stderr, "%s: rank %d: %s\n", kernel->name, rank, text);
    /* Time for the launcher to pass the message on. */
    sleep(1);
    MPI_Abort(MPI_COMM_WORLD, STATUS_FAILED);
    exit(STATUS_FAILED);
}

void agree(const char *message) {
    int mine = message != NULL ? rank : INT_MAX, first;
    MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first == INT_MAX)
        return;
    if (first == rank)
        fprintf(stderr, "%s: %s\n", kernel->name, message);
    end_all(STATUS_FAILED);
}

/* ---- options ---- */

/* The options of the kernel, then those of all. NULL at the end. */
static const struct option *option_at(size_t index) {
    size_t own = 0;
    while (kernel->options[own].name != NULL)
        own++;
    const struct option *option = index < own ? &kernel->options[index] : &shared_options[index - own];
    return option->name != NULL ? option : NULL;
}

/* How many letters differ, are missing or too many. */
static int distance(const char *a, const char *b) {
    int row[64], left = (int)strlen(a), right = (int)strlen(b);
    if (right > 62)
        return INT_MAX;
    for (int j = 0; j <= right; j++)
        row[j] = j;
    for (int i = 1; i <= left; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= right; j++) {
            int least = diagonal + (a[i - 1] != b[j - 1]);
            least = row[j] + 1 < least ? row[j] + 1 : least;
            least = row[j - 1] + 1 < least ? row[j - 1] + 1 : least;
            diagonal = row[j];
            row[j] = least;
        }
    }
    return row[right];
}

static _Noreturn void refuse_name(const char *word, size_t length) {
    char name[64];
    snprintf(name, sizeof name, "%.*s", (int)(length < 63 ? length : 63), word);
    const struct option *option, *nearest = NULL;
    int best = 4;
    for (size_t i = 0; (option = option_at(i)) != NULL; i++) {
        int apart = distance(name, option->name);
        if (apart < best) {
            best = apart;
            nearest = option;
        }
    }
    if (nearest != NULL)
        refuse("there is no option --%s; did you mean --%s?", name, nearest->name);
    refuse("there is no option --%s; %s --help lists the options", name, kernel->name);
}

/* A number with a unit: 4096, 4KiB, 1.5 is refused. 0 and true in `*valid` if the text is none. */
static uint64_t number(const char *text, bool with_unit, bool *valid) {
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    *valid = text[0] >= '0' && text[0] <= '9' && errno == 0;
    static const char *const units[] = {"", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"};
    static const uint64_t factors[] = {
        1, 1 << 10, 1 << 20, 1 << 30, 1ULL << 40, 1000, 1000000, 1000000000, 1000000000000};
    static const char *const letters[] = {"B", "K", "M", "G", "T"};
    for (int i = 0; with_unit && i < 9; i++)
        if (strcmp(end, units[i]) == 0 || (i < 5 && strcmp(end, letters[i]) == 0)) {
            *valid = *valid && value <= UINT64_MAX / factors[i];
            return value * factors[i];
        }
    *valid = *valid && *end == 0;
    return value;
}

static void set(const struct option *option, const char *text) {
    bool valid;
    char *end;
    if (option->kind == COUNT || option->kind == SIZE) {
        uint64_t value = number(text, option->kind == SIZE, &valid);
        if (!valid)
            refuse("--%s: '%s' is no %s; write %s", option->name, text, option->kind == SIZE ? "size" : "whole number",
                   option->kind == SIZE ? "a number with or without a unit, such as 4096, 64KiB or 1MiB"
                                        : "digits alone");
        if (value < option->least)
            refuse("--%s: %s is too little; the least is %" PRIu64, option->name, text, option->least);
        if (option->most != 0 && value > option->most)
            refuse("--%s: %s is too much; the most is %" PRIu64, option->name, text, option->most);
        *(uint64_t *)option->value = value;
    } else if (option->kind == REAL) {
        double value = strtod(text, &end);
        if (end == text || *end != 0 || !(value >= (double)option->least && value <= (double)option->most))
            refuse("--%s: '%s' is no number from %" PRIu64 " to %" PRIu64, option->name, text, option->least,
                   option->most);
        *(double *)option->value = value;
    } else if (option->kind == CHOICE) {
        const char *at = option->word;
        for (int i = 0;; i++) {
            size_t length = strcspn(at, "|");
            if (strlen(text) == length && strncmp(at, text, length) == 0) {
                *(int *)option->value = i;
                return;
            }
            if (at[length] == 0)
                refuse("--%s: there is no '%s'; write one of %s", option->name, text, option->word);
            at += length + 1;
        }
    } else
        *(const char **)option->value = text;
}

static void value_text(const struct option *option, char *text, size_t size) {
    const char *at;
    switch (option->kind) {
    case FLAG:
        snprintf(text, size, "%s", *(bool *)option->value ? "true" : "false");
        break;
    case COUNT:
    case SIZE:
        snprintf(text, size, "%" PRIu64, *(uint64_t *)option->value);
        break;
    case REAL:
        snprintf(text, size, "%g", *(double *)option->value);
        break;
    case CHOICE:
        at = option->word;
        for (int i = *(int *)option->value; i > 0; i--)
            at += strcspn(at, "|") + 1;
        snprintf(text, size, "%.*s", (int)strcspn(at, "|"), at);
        break;
    case TEXT:
        at = *(const char **)option->value;
        snprintf(text, size, "%s", at != NULL ? at : "");
    }
}

static void print_help(void) {
    printf("%s: %s\n\nusage: mpirun -n RANKS %s [OPTION...] FILE\n\n%s\n\noptions:\n", kernel->name, kernel->summary,
           kernel->name, kernel->text);
    const struct option *option;
    for (size_t i = 0; (option = option_at(i)) != NULL; i++) {
        char left[96], now[64] = "";
        const char *word = option->word != NULL ? option->word : "";
        snprintf(left, sizeof left, "--%s%s%s", option->name, *word != 0 ? " " : "", word);
        value_text(option, now, sizeof now);
        printf("  %s\n", left);
        for (const char *at = option->help;;) {
            int length = (int)strcspn(at, "\n");
            bool last = at[length] == 0, shown = last && option->kind != FLAG && now[0] != 0;
            printf("      %.*s%s%s%s\n", length, at, shown ? " [" : "", shown ? now : "", shown ? "]" : "");
            if (last)
                break;
            at += length + 1;
        }
    }
    printf("  --help\n      print this\n\n"
           "Sizes have the units KiB, MiB, GiB, TiB (K, M, G, T) or KB, MB, GB, TB.\n"
           "Exit status: 0; 1 if a call failed; 2 if an option is refused; 3 if data differ from what was written.\n\n"
           "examples:\n%s\n",
           kernel->examples);
}

void kernel_begin(int argc, char **argv, const struct kernel *which) {
    kernel = which;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    bool only_paths = false;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (only_paths || word[0] != '-' || word[1] == 0) {
            if (settings.path != NULL)
                refuse("'%s' is too much: there is one FILE, and it is '%s'", word, settings.path);
            settings.path = word;
            continue;
        }
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            if (rank == 0)
                print_help();
            end_all(STATUS_OK);
        }
        if (strcmp(word, "--") == 0) {
            only_paths = true;
            continue;
        }
        if (word[1] != '-')
            refuse("there is no option %s; options have two dashes, and %s --help lists them", word, kernel->name);
        size_t length = strcspn(word + 2, "=");
        const struct option *option;
        size_t j = 0;
        while ((option = option_at(j)) != NULL &&
               !(strlen(option->name) == length && strncmp(option->name, word + 2, length) == 0))
            j++;
        if (option == NULL)
            refuse_name(word + 2, length);
        const char *text = word[2 + length] == '=' ? word + 3 + length : NULL;
        if (option->kind == FLAG) {
            if (text != NULL)
                refuse("--%s has no value; leave out '=%s'", option->name, text);
            *(bool *)option->value = true;
            continue;
        }
        if (text == NULL && i + 1 == argc)
            refuse("--%s lacks its value; write --%s %s", option->name, option->name, option->word);
        set(option, text != NULL ? text : argv[++i]);
    }
    if (settings.path == NULL)
        refuse("there is no FILE; write the name of a file to make, such as /forebay/%s.out", kernel->name);
    /* Room for the suffixes of a kernel's files. */
    if (strlen(settings.path) > PATH_MAX - 32)
        refuse("FILE is longer than %d bytes; write a shorter name", PATH_MAX - 32);
    if (settings.hints != NULL) {
        MPI_Info info = file_hints();
        MPI_Info_free(&info);
    }
}

/* ---- contents ---- */

uint64_t mix(uint64_t stream, uint64_t index) {
    uint64_t word = stream * 0x9e3779b97f4a7c15 + index + 1;
    for (int i = 0; i < 2; i++) {
        word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
        word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
        word ^= word >> 31;
    }
    return word;
}

void pattern(void *data, uint64_t bytes, uint64_t stream, uint64_t offset) {
    unsigned char *at = data, *end = at + bytes;
    while (at < end) {
        if (offset % 8 == 0)
            for (; end - at >= 8; at += 8, offset += 8) {
                uint64_t whole = mix(stream, offset / 8);
                memcpy(at, &whole, 8);
            }
        uint64_t word = mix(stream, offset / 8), skip = offset % 8;
        uint64_t length = 8 - skip < (uint64_t)(end - at) ? 8 - skip : (uint64_t)(end - at);
        memcpy(at, (unsigned char *)&word + skip, length);
        at += length;
        offset += length;
    }
}

void verified(uint64_t bytes, bool differs) {
    verified_bytes += bytes;
    differences += differs;
}

void verify(const char *path, uint64_t offset, const void *expected, const void *found, uint64_t bytes) {
    if (file_failed())
        return;
    bool differs = memcmp(expected, found, bytes) != 0;
    verified(bytes, differs);
    if (!differs)
        return;
    const unsigned char *a = expected, *b = found;
    uint64_t first = 0, wrong = 0;
    while (a[first] == b[first])
        first++;
    for (uint64_t i = first; i < bytes; i++)
        wrong += a[i] != b[i];
    /* A file of wrong data would fill a screen. */
    if (differences <= 10)
        fprintf(stderr, "%s: rank %d: %s: offset %" PRIu64 ": expected 0x%02x, found 0x%02x (%" PRIu64 " of %" PRIu64
                " bytes differ)\n", kernel->name, rank, path, offset + first, a[first], b[first], wrong, bytes);
}

void *allocate(uint64_t bytes) {
    void *memory;
    int code = bytes > SIZE_MAX - 4096 ? ENOMEM : posix_memalign(&memory, 4096, bytes > 0 ? bytes : 1);
    if (code != 0)
        fail("no memory for %" PRIu64 " bytes: %s; choose smaller sizes or more ranks", bytes, strerror(code));
    return memory;
}

void split(uint64_t total, int owners, int owner, uint64_t *first, uint64_t *count) {
    uint64_t each = total / (uint64_t)owners, more = total % (uint64_t)owners, which = (uint64_t)owner;
    *first = each * which + (which < more ? which : more);
    *count = each + (which < more);
}

/* ---- times and results ---- */

void phase_start(struct phase *phase) { phase->started = MPI_Wtime(); }

void phase_stop(struct phase *phase, uint64_t bytes, uint64_t operations) {
    phase->seconds += MPI_Wtime() - phase->started;
    phase->bytes += bytes;
    phase->operations += operations;
}

static void print_json_text(const char *text) {
    putchar('"');
    for (; *text != 0; text++) {
        if (*text == '"' || *text == '\\')
            printf("\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            printf("\\u%04x", *text);
        else
            putchar(*text);
    }
    putchar('"');
}

static void print_json_head(const char *library) {
    printf("{\"kernel\": \"%s\", \"format\": 1, \"ranks\": %d, \"mpi\": ", kernel->name, ranks);
    print_json_text(library);
    printf(", \"file\": ");
    print_json_text(settings.path);
    printf(", \"options\": {");
    const struct option *option;
    for (size_t i = 0; (option = option_at(i)) != NULL; i++) {
        char text[PATH_MAX];
        value_text(option, text, sizeof text);
        printf("%s\"%s\": ", i == 0 ? "" : ", ", option->name);
        if (option->kind == CHOICE || option->kind == TEXT)
            print_json_text(text);
        else
            printf("%s", text);
    }
    printf("}, \"phases\": [");
}

int kernel_end(struct phase *phases, int count) {
    char library[MPI_MAX_LIBRARY_VERSION_STRING];
    int length;
    MPI_Get_library_version(library, &length);
    library[strcspn(library, ",\n")] = 0;
    for (char *at = library; *at != 0; at++)
        if (*at == '\t')
            *at = ' ';
    if (rank == 0 && settings.json)
        print_json_head(library);
    else if (rank == 0)
        printf("%s: %d ranks, %s\n%-20s %14s %10s %9s %9s %9s %9s\n", kernel->name, ranks, library, "phase", "bytes",
               "calls", "s min", "s mean", "s max", "MiB/s");
    for (int i = 0; i < count; i++) {
        struct phase *phase = &phases[i];
        uint64_t mine[2] = {phase->bytes, phase->operations}, sums[2];
        double least, mean, most;
        MPI_Reduce(mine, sums, 2, MPI_UINT64_T, MPI_SUM, 0, MPI_COMM_WORLD);
        MPI_Reduce(&phase->seconds, &least, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
        MPI_Reduce(&phase->seconds, &mean, 1, MPI_DOUBLE, MPI_SUM, 0, MPI_COMM_WORLD);
        MPI_Reduce(&phase->seconds, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        if (rank != 0)
            continue;
        mean /= ranks;
        /* The ranks begin a phase together, and it is over with the last. */
        double rate = most > 0 ? (double)sums[0] / most : 0;
        if (settings.json)
            printf("%s{\"name\": \"%s\", \"bytes\": %" PRIu64 ", \"operations\": %" PRIu64
                   ", \"seconds\": {\"min\": %.9f, \"mean\": %.9f, \"max\": %.9f}, \"bytes_per_second\": %.0f%s%s}",
                   i == 0 ? "" : ", ", phase->name, sums[0], sums[1], least, mean, most, rate,
                   phase->json ? ", " : "", phase->json ? phase->json : "");
        else
            printf("%-20s %14" PRIu64 " %10" PRIu64 " %9.4f %9.4f %9.4f %9.1f\n%s%s", phase->name, sums[0], sums[1],
                   least, mean, most, rate / (1 << 20), phase->text ? phase->text : "", phase->text ? "\n" : "");
    }
    uint64_t mine[2] = {verified_bytes, differences}, sums[2];
    MPI_Allreduce(mine, sums, 2, MPI_UINT64_T, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0 && settings.json)
        printf("], \"verified_bytes\": %" PRIu64 ", \"blocks_that_differ\": %" PRIu64 "}\n", sums[0], sums[1]);
    else if (rank == 0 && settings.verify)
        printf("%" PRIu64 " bytes verified, %" PRIu64 " blocks differ\n", sums[0], sums[1]);
    end_mpi();
    return sums[1] == 0 ? STATUS_OK : STATUS_MISMATCH;
}
