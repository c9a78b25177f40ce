cd "$1" || exit 1
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_AUTHOR_NAME=n GIT_AUTHOR_EMAIL=e GIT_COMMITTER_NAME=n GIT_COMMITTER_EMAIL=e
export GIT_AUTHOR_DATE='2001-01-01T00:00:00Z' GIT_COMMITTER_DATE='2001-01-01T00:00:00Z'
git init -q -b main r; cd r; for i in 1 2 3 4 5; do mkdir -p d$i; seq $i 200 > d$i/f; git add -A; git commit -qm c$i; done
git log --format=%h | wc -l; git rev-parse HEAD; git gc -q; git fsck --full; git status --short; echo change >> d1/f; git diff --stat; git stash -q; git status --short; git stash pop -q; git checkout -q d1/f
git checkout -qb other HEAD~2; echo o > o; git add o; git commit -qm other; git checkout -q main; git merge -q -m merged other; git rev-parse HEAD; ls; git mv d1 moved; git status --short | sort
git reset -q --hard; cd ..; git clone -q r s; diff -r --exclude .git r s && echo cloned; cd s; git pull -q; git tag t; git worktree add -q ../w t; ls ../w; git archive HEAD | tar t | wc -l; git grep -c 199 | wc -l; git clean -qxdf; git bundle create -q ../b HEAD; ls ..; rm -rf ../w
