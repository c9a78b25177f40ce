# fio writes patterns and verifies them, with each of its I/O engines.
cd "$1" || exit 1
job() { name=$1; shift; mkdir "$name"; fio --output-format=terse --terse-version=3 --name="$name" --directory="$PWD/$name" --size=2m --verify=crc32c --verify_fatal=1 --verify_state_save=0 --randseed=7 --fallocate=none --group_reporting "$@" > "$name.log" 2>&1; status=$?; grep -E 'verify|error|fio:' "$name.log" | head -3; awk -F';' -v name="$name" -v status=$status '$1 == 3 { print name, "status", status, "error", $5, "read", $6, "written", $47 }' "$name.log"; ls "$name" | wc -l; cat "$name"/* | wc -c; rm -rf "$name" "$name.log"; }
job psync --ioengine=psync --rw=randwrite --bs=4k
job pvsync --ioengine=pvsync2 --rw=write --bs=3k-48k --bs_unaligned
job sync --ioengine=sync --rw=rw --bs=16k --fsync=8
job mmap --ioengine=mmap --rw=randwrite --bs=4k
job mmapped --ioengine=mmap --rw=randrw --bs=8k --nrfiles=2
job uring --ioengine=io_uring --rw=randwrite --bs=4k --iodepth=16
job fixed --ioengine=io_uring --rw=randwrite --bs=8k --iodepth=8 --fixedbufs=1 --registerfiles=1
job libaio --ioengine=libaio --rw=randwrite --bs=4k --iodepth=8
job posixaio --ioengine=posixaio --rw=randwrite --bs=16k --iodepth=4
job many --ioengine=psync --rw=randwrite --bs=1k --numjobs=4 --nrfiles=16 --size=512k --thread
job meta --ioengine=psync --rw=randwrite --bs=4k --verify=meta --verify_backlog=64
ls
