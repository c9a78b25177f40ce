"""HDF5 files by h5py, arrays that are mapped files, and processes that share them."""
import hashlib
import multiprocessing
import os
import subprocess
import sys

import h5py
import numpy

root = sys.argv[1]
os.chdir(root)


def digest(path):
    with open(path, "rb") as f:
        return hashlib.md5(f.read()).hexdigest()


def fill(part):
    mapped = numpy.memmap("shared.dat", dtype="int64", mode="r+", shape=(8, 5000))
    mapped[part] = numpy.arange(5000) * (part + 1)
    mapped.flush()
    return int(mapped[part].sum())


def total(name):
    with h5py.File(name, "r") as f:
        return int(f["run/0/data"][...].sum())


if __name__ == "__main__":
    data = numpy.arange(200_000, dtype="float64").reshape(400, 500)
    with h5py.File("a.h5", "w") as f:
        for run in range(5):
            group = f.create_group(f"run/{run}")
            group.create_dataset("data", data=data + run)
            group.create_dataset("packed", data=data.astype("int32") % 7, chunks=(50, 50), compression="gzip", shuffle=True)
            group.attrs["number"] = run
        f["link"] = h5py.SoftLink("/run/3/data")
        f["outside"] = h5py.ExternalLink("b.h5", "/there")
        growing = f.create_dataset("growing", (0,), maxshape=(None,), chunks=(1000,), dtype="i8")
        for step in range(20):
            growing.resize((growing.shape[0] + 500,))
            growing[-500:] = step
        f.flush()
        print(sorted(f["run"]), growing[...].sum())
    with h5py.File("b.h5", "w", libver="latest") as f:
        f["there"] = [1, 2, 3]
    with h5py.File("a.h5", "a") as f:
        f["run/0/data"][10:20, ::7] = -1
        del f["run/4"]
        print(f["outside"][...], f["link"][0, :3], f["run/0/data"][...].sum(), f["run/1/packed"][...].sum(), dict(f["run/2"].attrs))
    try:
        with h5py.File("a.h5", "a"):
            print(subprocess.run([sys.executable, "-c", "import h5py; h5py.File('a.h5', 'a')"], stderr=subprocess.PIPE, text=True).stderr.strip().splitlines()[-1].split("(")[0])
        print(subprocess.run([sys.executable, "-c", f"import h5py; print(len(h5py.File('{root}/a.h5')['run']))"], stdout=subprocess.PIPE, text=True).stdout)
        h5py.File("none.h5", "r")
    except OSError as error:
        print(type(error).__name__, error.errno)
    # One writer, and readers that read while it writes.
    with h5py.File("swmr.h5", "w", libver="latest") as f:
        rows = f.create_dataset("rows", (0,), maxshape=(None,), chunks=(64,), dtype="i8")
        f.swmr_mode = True
        with h5py.File("swmr.h5", "r", swmr=True) as looking:
            for step in range(10):
                rows.resize((64 * (step + 1),))
                rows[-64:] = step
                rows.flush()
                looking["rows"].refresh()
                assert looking["rows"].shape == rows.shape and looking["rows"][-1] == step
        print(rows[...].sum())

    mapped = numpy.memmap("m.dat", dtype="float32", mode="w+", shape=(1000, 300))
    mapped[:] = 1.5
    mapped[::2, 5] = 7
    mapped.flush()
    seen = numpy.memmap("m.dat", dtype="float32", mode="r", shape=(1000, 300))
    private = numpy.memmap("m.dat", dtype="float32", mode="c", offset=1200, shape=(999, 300))
    private[:] = 0
    print(seen.sum(), private.sum(), os.path.getsize("m.dat"), digest("m.dat"))
    seen[0, 0] if seen.flags.writeable else None
    numpy.save("n.npy", data)
    numpy.savez_compressed("z.npz", first=data[:3], second=numpy.arange(5))
    loaded = numpy.load("n.npy", mmap_mode="r+")
    loaded[7] = 0
    del loaded
    print(numpy.load("n.npy").sum(), sorted(numpy.load("z.npz").files), digest("n.npy"))
    data[:10].tofile("raw")
    print(numpy.fromfile("raw").shape, numpy.loadtxt(["1 2", "3 4"]).sum())
    numpy.savetxt("t.txt", data[:2, :4])
    print(numpy.genfromtxt("t.txt").sum())

    numpy.memmap("shared.dat", dtype="int64", mode="w+", shape=(8, 5000)).flush()
    for how in ("fork", "spawn"):
        with multiprocessing.get_context(how).Pool(4) as pool:
            print(pool.map(fill, range(8)), pool.map(total, ["a.h5"] * 4))
    print(numpy.memmap("shared.dat", dtype="int64", mode="r").sum(), digest("shared.dat"), sorted(n for n in os.listdir() if n != "__pycache__"))
