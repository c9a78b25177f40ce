cd "$1" || exit 1
# Descriptors that stay open: for one program, for a function, for all later commands, and duplicated.
exec 3> log 4<> both 5>> app; echo to three >&3; echo to four >&4; (echo from a subshell >&3; exec 3>&-; echo lost 2>&1 >&3) 2>&1 | sed 's/.*: //'; bash -c 'echo from a program >&3'
put() { echo "put $1"; cat; } >&5; put one <<< 'here'; put two < log; exec 3>&- 5>&-; cat log app; exec 6< log; read -r -u 6 first; cat <&6; exec 6<&-; echo "$first"
exec 7>&1 > everything; echo hidden; ls -d log; exec >&7 7>&-; cat everything; { echo a; echo b >&2; } > out 2> err; cat out err; { echo c; echo d >&2; } &> all; sort all; exec 4<&-
exec {named}> named; echo "by a name" >&"$named"; exec {named}>&-; cat named; mapfile -t lines < everything; echo "${#lines[@]} ${lines[1]}"; while read -r a <&8 && read -r b <&9; do echo "$a/$b"; done 8< log 9< app
# Traps.
trap 'echo usr1 >> signals' USR1; trap 'echo term >> signals' TERM; trap 'echo exit >> signals; cat signals' EXIT; trap 'echo "err $?"' ERR; kill -USR1 $$; kill -TERM $$; kill -USR1 $$; cat signals; cat none 2> none.err; false; trap - ERR
(trap 'echo sub > sub; exit 4' TERM; kill -TERM $BASHPID; echo not here); echo $?; cat sub; bash -c 'trap "echo gone > gone" EXIT; cd /; exit 2'; echo $?; ls gone 2>&1 | sed 's/.*: //'; bash -c 'cd "$1"; trap "echo gone > gone" EXIT; exit 2' - "$1"; echo $?; cat gone
for i in 1 2 3 4 5; do kill -USR1 $$; echo "$i" > "while$i"; done; grep -c usr1 signals; cat while?; (trap '' INT; kill -INT $BASHPID; echo deaf > deaf); cat deaf; set -e; set +e
# Pipes, and process substitution.
seq 1 20000 | tee copy >(wc -l > counted) | tail -1; while [ ! -s counted ]; do sleep 0.01; done; cat counted; wc -l < copy; diff <(sort -n copy) <(seq 1 20000) && echo same; paste <(echo 1; echo 2) <(cat log | head -2); cat <(cat <(cat log)) | wc -l
seq 1 3 | while read -r n; do echo "$n" >> looped; cat looped | wc -l; done; yes | head -n 1000 | sort -u > y; cat y; seq 5 | (cd /; cat > "$OLDPWD/cd"; pwd); cat cd; set -o pipefail; cat none 2> /dev/null | cat; echo $?; set +o pipefail; echo "${PIPESTATUS[@]}"
coproc filter { sed -u 's/^/co /'; }; echo one >&"${filter[1]}"; read -r line <&"${filter[0]}"; echo "$line"; eval "exec ${filter[1]}>&-"; wait "$filter_PID"; echo $?; mkfifo ff; cat ff > from & echo through > ff; wait; cat from
for i in 1 2 3 4 5 6 7 8; do (for j in 1 2 3 4 5 6 7 8 9 10; do echo "$i" >> appended; done) & done; wait; sort appended | uniq -c | tr -s ' '; bash -c '(echo from the job > job; exit 3) & wait -n; echo $?; cat job'
for i in 1 2 3 4; do (exec 9> locked; for j in 1 2 3 4 5; do flock 9; n=$(cat counter 2> /dev/null); echo $((n + 1)) > counter; flock -u 9; done) & done; wait; cat counter; flock -n locked true && echo free; exec 9> locked; flock 9; flock -n locked echo wrong; echo $?; exec 9>&-
# A shell that changes into the directory and starts programs from it.
mkdir -p bin lib; cp "$(command -v ls)" bin/own-ls; printf '#!/usr/bin/env bash\n. "$(dirname "$0")/../lib/part"\nsay "$@"\n' > bin/say; echo 'say() { echo "said: $*" "$PWD"; }' > lib/part; chmod +x bin/say; ln -s say bin/also
bin/own-ls bin; ./bin/say one; (cd bin && ./say two && ./also three && ./own-ls ../lib); PATH=$PWD/bin:$PATH; say four; also five; hash -r; type -t say; command -v say; (cd / && say six); cd bin; PWD=wrong ./own-ls; cd "$1/lib/../bin/.."; pwd; exec -a shown bash -c 'echo $0; pwd; ls bin'
