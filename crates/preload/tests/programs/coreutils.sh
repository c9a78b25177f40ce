cd "$1" || exit 1
mkdir -p a/b/c; echo hello > a/f; cat a/f; wc -c a/f
ln -s f a/l; ln a/f a/h; ls -l a/f a/h a/l | awk '{print $1,$2,$5,$9,$10,$11}'; ls -lR a | awk '{print $1,$9}' | grep -v total
cp -a a a2; diff -r a a2 && echo same; cmp a/f a2/f && stat -c %h a2/f
mv a2 a3; ls a3; mv a3/f a3/b/; mv -T a3 a4; ls a4/b; mv -n a/f a4/b/f; cat a/f
rm -r a4; ls; rmdir a/b/c; rmdir a 2>&1 | sed 's/.*: //'; rm nothing 2>&1 | sed 's/.*: //'
stat -c '%F %a %h %s' a/f a/l; stat -L -c '%F %s' a/l; readlink a/l; readlink -f a/l; realpath a/l .
find . | sort; find . -type f -size -2 -exec cat {} \; ; find . -name 'h*' -delete; find . -newer a/l | sort | head -2
for i in 1 2 3 4 5 6 7 8 9; do echo $i > n$i; done; cat n?; ls n* | sort -r | head -1; du --apparent-size -b n1 | cut -f1
dd if=/dev/zero of=z bs=1k count=100 2>/dev/null; stat -c %s z; truncate -s 10 z; stat -c %s z
dd if=/dev/zero of=sparse bs=1 seek=1M count=1 2>/dev/null; stat -c %s sparse; cp --sparse=always sparse sp2; cmp sparse sp2 && echo equal
install -d inst/x; install -m 751 a/f inst/x/f; stat -c %a inst/x/f; chmod 600 inst/x/f; chmod -R u+rwX,go-rwx inst; stat -c %a inst inst/x/f
touch -d '2001-02-03 04:05:06.789' t; stat -c %Y t; touch -r t t2; stat -c %y t2; touch -h -d @5 a/l; stat -c %Y a/l; cp -p t t3; stat -c %Y t3
seq 1 5000 > seq; sort -R seq | sort -n -S 1k -T . > sorted; cmp seq sorted && echo sorted; split -l 1000 seq part.; cat part.* | cmp - seq && ls part.*
tail -n 1 seq; head -c 4 seq; shuf -n 1 -o one n1; cat one; tee teed < seq | md5sum; md5sum -- seq > sums; md5sum -c sums
echo x | tee -a n1 > /dev/null; cat n1; paste n1 n2; comm -12 n1 n2; join n1 n1; ln -sfn b a/l; readlink a/l; ln -f n1 n2; stat -c %h n1
mktemp -p . -d tmp.XXXX | sed 's/tmp\.....$/tmp/'; mktemp ./f.XXXXXX | sed 's/\.......$//'; rm -rf ./tmp.* ./f.*; unlink n3; link n4 n3; mkfifo p; stat -c %F p
chown "$(id -u):$(id -g)" n1 && chown -h "$(id -u)" a/l && echo owned; test -r n1 && test ! -x n1 && test -s n1 && test -L a/l && test n1 -ef n2 && echo tests
df . | wc -l; sync n1 && sync -f n1 && echo synced; shred -n 1 -u n9; ls n9 2>&1 | sed 's/.*: //'; tac n1; od -c n1; cksum n2; pwd; basename "$(pwd -P)" | wc -l
