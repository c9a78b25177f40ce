/*
 * Data representations: external32 of every named type, byte for byte as in the standard, and representations that a
 * program registers. datarep POOL_FILE
 */
#include "check.h"

#include <stdint.h>
#include <wchar.h>

static MPI_File file;
static int offset;
static char *path;

static void view(MPI_Datatype etype, MPI_Datatype filetype, const char *name) {
    OK(MPI_File_set_view(file, offset, etype, filetype, name, MPI_INFO_NULL));
}

static int items(MPI_Status *status, MPI_Datatype type) {
    int count = -1;
    MPI_Get_count(status, type, &count);
    return count;
}

/* Writes two values of a type, checks the bytes in the file, and reads the values again. */
static void both_ways(const char *name, MPI_Datatype type, const void *values, int bytes, const unsigned char *expected, int in_file) {
    unsigned char raw[128], back[128];
    MPI_Status status;
    MPI_Aint extent = -1;
    int before = failures;
    view(type, type, "external32");
    OK(MPI_File_get_type_extent(file, type, &extent));
    CHECK(extent == in_file);
    OK(MPI_File_write_at(file, 0, values, 2, type, &status));
    CHECK(items(&status, type) == 2);
    memset(back, 0, sizeof back);
    OK(MPI_File_read_at(file, 0, back, 2, type, &status));
    CHECK(items(&status, type) == 2 && memcmp(back, values, bytes) == 0);
    view(MPI_BYTE, MPI_BYTE, "native");
    OK(MPI_File_read_at(file, 0, raw, 2 * in_file, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(raw, expected, 2 * in_file) == 0);
    if (failures > before)
        printf("rank %d: that was %s\n", rank, name);
}

#define BOTH_WAYS(type, c_type, one, other, ...)                                                                       \
    do {                                                                                                               \
        c_type values[2];                                                                                              \
        const unsigned char expected[] = {__VA_ARGS__};                                                                \
        memset(values, 0, sizeof values);                                                                              \
        values[0] = (c_type)one;                                                                                       \
        values[1] = (c_type)other;                                                                                     \
        if (type != MPI_DATATYPE_NULL)                                                                                 \
            both_ways(#type, type, values, sizeof values, expected, sizeof expected / 2);                              \
    } while (0)
#define ZEROS_6 0, 0, 0, 0, 0, 0
#define ZEROS_13 ZEROS_6, ZEROS_6, 0
#define F(sign) sign ? 0xbf : 0x3f, 0xc0, 0, 0
#define D(sign) sign ? 0xbf : 0x3f, 0xf8, ZEROS_6
#define Q(sign) sign ? 0xbf : 0x3f, 0xff, 0x80, ZEROS_13
#define B2 0xff, 0xfe, 0x12, 0x34
#define B4 0xff, 0xff, 0xff, 0xfe, 0x12, 0x34, 0x56, 0x78
#define B8 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe, 0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0

static void table(void) {
    BOTH_WAYS(MPI_PACKED, char, 1, 2, 1, 2);
    BOTH_WAYS(MPI_BYTE, char, 1, 2, 1, 2);
    BOTH_WAYS(MPI_CHAR, char, 'a', 'b', 0x61, 0x62);
    BOTH_WAYS(MPI_UNSIGNED_CHAR, unsigned char, 255, 2, 0xff, 2);
    BOTH_WAYS(MPI_SIGNED_CHAR, signed char, -1, 2, 0xff, 2);
    BOTH_WAYS(MPI_WCHAR, wchar_t, 0x20ac, 'A', 0x20, 0xac, 0, 0x41);
    BOTH_WAYS(MPI_SHORT, short, -2, 0x1234, B2);
    BOTH_WAYS(MPI_UNSIGNED_SHORT, unsigned short, 0xfffe, 0x1234, B2);
    BOTH_WAYS(MPI_INT, int, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_UNSIGNED, unsigned, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_LONG, long, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_UNSIGNED_LONG, unsigned long, 0xfffffffeu, 0x12345678, B4);
    BOTH_WAYS(MPI_LONG_LONG, long long, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_UNSIGNED_LONG_LONG, unsigned long long, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_FLOAT, float, 1.5, -1.5, F(0), F(1));
    BOTH_WAYS(MPI_DOUBLE, double, 1.5, -1.5, D(0), D(1));
    /* The last bytes of each are padding. */
    const long double halves[2] = {1.5, -1.5};
    both_ways("MPI_LONG_DOUBLE", MPI_LONG_DOUBLE, halves, 10, (const unsigned char[]){Q(0), Q(1)}, 16);
    BOTH_WAYS(MPI_C_BOOL, _Bool, 1, 0, 1, 0);
    BOTH_WAYS(MPI_INT8_T, int8_t, -1, 2, 0xff, 2);
    BOTH_WAYS(MPI_INT16_T, int16_t, -2, 0x1234, B2);
    BOTH_WAYS(MPI_INT32_T, int32_t, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_INT64_T, int64_t, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_UINT8_T, uint8_t, 255, 2, 0xff, 2);
    BOTH_WAYS(MPI_UINT16_T, uint16_t, -2, 0x1234, B2);
    BOTH_WAYS(MPI_UINT32_T, uint32_t, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_UINT64_T, uint64_t, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_AINT, MPI_Aint, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_COUNT, MPI_Count, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_OFFSET, MPI_Offset, -2, 0x123456789abcdef0, B8);
    const float _Complex c4 = __builtin_complex(1.5f, -1.5f);
    const double _Complex c8 = __builtin_complex(1.5, -1.5);
    const long double _Complex c16 = __builtin_complex(1.5L, -1.5L);
    BOTH_WAYS(MPI_C_FLOAT_COMPLEX, float _Complex, c4, 0, F(0), F(1), 0, 0, ZEROS_6);
    BOTH_WAYS(MPI_C_DOUBLE_COMPLEX, double _Complex, c8, c8, D(0), D(1), D(0), D(1));
    BOTH_WAYS(MPI_CHARACTER, char, 'a', 'b', 0x61, 0x62);
    BOTH_WAYS(MPI_LOGICAL, int, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0);
    BOTH_WAYS(MPI_INTEGER, int, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_REAL, float, 1.5, -1.5, F(0), F(1));
    BOTH_WAYS(MPI_DOUBLE_PRECISION, double, 1.5, -1.5, D(0), D(1));
    BOTH_WAYS(MPI_COMPLEX, float _Complex, c4, 0, F(0), F(1), 0, 0, ZEROS_6);
    BOTH_WAYS(MPI_DOUBLE_COMPLEX, double _Complex, c8, c8, D(0), D(1), D(0), D(1));
    BOTH_WAYS(MPI_INTEGER1, int8_t, -1, 2, 0xff, 2);
    BOTH_WAYS(MPI_INTEGER2, int16_t, -2, 0x1234, B2);
    BOTH_WAYS(MPI_INTEGER4, int32_t, -2, 0x12345678, B4);
    BOTH_WAYS(MPI_INTEGER8, int64_t, -2, 0x123456789abcdef0, B8);
    BOTH_WAYS(MPI_REAL4, float, 1.5, -1.5, F(0), F(1));
    BOTH_WAYS(MPI_REAL8, double, 1.5, -1.5, D(0), D(1));
    const long double _Complex two = c16; /* the padding of its parts is undefined, so it is compared by value */
    unsigned char raw[32];
    const unsigned char expected[] = {Q(0), Q(1)};
    long double _Complex back = 0;
    view(MPI_C_LONG_DOUBLE_COMPLEX, MPI_C_LONG_DOUBLE_COMPLEX, "external32");
    OK(MPI_File_write_at(file, 0, &two, 1, MPI_C_LONG_DOUBLE_COMPLEX, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 0, &back, 1, MPI_C_LONG_DOUBLE_COMPLEX, MPI_STATUS_IGNORE));
    CHECK(back == two);
    view(MPI_BYTE, MPI_BYTE, "native");
    OK(MPI_File_read_at(file, 0, raw, 32, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(raw, expected, 32) == 0);
    const long double numbers[] = {1.0L / 3, 3.3621031431120935063e-4932L, 1e-4940L, 1.18e4932L, -0.0L, __builtin_infl()};
    long double again[6] = {0};
    view(MPI_LONG_DOUBLE, MPI_LONG_DOUBLE, "external32");
    OK(MPI_File_write_at(file, 0, numbers, 6, MPI_LONG_DOUBLE, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 0, again, 6, MPI_LONG_DOUBLE, MPI_STATUS_IGNORE));
    for (int i = 0; i < 6; i++)
        CHECK(memcmp(&numbers[i], &again[i], 10) == 0);
}

/* Fortran's types by precision and range, which are predefined although they have no names. */
static void by_range(void) {
    const struct {
        int precision, range, in_file;
    } wanted[] = {{6, 37, 4}, {15, 307, 8}, {7, MPI_UNDEFINED, 8}, {MPI_UNDEFINED, 38, 8}};
    const double d[4] = {1.5, -1.5, -1.5, 1.5};
    const float f[4] = {1.5f, -1.5f, -1.5f, 1.5f};
    const unsigned char raw_d[] = {D(0), D(1), D(1), D(0)}, raw_f[] = {F(0), F(1), F(1), F(0)};
    MPI_Datatype type, again, etype, filetype, strided, mixed;
    MPI_Offset at;
    char name[MPI_MAX_DATAREP_STRING];
    for (int i = 0; i < 4; i++)
        for (int parts = 1; parts <= 2; parts++) {
            int bytes = wanted[i].in_file;
            OK(parts == 1 ? MPI_Type_create_f90_real(wanted[i].precision, wanted[i].range, &type)
                          : MPI_Type_create_f90_complex(wanted[i].precision, wanted[i].range, &type));
            both_ways("a real or complex by range", type, bytes == 8 ? (const void *)d : f, 2 * parts * bytes,
                      bytes == 8 ? raw_d : raw_f, parts * bytes);
        }
    const int64_t numbers[2] = {-2, 0x123456789abcdef0};
    const unsigned char *expected[] = {(const unsigned char[]){0xff, 2}, (const unsigned char[]){B2}, (const unsigned char[]){B4},
                                       (const unsigned char[]){B8}};
    const int64_t short_numbers[3] = {0x02ff, 0x1234fffe, 0x12345678fffffffe}; /* two of each length */
    const int digits[] = {2, 4, 9, 18};
    for (int i = 0; i < 4; i++) {
        OK(MPI_Type_create_f90_integer(digits[i], &type));
        both_ways("an integer by range", type, i == 3 ? numbers : &short_numbers[i], 2 << i, expected[i], 1 << i);
    }
#ifdef OPEN_MPI
    /* MPICH has no type of 16 bytes by range. */
    const long double l[4] = {1.5L, -1.5L, -1.5L, 1.5L};
    OK(MPI_Type_create_f90_real(18, 4931, &type));
    both_ways("a long real by range", type, l, 10, (const unsigned char[]){Q(0), Q(1)}, 16);
    OK(MPI_Type_create_f90_complex(16, 30, &type));
    both_ways("a long complex by range", type, l, 10, (const unsigned char[]){Q(0), Q(1), Q(1), Q(0)}, 32);
#endif
    /* In views, alone and within other types: such a type is never a copy and must not be freed. */
    OK(MPI_Type_create_f90_real(15, 307, &type));
    view(type, type, "native");
    OK(MPI_File_get_view(file, &at, &etype, &filetype, name));
    CHECK(etype == type && filetype == type);
    MPI_Type_vector(2, 1, 2, type, &strided);
    MPI_Type_commit(&strided);
    double back[4] = {0};
    const char *reps[] = {"native", "external32"};
    for (int i = 0; i < 2; i++) {
        view(type, strided, reps[i]);
        OK(MPI_File_write_at(file, 0, d, 4, type, MPI_STATUS_IGNORE));
        OK(MPI_File_read_at(file, 0, back, 1, strided, MPI_STATUS_IGNORE));
        CHECK(back[0] == d[0] && back[2] == d[1]);
        OK(MPI_File_get_view(file, &at, &etype, &filetype, name));
        MPI_Type_free(&filetype);
    }
    OK(MPI_Type_create_f90_integer(9, &again));
    MPI_Datatype types[2] = {again, type};
    int lengths[2] = {1, 1};
    MPI_Aint places[2] = {0, 8};
    struct {
        int a;
        double b;
    } one = {-2, 1.5}, got = {0, 0};
    MPI_Type_create_struct(2, lengths, places, types, &mixed);
    MPI_Type_commit(&mixed);
    view(MPI_BYTE, MPI_BYTE, "external32");
    OK(MPI_File_write_at(file, 0, &one, 1, mixed, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 0, &got, 1, mixed, MPI_STATUS_IGNORE));
    CHECK(got.a == -2 && got.b == 1.5);
    unsigned char raw[12];
    const unsigned char lies[] = {0xff, 0xff, 0xff, 0xfe, D(0)};
    OK(MPI_File_read_at(file, 0, raw, 12, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(memcmp(raw, lies, 12) == 0);
    MPI_Type_free(&strided);
    MPI_Type_free(&mixed);
    OK(MPI_Type_create_f90_real(15, 307, &again));
    CHECK(again == type);
    CHECK(MPI_Type_size(type, &lengths[0]) == MPI_SUCCESS && lengths[0] == 8);
}

static void pairs(void) {
    struct {
        short value;
        int index;
    } s = {0x1234, -2}, s_back = {0, 0};
    struct {
        long value;
        int index;
    } l = {-2, 0x12345678}, l_back = {0, 0};
    unsigned char raw[16];
    view(MPI_BYTE, MPI_BYTE, "external32");
    OK(MPI_File_write_at(file, 0, &s, 1, MPI_SHORT_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_write_at(file, 6, &l, 1, MPI_LONG_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 0, &s_back, 1, MPI_SHORT_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 6, &l_back, 1, MPI_LONG_INT, MPI_STATUS_IGNORE));
    CHECK(s.value == s_back.value && s.index == s_back.index && l.value == l_back.value && l.index == l_back.index);
    OK(MPI_File_read_at(file, 0, raw, 14, MPI_BYTE, MPI_STATUS_IGNORE));
    const unsigned char expected[] = {0x12, 0x34, 0xff, 0xff, 0xff, 0xfe, B4};
    CHECK(memcmp(raw, expected, 14) == 0);
}

/* If types are shorter in the file, so are a view's displacements. */
static void shorter(void) {
    long mine[4] = {1, -2, 3, -4}, back[6] = {7, 7, 7, 7, 7, 7};
    unsigned char raw[24];
    MPI_Datatype strided, mixed;
    MPI_Status status;
    MPI_Offset at = -1;
    MPI_Aint extent = -1;
    MPI_Type_vector(2, 1, 2, MPI_LONG, &strided);
    MPI_Type_commit(&strided);
    view(MPI_LONG, strided, "external32");
    OK(MPI_File_get_type_extent(file, strided, &extent));
    CHECK(extent == 12);
    OK(MPI_File_get_byte_offset(file, 1, &at));
    CHECK(at == offset + 8);
    OK(MPI_File_get_byte_offset(file, 2, &at));
    CHECK(at == offset + 12);
    OK(MPI_File_seek(file, 0, MPI_SEEK_SET));
    OK(MPI_File_write(file, mine, 4, MPI_LONG, &status));
    CHECK(items(&status, MPI_LONG) == 4);
    OK(MPI_File_get_position(file, &at));
    CHECK(at == 4);
    OK(MPI_File_seek(file, 1, MPI_SEEK_SET));
    OK(MPI_File_read(file, back, 2, MPI_LONG, &status));
    CHECK(back[0] == -2 && back[1] == 3 && back[2] == 7);
    OK(MPI_File_get_position(file, &at));
    CHECK(at == 3);
    view(MPI_BYTE, MPI_BYTE, "native");
    OK(MPI_File_read_at(file, 0, raw, 24, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(raw[3] == 1 && raw[11] == 0xfe && raw[15] == 3 && raw[23] == 0xfc);
    /* A part of a mixed type at the end of the file is counted by its size in memory. */
    int lengths[2] = {1, 2};
    MPI_Aint places[2] = {0, 8};
    MPI_Datatype types[2] = {MPI_INT, MPI_LONG};
    struct {
        int a;
        long b[2];
    } two[2] = {{1, {2, 3}}, {4, {5, 6}}}, got[2] = {{0, {0, 0}}, {0, {0, 0}}};
    MPI_Type_create_struct(2, lengths, places, types, &mixed);
    MPI_Type_commit(&mixed);
    MPI_File alone;
    char own[4200];
    snprintf(own, sizeof own, "%s.%d", path, rank);
    OK(MPI_File_open(MPI_COMM_SELF, own, MPI_MODE_RDWR | MPI_MODE_CREATE | MPI_MODE_DELETE_ON_CLOSE, MPI_INFO_NULL, &alone));
    OK(MPI_File_set_view(alone, 0, MPI_INT, MPI_INT, "external32", MPI_INFO_NULL));
    OK(MPI_File_write_at(alone, 0, two, 2, mixed, MPI_STATUS_IGNORE));
    OK(MPI_File_get_size(alone, &at));
    CHECK(at == 24);
    OK(MPI_File_set_size(alone, 20));
    OK(MPI_File_read_at(alone, 0, got, 2, mixed, &status));
    int bytes = -1;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    CHECK(bytes == 20 + 12 && got[0].b[1] == 3 && got[1].a == 4 && got[1].b[0] == 5 && got[1].b[1] == 0);
    long large = 1L << 40;
    FAILS(MPI_ERR_CONVERSION, MPI_File_write_at(alone, 0, &large, 1, MPI_LONG, MPI_STATUS_IGNORE));
    OK(MPI_File_close(&alone));
    MPI_Type_free(&strided);
    MPI_Type_free(&mixed);
}

/* A representation registered by the program: an int is three bytes, most significant first. */
static int extent_calls, asked_wrongly;
static MPI_Datatype nine_digits = MPI_DATATYPE_NULL; /* an integer by range */
static int extent(MPI_Datatype type, MPI_Aint *bytes, void *state) {
    extent_calls++;
    asked_wrongly += state != &extent_calls;
    if (type != MPI_INT && type != nine_digits)
        return MPI_ERR_TYPE;
    *bytes = 3;
    return MPI_SUCCESS;
}

static int to_file(void *user, MPI_Datatype type, int count, void *in_file, MPI_Offset position, void *state) {
    MPI_Aint lb, step;
    MPI_Type_get_extent(type, &lb, &step);
    int each = 0;
    MPI_Type_size(type, &each);
    asked_wrongly += state != &extent_calls || each % (int)sizeof(int) != 0;
    if (step != each)
        return MPI_ERR_TYPE; /* the program's own limit */
    const int *from = (const int *)user + position;
    unsigned char *to = in_file;
    for (int i = 0; i < count * (each / 4); i++, to += 3) {
        to[0] = (unsigned char)(from[i] >> 16);
        to[1] = (unsigned char)(from[i] >> 8);
        to[2] = (unsigned char)from[i];
    }
    return MPI_SUCCESS;
}

static int from_file(void *user, MPI_Datatype type, int count, void *in_file, MPI_Offset position, void *state) {
    int each = 0;
    MPI_Type_size(type, &each);
    asked_wrongly += state != &extent_calls;
    int *to = (int *)user + position;
    const unsigned char *from = in_file;
    for (int i = 0; i < count * (each / 4); i++, from += 3)
        to[i] = from[0] << 16 | from[1] << 8 | from[2];
    return MPI_SUCCESS;
}

static int refuse(void *user, MPI_Datatype type, int count, void *in_file, MPI_Offset position, void *state) {
    (void)user, (void)type, (void)count, (void)in_file, (void)position, (void)state;
    return MPI_ERR_OTHER;
}

static int same_extent(MPI_Datatype type, MPI_Aint *bytes, void *state) {
    (void)state;
    MPI_Aint lb;
    return MPI_Type_get_extent(type, &lb, bytes);
}

static void own(void) {
    int mine[5] = {1, 0x123456, 3, 4, 5}, back[5] = {0};
    unsigned char raw[32];
    char name[MPI_MAX_DATAREP_STRING] = "";
    MPI_Datatype strided, three, etype, filetype;
    MPI_Status status;
    MPI_Offset at = -1;
    MPI_Aint bytes = 0;
    OK(MPI_Register_datarep("three bytes", from_file, to_file, extent, &extent_calls));
    FAILS(MPI_ERR_DUP_DATAREP, MPI_Register_datarep("three bytes", from_file, to_file, extent, NULL));
    FAILS(MPI_ERR_DUP_DATAREP, MPI_Register_datarep("native", from_file, to_file, extent, NULL));
    FAILS(MPI_ERR_ARG, MPI_Register_datarep("", from_file, to_file, extent, NULL));
    FAILS(MPI_ERR_ARG, MPI_Register_datarep("none", from_file, to_file, NULL, NULL));
    FAILS(MPI_ERR_UNSUPPORTED_DATAREP, MPI_File_set_view(file, 0, MPI_INT, MPI_INT, "none", MPI_INFO_NULL));
    FAILS(MPI_ERR_CONVERSION, MPI_File_set_view(file, 0, MPI_DOUBLE, MPI_DOUBLE, "three bytes", MPI_INFO_NULL));
    MPI_Type_vector(2, 1, 3, MPI_INT, &strided);
    MPI_Type_commit(&strided);
    view(MPI_INT, strided, "three bytes");
    CHECK(extent_calls > 0);
    OK(MPI_File_get_view(file, &at, &etype, &filetype, name));
    CHECK(strcmp(name, "three bytes") == 0);
    MPI_Type_free(&filetype);
    OK(MPI_File_get_type_extent(file, MPI_INT, &bytes));
    CHECK(bytes == 3);
    OK(MPI_File_get_byte_offset(file, 2, &at));
    CHECK(at == offset + 12);
    OK(MPI_File_write_at_all(file, 0, mine, 4, MPI_INT, &status));
    CHECK(items(&status, MPI_INT) == 4);
    OK(MPI_File_read_at_all(file, 1, back, 3, MPI_INT, &status));
    CHECK(items(&status, MPI_INT) == 3 && memcmp(back, mine + 1, 12) == 0);
    view(MPI_BYTE, MPI_BYTE, "native");
    OK(MPI_File_read_at(file, 0, raw, 24, MPI_BYTE, MPI_STATUS_IGNORE));
    CHECK(raw[2] == 1 && raw[9] == 0x12 && raw[10] == 0x34 && raw[11] == 0x56 && raw[14] == 3 && raw[23] == 4);
    /* A derived type of the program is passed to the functions unchanged. */
    MPI_Type_contiguous(2, MPI_INT, &three);
    MPI_Type_commit(&three);
    view(MPI_INT, MPI_INT, "three bytes");
    OK(MPI_File_write_at(file, 0, mine, 2, three, &status));
    CHECK(items(&status, three) == 2);
    memset(back, 0, sizeof back);
    OK(MPI_File_read_at(file, 0, back, 2, three, &status));
    CHECK(memcmp(back, mine, 16) == 0);
    FAILS(MPI_ERR_CONVERSION, MPI_File_write_at(file, 0, mine, 1, strided, MPI_STATUS_IGNORE));
    OK(MPI_Type_create_f90_integer(9, &nine_digits));
    OK(MPI_File_get_type_extent(file, nine_digits, &bytes));
    CHECK(bytes == 3);
    OK(MPI_File_write_at(file, 0, mine, 4, nine_digits, &status));
    CHECK(items(&status, nine_digits) == 4);
    memset(back, 0, sizeof back);
    OK(MPI_File_read_at(file, 0, back, 4, MPI_INT, &status));
    CHECK(memcmp(back, mine, 16) == 0);
    /*
     * A representation without conversion functions leaves data as they are. Then representations with a function for
     * one direction only.
     */
    OK(MPI_Register_datarep("as it is", MPI_CONVERSION_FN_NULL, MPI_CONVERSION_FN_NULL, same_extent, NULL));
    view(MPI_INT, MPI_INT, "as it is");
    OK(MPI_File_write_at(file, 0, mine, 5, MPI_INT, MPI_STATUS_IGNORE));
    view(MPI_INT, MPI_INT, "native");
    memset(back, 0, sizeof back);
    OK(MPI_File_read_at(file, 0, back, 5, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(memcmp(back, mine, sizeof mine) == 0);
    OK(MPI_Register_datarep("written alone", MPI_CONVERSION_FN_NULL, to_file, extent, &extent_calls));
    view(MPI_INT, MPI_INT, "written alone");
    OK(MPI_File_write_at(file, 0, mine, 5, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_CONVERSION, MPI_File_read_at(file, 0, back, 5, MPI_INT, MPI_STATUS_IGNORE));
    OK(MPI_Register_datarep("refused", refuse, refuse, same_extent, NULL));
    view(MPI_INT, MPI_INT, "refused");
    FAILS(MPI_ERR_CONVERSION, MPI_File_write_at(file, 0, mine, 5, MPI_INT, MPI_STATUS_IGNORE));
    FAILS(MPI_ERR_CONVERSION, MPI_File_read_at(file, 0, back, 5, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(asked_wrongly == 0);
    MPI_Type_free(&strided);
    MPI_Type_free(&three);
}

#if MPI_VERSION >= 4
static int large_to_file(void *user, MPI_Datatype type, MPI_Count count, void *in_file, MPI_Offset position, void *state) {
    return to_file(user, type, (int)count, in_file, position, state);
}
static int large_from_file(void *user, MPI_Datatype type, MPI_Count count, void *in_file, MPI_Offset position, void *state) {
    return from_file(user, type, (int)count, in_file, position, state);
}

static void large(void) {
    int mine[2] = {9, 8}, back[2] = {0};
    OK(MPI_Register_datarep_c("three bytes of many", large_from_file, large_to_file, extent, &extent_calls));
    view(MPI_INT, MPI_INT, "three bytes of many");
    OK(MPI_File_write_at(file, 0, mine, 2, MPI_INT, MPI_STATUS_IGNORE));
    OK(MPI_File_read_at(file, 0, back, 2, MPI_INT, MPI_STATUS_IGNORE));
    CHECK(back[0] == 9 && back[1] == 8);
}
#endif


int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2)
        return 2;
    path = argv[1];
    offset = rank * 1000;
    OK(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_RDWR | MPI_MODE_CREATE, MPI_INFO_NULL, &file));
    table();
    by_range();
    pairs();
    shorter();
    own();
#if MPI_VERSION >= 4
    large();
#endif
    OK(MPI_File_close(&file));
    return end();
}
