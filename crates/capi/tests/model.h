/* The model's functions of forebay.h; a part of interface.c, which defines CHECK. */
/* A calibration gives times, corrections change them, and nonsense is refused. */
static void model(forebay_pool *pool)
{
    struct forebay_calibration none = {{0}}, quick = {{0}}, other;
    struct forebay_corrections corrections = {{0}};
    struct forebay_times times, corrected;
    /* Four ranks on four nodes that interleave 16,384 runs of 64 bytes each. */
    struct forebay_pattern pattern = {
        .ranks = 4, .nodes = 4, .aggregators = 2, .bytes = 1 << 20, .run_bytes = 64, .gap_bytes = 192,
        .buffer_bytes = 4 << 20, .targets = 4, .writes = 1, .far = 1,
    };
    CHECK(forebay_model_calibration(pool, &quick) == 0);
    CHECK(forebay_model_predict(&none, &corrections, &pattern, &times) == -EINVAL);
    CHECK(forebay_model_quick(0, 900, 25000, 2, &quick) == -EINVAL);
    CHECK(forebay_model_quick(20000, 900, 25000, 2, &quick) == 0);
    /* Into one that is there, the measured values alone. */
    other = quick;
    CHECK(forebay_model_quick(30000, 900, 25000, 64, &other) == 0 && memcmp(&other, &quick, sizeof quick) != 0);
    CHECK(forebay_model_quick(20000, 900, 25000, 64, &other) == 0 && memcmp(&other, &quick, sizeof quick) == 0);
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &times) == 1);
    CHECK(times.collective_ns < times.independent_ns && times.collective_ns > 0);
    CHECK(times.independent_low_ns <= times.independent_ns && times.independent_ns <= times.independent_high_ns);
    CHECK(times.aggregators == 2);
    /* Of any number of them, one that is not slower. */
    pattern.fewer_aggregators = 1;
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &corrected) == 1);
    CHECK(corrected.aggregators >= 1 && corrected.aggregators <= 2 && corrected.collective_ns <= times.collective_ns);
    pattern.fewer_aggregators = 0;
    /* Nothing is slower where the call before has ended. */
    pattern.continued = 1;
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &corrected) == 1);
    CHECK(corrected.collective_ns <= times.collective_ns && corrected.independent_ns <= times.independent_ns);
    pattern.continued = 0;
    pattern.run_bytes = pattern.bytes;
    pattern.gap_bytes = 0;
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &corrected) == 0);
    CHECK(corrected.independent_plain_ns == corrected.independent_ns && corrected.collective_plain_ns > 0);
    int64_t plain = corrected.independent_plain_ns;
    CHECK(forebay_model_learn(&corrections, 1, 0, plain, 5 * plain) == 0);
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &times) >= 0);
    CHECK(times.independent_plain_ns == plain);
    CHECK(times.independent_ns == 2 * corrected.independent_ns || times.independent_ns == 2 * corrected.independent_ns + 1);
    CHECK(times.collective_ns == corrected.collective_ns);
    pattern.bytes = -1;
    CHECK(forebay_model_predict(&quick, &corrections, &pattern, &times) == -EINVAL);
    CHECK(forebay_model_learn(NULL, 1, 0, 1000, 5000) == -EFAULT);

    /* A document that the environment names, and one with an error. */
    char words[1024] = "";
    char path[] = "/tmp/forebay-model-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, "speed\n", 6) == 6 && close(fd) == 0);
    setenv("FOREBAY_MODEL", path, 1);
    CHECK(forebay_model_calibration(pool, &quick) == -EINVAL);
    forebay_attach_error(words, sizeof words);
    CHECK(strstr(words, "not `name = value`") != NULL);
    unlink(path);
    setenv("FOREBAY_MODEL", "/nowhere/model.toml", 1);
    CHECK(forebay_model_calibration(pool, &quick) == -ENOENT);
    setenv("FOREBAY_MODEL", "off", 1);
    CHECK(forebay_model_calibration(pool, &quick) == 0);
    unsetenv("FOREBAY_MODEL");
}
