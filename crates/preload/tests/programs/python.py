"""Python's own file functions in a directory: os, shutil, tempfile, mmap, subprocess, glob, pathlib."""
import glob
import mmap
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile

root = sys.argv[1]


def failing(call, *args, **more):
    try:
        return call(*args, **more)
    except OSError as error:
        return os.strerror(error.errno)


os.chdir(root)
print(os.getcwd())
os.makedirs("d/e/f")
pathlib.Path("d/x").write_text("hi")
os.symlink("x", "d/s")
print([(e.name, e.is_dir(), e.is_symlink(), e.inode() == e.stat(follow_symlinks=False).st_ino)
       for e in sorted(os.scandir("d"), key=lambda e: e.name)])
for top, directories, files in os.walk(root):
    print(top, sorted(directories), sorted(files))
with open("d/x") as f:
    by_name, by_descriptor = os.stat("d/x"), os.fstat(f.fileno())
    print(os.path.samestat(by_name, by_descriptor), by_name.st_mtime_ns == by_descriptor.st_mtime_ns, oct(by_descriptor.st_mode))
shutil.copytree("d", "d2", symlinks=True)
shutil.rmtree("d2")
shutil.move("d", "m")
print(os.path.exists("d2"), os.path.exists("d"), sorted(os.listdir("m")))
with tempfile.TemporaryDirectory(dir=root) as t, tempfile.NamedTemporaryFile(dir=t) as n:
    n.write(b"abc")
    n.flush()
    print(os.path.getsize(n.name))
with tempfile.TemporaryFile(dir=root) as t:
    t.write(b"q" * 1000)
    t.seek(0)
    print(len(t.read()))
fd = os.open("mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8192)
with mmap.mmap(fd, 8192) as m:
    m[0:5] = b"hello"
    m.flush()
print(os.pread(fd, 5, 0), os.stat("mapped").st_size)

print(subprocess.run(["cat", "m/x"], capture_output=True).stdout)
print(subprocess.run(["pwd"], cwd=root + "/m", capture_output=True).stdout, os.getcwd())
print(subprocess.check_output("ls; cat m/x", shell=True, cwd=root))
shutil.copy("/bin/echo", "own")
print(subprocess.check_output([root + "/own", "whole"]), subprocess.check_output(["./own", "relative"]))
print(subprocess.check_output(["own", "path"], env={**os.environ, "PATH": root + ":/bin"}))
pathlib.Path("script").write_text(f"#!{sys.executable} -u\nimport sys, os\nprint(sys.argv, os.getcwd())\n")
os.chmod("script", 0o755)
print(subprocess.check_output(["./script", "1"]), subprocess.check_output([root + "/script", "2"], cwd="/"))
for spawn, path in [(os.posix_spawn, root + "/own"), (os.posix_spawnp, "./own")]:
    sys.stdout.flush()
    print(os.waitpid(spawn(path, ["own", "spawned"], os.environ), 0)[1])
print(subprocess.run(["none"], cwd=root, shell=True, stderr=subprocess.DEVNULL).returncode)
print(failing(subprocess.run, ["./m/x"]), failing(subprocess.run, ["./none"]), failing(subprocess.run, ["ls"], cwd="none"))

print(sorted(glob.glob("m/*")), sorted(map(str, pathlib.Path(".").glob("**/*"))))
here = os.open("m", os.O_RDONLY)
print(sorted(os.listdir(here)), os.stat("x", dir_fd=here).st_size, os.readlink("s", dir_fd=here))
print(stat.S_ISDIR(os.fstat(here).st_mode), os.path.samestat(os.fstat(here), os.stat("m")))
os.mkdir("k", dir_fd=here)
os.rename("k", "kk", src_dir_fd=here, dst_dir_fd=here)
os.dup2(here, 77)
print(sorted(os.listdir(77)), sorted(os.listdir(here)))
os.fchdir(here)
print(os.getcwd(), sorted(os.listdir(".")), sorted(os.listdir("..")))
os.chdir("..")
os.utime("m/x", (1, 2))
os.utime("m", ns=(3, 4))
print(os.stat("m/x").st_mtime, os.stat("m/x").st_atime, os.stat("m").st_mtime_ns)
os.chmod("m/x", 0o640)
print(oct(os.stat("m/x").st_mode), os.access("m/x", os.R_OK), os.path.realpath("m/s"), os.path.samefile("m/x", "m/s"))
print(failing(os.rename, "m/x", "/proc/x"), failing(os.open, "m", os.O_WRONLY), failing(os.rmdir, "m"))
print(failing(os.listdir, "m/x"), failing(os.mkdir, "m"), failing(os.unlink, "m/none"), failing(open, "m/none/x", "w"))

child = os.fork()
if child == 0:
    pathlib.Path("child").write_text("by the child")
    os._exit(0)
os.waitpid(child, 0)
print(pathlib.Path("child").read_text(), os.statvfs(".").f_namemax)
os.umask(0o027)
pathlib.Path("masked").touch()
os.mkdir("masked-d")
print(oct(os.stat("masked").st_mode), oct(os.stat("masked-d").st_mode))
print(subprocess.run(["sh", "-c", "umask"], umask=0o077, capture_output=True).stdout)
pathlib.Path("masked2").touch()
print(oct(os.stat("masked2").st_mode))
os.mkfifo("fifo")
print(stat.S_ISFIFO(os.stat("fifo").st_mode))
os.truncate("m/x", 1)
os.remove("fifo")
print(os.path.getsize("m/x"), sorted(os.listdir()))
