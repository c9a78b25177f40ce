cd "$1" || exit 1
pwd; pwd -P; mkdir -p a/b; cd a/b; pwd; cd ..; pwd; cd - > /dev/null; pwd; (cd ../..; pwd; echo sub > s); cd ../..; cat s
echo one > app; echo two >> app; cat app; cat < app | tr a-z A-Z; exec 3> fd3; echo three >&3; exec 3>&-; cat fd3; exec 4<> fd3; read -r line <&4; echo "$line"
echo four >&4; exec 4>&-; cat fd3; cat <<X > here
text $((6 * 7))
X
cat here; set -o noclobber; echo again > here; echo $?; echo again >| here; set +o noclobber; cat here
touch x1 x2 x3 .hidden; echo x*; echo x?; echo .h*; echo */b; echo none*; shopt -s globstar nullglob dotglob; echo **; echo none*
[ -f here ] && [ -d a ] && [ ! -e gone ] && [ -r here ] && [ here -nt app ] && echo tests; trap 'echo trapped; cat here' EXIT
printf '#!/bin/sh\necho script "$0" "$@" in "$(pwd)"\n' > s.sh; chmod +x s.sh; ./s.sh x y; "$1/s.sh" q; PATH=$PATH:$1 s.sh via path; (cd a; ../s.sh up); sh s.sh w
printf 'echo plain $1\n' > plain; chmod +x plain; ./plain arg; cp /bin/echo own; ./own from here; PATH=$1:$PATH own by path; "$1/own" whole path; (exec ./own exec)
. ./plain; source ./s.sh; echo $(cat here) `cat here`; diff <(echo a) <(echo b); while read -r l; do echo "got $l"; done < app; cat nothing; cat app nothing 2> err; cat err
sleep 0 & wait $!; echo $?; (echo bg > bg; sleep 0) & wait; cat bg; mkfifo fifo; test -p fifo && rm fifo; test -p fifo || echo gone
rm -r a; umask 077; echo m > m; mkdir md; stat -c %a m md; umask 022; xargs -n 1 echo < app; env -C "$1" pwd; ls /nonexistent "$1/s" 2>&1
cd /; ls "$1/app"; cd "$1/../$(basename "$1")" && pwd; cd ../"$(basename "$1")" && pwd; echo ~+ ; pushd / > /dev/null; popd; kill -0 $$ && echo alive; echo done > "$1/done"; exit 3
