"""MPI-IO from Python: mpi4py_views.py FILE. A view that ranks take turns in, and the exception of a file that is not there."""
import sys

from mpi4py import MPI

name, comm = sys.argv[1], MPI.COMM_WORLD
file = MPI.File.Open(comm, name, MPI.MODE_RDWR | MPI.MODE_CREATE)
turn = MPI.BYTE.Create_vector(1, 4, 4).Create_resized(0, 4 * comm.size).Commit()
file.Set_view(comm.rank * 4, MPI.BYTE, turn)
file.Write_all(bytes([65 + comm.rank]) * 4096)
file.Sync()
comm.Barrier()
file.Sync()
file.Set_view(0)
found = bytearray(4096 * comm.size)
file.Read_at_all(0, found)
assert bytes(found) == b"".join(bytes([65 + r]) * 4 for r in range(comm.size)) * 1024, found[:64]
comm.Barrier()
requests = [file.Iwrite_at(4096 * comm.rank, bytes([97 + comm.rank]) * 100), comm.Ibarrier()]
MPI.Request.Waitall(requests)
back = bytearray(100)
file.Iread_at(4096 * ((comm.rank + 1) % comm.size), back).Wait()
assert bytes(back) == bytes([97 + (comm.rank + 1) % comm.size]) * 100, back
file.Close()
try:
    MPI.File.Open(comm, name + ".none", MPI.MODE_RDONLY)
    raise SystemExit("a file that is not there was opened")
except MPI.Exception as e:
    assert e.Get_error_class() == MPI.ERR_NO_SUCH_FILE, e
if comm.rank == 0:
    print("passed")
