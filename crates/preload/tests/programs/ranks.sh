# Four ranks that write one shared file and a file each: through MPI-IO, and through POSIX calls.
here=$(cd "$(dirname "$0")" && pwd); cd "$1" || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_plm=isolated
# Launchers that start and end at the same time remove each other's directory where they share it.
OMPI_MCA_orte_tmpdir_base=$(mktemp -d) && export OMPI_MCA_orte_tmpdir_base && trap 'rm -rf "$OMPI_MCA_orte_tmpdir_base"' EXIT
mpicc -O1 -Wall -o ranks "$here/ranks.c"
for io in ompio romio321; do mkdir $io; OMPI_MCA_io=$io mpirun -n 4 ./ranks $io; cat $io/shared $io/own? $io/posix | cksum; wc -c < $io/shared; od -An -td4 -j 4096 -N 16 $io/shared; ls $io; rm -rf $io; done
# Ranks of programs without MPI.
mpirun -n 4 sh -c 'r=$OMPI_COMM_WORLD_RANK; seq $((r * 1000)) $((r * 1000 + 999)) > own$r; dd if=own$r of=shared bs=500 seek=$((r * 10)) count=10 conv=notrunc,sync status=none; echo "rank $r" >> all; (cd "$1" && ls -d $PWD/ranks > at$r)' - "$1"
cat own? | cksum; cat at?; for r in 0 1 2 3; do dd if=shared bs=500 skip=$((r * 10)) count=9 status=none | cmp -n 3800 - own$r && echo rank $r is whole; done; sort all; rm -f ranks; ls
