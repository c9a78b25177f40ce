# configure, make, make check, make install, of a program with a library, in its directory and beside it.
cd "$1" || exit 1
mkdir -p src/lib src/tests src/build-aux; cd src
cat > configure <<'C'
#!/bin/sh
# Looks for things as configure scripts do: by compiling many small programs, with a log and a cache, and by sed.
srcdir=$(dirname "$0"); prefix=/usr/local; for a; do case $a in --prefix=*) prefix=${a#*=} ;; --srcdir=*) srcdir=${a#*=} ;; esac; done
rm -f conftest* confdefs.h config.cache; exec 5> config.log; exec 6>&1; trap 'rm -rf conftest* confdefs.h; exit 1' 1 2 15
echo "configured in $(basename "$(pwd)")" >&5; : > confdefs.h
try() { # NAME CODE: defines HAVE_NAME if the code compiles, links and runs
    { cat confdefs.h; echo "$2"; } > conftest.c; printf 'checking %s... ' "$1" >&6
    if ${CC-cc} -o conftest conftest.c >&5 2>&1 && ./conftest >&5; then echo "#define HAVE_$1 1" >> confdefs.h; echo "have_$1=yes" >> config.cache; echo yes >&6; else echo "/* #undef HAVE_$1 */" >> confdefs.h; echo no >&6; fi
    rm -rf conftest conftest.*
}
try STDINT_H '#include <stdint.h>
int main(void) { return sizeof(uint64_t) != 8; }'
try NONE_H '#include <none.h>
int main(void) { return 0; }'
for f in mmap openat linkat renameat2 no_such_call fdatasync; do try "$(echo $f | tr a-z A-Z)" "char $f(void); char (*volatile call)(void) = $f; int main(void) { return call == 0; }"; done
try LITTLE_ENDIAN 'int main(void) { int one = 1; return *(char *)&one != 1; }'
mkdir conftest.dir && echo x > conftest.dir/a && ln -s a conftest.dir/b && ln conftest.dir/a conftest.dir/c && test -L conftest.dir/b && test conftest.dir/a -ef conftest.dir/c && echo "#define HAVE_LINKS 1" >> confdefs.h; rm -rf conftest.dir
touch -d '2 hours ago' conftest.old; : > conftest.new; ls -t conftest.old conftest.new | head -1 | grep -q new && test conftest.new -nt conftest.old && echo the clock is sane >&6; rm -f conftest.*
printf '#! /bin/sh\nexec sed -e "s|@prefix@|%s|g" -e "s|@srcdir@|%s|g" -e "s|@CC@|%s|g"\n' "$prefix" "$srcdir" "${CC-cc}" > config.status; chmod +x config.status; mkdir -p lib tests
for f in Makefile lib/Makefile; do ./config.status < "$srcdir/$f.in" > "$f.tmp" && mv -f "$f.tmp" "$f"; echo "creating $f"; done
mv confdefs.h config.h.new; if cmp -s config.h.new config.h; then rm config.h.new; echo config.h is unchanged; else mv config.h.new config.h; echo creating config.h; fi; exec 5>&-
C
cat > Makefile.in <<'M'
srcdir = @srcdir@
VPATH = @srcdir@
CC = @CC@
CFLAGS = -O1 -g -I. -I$(srcdir)/lib
OBJECTS = main.o words.o $(patsubst %,part%.o,1 2 3 4 5 6 7 8 9)
all: prog
prog: $(OBJECTS) lib/libcount.a
	$(CC) -o $@ $(OBJECTS) -Llib -lcount
lib/libcount.a: force
	@$(MAKE) --no-print-directory -s -C lib libcount.a srcdir=$(abspath $(srcdir))/lib
%.o: %.c
	$(CC) $(CFLAGS) -MMD -MP -c -o $@ $<
$(patsubst %,part%.c,1 2 3 4 5 6 7 8 9): part%.c: $(srcdir)/part.in
	sed 's/@N@/$*/g' $< > $@.tmp && mv $@.tmp $@
check: prog
	@for t in $(srcdir)/tests/*.test; do if sh $$t ./prog > tests/log 2>&1; then echo "PASS $${t##*/}"; else echo "FAIL $${t##*/}"; cat tests/log; fi; done
install: all
	install -d $(DESTDIR)@prefix@/bin $(DESTDIR)@prefix@/lib $(DESTDIR)@prefix@/share/man
	install -s prog $(DESTDIR)@prefix@/bin/ && install -m 644 lib/libcount.a $(DESTDIR)@prefix@/lib/
	ln -sf prog $(DESTDIR)@prefix@/bin/program
clean:
	rm -f prog *.o *.d part?.c tests/log && $(MAKE) --no-print-directory -s -C lib clean
distclean: clean
	rm -f Makefile lib/Makefile config.*
force:
.PHONY: all check install clean distclean force
-include *.d
M
cat > lib/Makefile.in <<'M'
srcdir = @srcdir@/lib
VPATH = $(srcdir)
libcount.a: count.o more.o
	$(AR) rcs $@ $^
clean:
	rm -f *.o *.a
.SUFFIXES: .c .o
.c.o:
	@CC@ -O1 -fPIC -I.. -I$(srcdir) -c -o $@ $<
M
echo 'int count(const char *); int more(int);' > lib/count.h; printf '#include "count.h"\n#include "config.h"\nint count(const char *s) { int n = 0; while (*s) n += *s++ == 32; return n + 1; }\n' > lib/count.c; printf '#include "count.h"\nint more(int n) { return n + 1; }\n' > lib/more.c
printf '#include "count.h"\nint part@N@(int n) { return n + more(@N@); }\n' > part.in; printf '#include <string.h>\nint words(char *s) { int n = 0; for (s = strtok(s, " "); s; s = strtok(0, " ")) n++; return n; }\n' > words.c
{ printf '#include "config.h"\n#include "count.h"\n#include <stdio.h>\n#include <string.h>\nint words(char *);\n'; for i in 1 2 3 4 5 6 7 8 9; do echo "int part$i(int);"; done
printf 'int main(int c, char **v) { char text[200] = "one two three"; if (c > 1) { FILE *f = fopen(v[1], "r"); if (!f || !fgets(text, 200, f)) return 1; } int n = count(text);\n'; for i in 1 2 3 4 5 6 7 8 9; do echo "n = part$i(n);"; done; printf 'printf("%%d %%d %%s\\n", n, words(text), __FILE__ + (sizeof __FILE__ > 7 ? sizeof __FILE__ - 7 : 0)); return 0; }\n'; } > main.c
printf 'test "$($1)" = "57 3 main.c"\n' > tests/plain.test; printf 'echo a b c d > tests/in; "$1" tests/in | grep -q "^58 4"; e=$?; rm tests/in; exit $e\n' > tests/file.test; printf '"$1" tests/none; test $? = 1\n' > tests/none.test; chmod +x configure; touch -d '1 hour ago' *.c *.in lib/* tests/*; cd ..
(cd src; ./configure --prefix=/opt/x; make -s -j2; ls; make check; make -q && echo up to date; touch lib/more.c; make -n | wc -l; sed -i 's/more(/more(0 + /' part.in; make -s -j2 && make check; make -s install DESTDIR="$1/dest"; ls -lR ../dest | awk '{print $1, $9, $10, $11}' | grep -v total; ../dest/opt/x/bin/program; ./configure --prefix=/opt/x | tail -1; grep -c . config.log config.cache; cat config.h; make -s distclean; find . | sort)
mkdir beside; cd beside; ../src/configure --prefix="$1/own" > log; cat log; make -s -j4 install; make check; "$1/own/bin/prog"; nm -A lib/libcount.a | grep -c ' T '; objdump -d "$1/own/bin/prog" | grep -c . | awk '{print ($1 > 100)}'; gcov --version > /dev/null 2>&1 || echo none > /dev/null; cc -O1 --coverage -o covered ../src/words.c -xc - <<< 'int words(char *); int main(void) { char t[] = "a b"; return words(t) - 2; }' && ./covered && ls *.gcda; cc -shared -fPIC -o libwords.so ../src/words.c; cc -flto -O2 -o lto ../src/words.c -xc - <<< 'int words(char *); int main(void) { char t[] = "a b"; return words(t); }'; ./lto; echo $?; cd ..; rm -rf own beside; ls
