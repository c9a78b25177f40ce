cd "$1" || exit 1
cat > main.c <<'C'
#include <stdio.h>
#include "sub/half.h"
int main(int c, char **v) { (void)c; printf("%s %d\n", v[0], half(84)); return 0; }
C
mkdir sub; echo 'int half(int);' > sub/half.h; echo 'int half(int x) { return x / 2; }' > sub/half.c
printf 'prog: main.o sub/half.o\n\t$(CC) -o $@ $^\n%%.o: %%.c sub/half.h\n\t$(CC) -c -O1 -o $@ $<\nclean:\n\trm -f prog *.o sub/*.o\n.PHONY: clean\n' > Makefile
make -s && ./prog && "$1/prog"; make -s && echo nothing to do; touch -d '1 hour ago' main.o sub/half.o prog; touch sub/half.h; make | wc -l; make -j4 -s clean; ls; make -s -j4 -C "$1" prog; (cd sub; ../prog)
ar rc libhalf.a sub/half.o; ranlib libhalf.a; cc -o linked main.c -L. -lhalf && ./linked; ar t libhalf.a; nm linked | grep -c ' T half'; strip linked; ./linked; file prog 2>/dev/null | cut -c1-30
cc -E main.c -o main.i; grep -c half main.i; cc -MM main.c; cc -c nothing.c 2>&1 | grep -c 'No such file'; cc -g -save-temps -c main.c; ls main.*; objdump -f prog | grep -c 'file format'; cp prog copy; mv copy moved; ./moved
