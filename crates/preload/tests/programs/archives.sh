cd "$1" || exit 1
mkdir -p src/d/e 'src/with blank'; echo 1 > src/1; echo 2 > src/d/2; ln -s ../1 src/d/l; ln src/1 src/d/h; head -c 300000 /dev/zero | tr '\0' q > src/big; mkfifo src/p
touch -d @1000 src/1 src/big src/p; touch -h -d @1000 src/d/l; chmod 750 src/d; chmod 4755 src/big; touch -d @2000 src/d/e src/d; printf 'a\nb\n' > "src/with blank/ü"
tar cf t.tar src; tar tvf t.tar | awk '{print $1,$2,$3,$6,$7,$8}' | wc -l; mkdir u; tar xpf t.tar -C u; diff -r --no-dereference --exclude p src u/src && echo same
stat -c '%a %Y %h %F' u/src/1 u/src/d u/src/d/e u/src/big u/src/p u/src/d/l; tar --compare -f t.tar && echo compared
echo new > src/new; tar uf t.tar src/new; tar rf t.tar src/1; tar tf t.tar | tail -2; tar xf t.tar -C u src/new; cat u/src/new; tar --delete -f t.tar src/new; tar tf t.tar | grep -c new
gzip -k src/big; gunzip -c src/big.gz | cmp - src/big && echo gzip; tar czf t.tgz src/d; tar tzf t.tgz | sort; (cd src; tar cf - .) | (mkdir v; cd v; tar xf -; ls)
tar cf s.tar --sparse src/big; tar xf s.tar -O src/big | cmp - src/big && echo sparse; tar xf t.tar --keep-old-files 2>&1 | grep -c 'Cannot open'; rm -rf u v; ls; rm -rf src; ls
find . -name '*.tar' | cpio -o --quiet 2>/dev/null | wc -c | awk '{print ($1 > 0)}'; xz -k t.tgz 2>/dev/null; ls -d t.t*; rm -f t.tgz.xz
