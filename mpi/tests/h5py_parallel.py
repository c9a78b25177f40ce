"""Parallel HDF5 from Python: h5py_parallel.py FILE. Datasets of each layout, written by all ranks and read back.

Contiguous and chunked, independent and collective, with a fill value, a dimension that grows, and compression, which is
collective. The file is the same wherever it is written.
"""
import sys

from mpi4py import MPI
import h5py
import numpy as np

ROWS, COLUMNS = 24, 10
comm = MPI.COMM_WORLD
if not h5py.get_config().mpi:
    print("no parallel h5py")
    sys.exit(77)

mine = np.arange(COLUMNS) + 1000.0 * np.arange(ROWS)[:, None]
rows = slice(comm.rank, ROWS, comm.size)

with h5py.File(sys.argv[1], "w", driver="mpio", comm=comm) as f:
    for layout, options in [
        ("contiguous", {}),
        ("chunked", {"chunks": (5, 4), "maxshape": (None, COLUMNS), "fillvalue": -7}),
        ("compressed", {"chunks": (4, COLUMNS), "compression": "gzip", "shuffle": True}),
    ]:
        for kind in ["independent", "collective"]:
            if layout == "compressed" and kind == "independent":
                continue
            d = f.create_dataset(f"{layout}_{kind}", (ROWS, COLUMNS), dtype="f8", track_times=False, **options)
            if layout == "chunked":
                d.resize((ROWS + 3, COLUMNS))
            if kind == "collective":
                with d.collective:
                    d[rows] = mine[rows]
            else:
                d[rows] = mine[rows]
    f.attrs["title"] = "tested"

comm.Barrier()
with h5py.File(sys.argv[1], "r", driver="mpio", comm=comm) as f:
    assert len(f) == 5, list(f)
    for name, d in f.items():
        assert np.array_equal(d[:ROWS], mine), name
        if name.startswith("chunked"):
            assert np.all(d[ROWS:] == -7), name
if comm.rank == 0:
    print("passed")
