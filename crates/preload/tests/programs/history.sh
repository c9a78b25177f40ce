# A repository of some thousand files and some hundred commits: cloned, packed, checked, walked.
cd "$1" || exit 1
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
export GIT_AUTHOR_DATE='2001-01-01T00:00:00Z' GIT_COMMITTER_DATE='2001-01-01T00:00:00Z'
git init -q -b main made; cd made
awk 'BEGIN {
    for (c = 1; c <= 240; c++) {
        printf "commit refs/heads/main\ncommitter n <e> %d +0000\ndata %d\ncommit %03d\n", 1000000000 + c * 60, 11, c
        for (f = 0; f < 16; f++) {
            n = (c * 16 + f) * 7919 % 3001; text = sprintf("file %04d of commit %03d\n", n, c)
            for (l = 0; l < n % 40; l++) text = text sprintf("line %d of %d\n", l, n * (l % 5 ? 1 : c))
            printf "M %s inline d%d/e%d/f%d\ndata %d\n%s\n", n % 97 ? "100644" : "100755", n % 20, n % 7, n, length(text), text
        }
        if (c % 60 == 0) printf "reset refs/tags/v%d\nfrom refs/heads/main\n\n", c / 60
    }
    print "done"
}' | git fast-import --quiet --done; git reset -q --hard; git rev-parse HEAD HEAD~100; git ls-files | wc -l; git rev-list --count HEAD
echo loose > loose; git add loose; git commit -qm loose; git count-objects | cut -d' ' -f1; cd ..
git clone -q made cloned; git clone -q --no-local made sent; git clone -q --bare made bare.git; git clone -q --shared made shared; diff -r --exclude .git made cloned && diff -r --exclude .git made sent && echo clones are equal
cd cloned; git gc -q --aggressive --prune=now; git fsck --full --strict; git count-objects -v | grep -E '^(count|in-pack|packs|garbage|size-garbage)'; git rev-parse HEAD; git status --short | wc -l; git verify-pack .git/objects/pack/*.idx && echo pack is sound; git commit-graph write 2> /dev/null; git commit-graph verify 2> /dev/null; echo $?
git checkout -q v2; git status --short | wc -l; git ls-files | wc -l; git checkout -q main; git log --oneline -- d3 | wc -l; git log -p v1..v2 | cksum; git blame d1/e1/f1 2>&1 | cksum; git grep -l 'line 39' v3 | wc -l; git bisect start HEAD v1 > /dev/null 2>&1; git bisect run sh -c 'test ! -e loose' 2>&1 | grep -c 'is the first bad commit'; git bisect reset > /dev/null 2>&1
git checkout -q -b side v3; for i in 1 2 3 4 5; do echo "$i" >> "side$i"; git add -A; git commit -qm "side $i"; done; git rebase -q main 2> /dev/null; git log --oneline main..side | wc -l; git checkout -q main; git merge -q --no-ff -m merged side; git rev-parse HEAD^2; git format-patch -q -o ../patches main~3; ls ../patches | wc -l
git push -q ../bare.git HEAD:pushed; git -C ../bare.git fsck --full 2>&1 | grep -v '^Checking'; git -C ../bare.git rev-parse pushed; git repack -q -a -d -f --depth=5; git fsck --full; git prune; git reflog expire --expire=now --all; git gc -q --prune=now; git fsck --full --unreachable; cd ../shared; git fsck --full; git fetch -q ../cloned main; git rev-parse FETCH_HEAD
cd ..; git -C sent submodule -q add ../made sub 2> /dev/null; git -C sent sparse-checkout set d1 2> /dev/null; ls sent; git clone -q --depth 3 "file://$PWD/made" shallow; git -C shallow rev-list --count HEAD; tar cf - made | tar tf - | wc -l | awk '{print ($1 > 2000)}'; find made -path made/.git -prune -o -type f -print0 | sort -z | xargs -0 cat | cksum; rm -rf made cloned sent bare.git shared shallow patches; ls -A
