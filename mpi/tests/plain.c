/* Each rank writes a file by open(2) alone, as many programs do: plain DIRECTORY. */
#include "check.h"

#include <fcntl.h>

int main(int argc, char **argv) {
    begin(&argc, &argv);
    if (argc != 2)
        return 2;
    char name[4200];
    snprintf(name, sizeof name, "%s/plain.%d", argv[1], rank);
    int fd = open(name, O_WRONLY | O_CREAT, 0644);
    CHECK(fd >= 0 && write(fd, &rank, sizeof rank) == sizeof rank);
    close(fd);
    return end();
}
