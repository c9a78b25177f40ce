"""Two doors at once: random calls on the same names through the preload library and through the mount.

usage: two_doors.py PRELOADED MOUNTED SEED ACTORS STEPS [BIG]

Runs under the preload library. PRELOADED and MOUNTED are two paths of one directory of a pool. Each actor, a process, has
names of its own in shared directories, and keeps a model of what must be there. Each step is one call, or a few, through a
random door. After it the other door must show the acknowledged result: names, kinds, link counts, sizes, data.
"""
import ctypes, errno, os, random, stat, sys, time

libc = ctypes.CDLL(None, use_errno=True)
DIRECTORIES = ["", "a/", "b/", "a/c/"]
HELD_MAX = 4
AT_FDCWD, AT_SYMLINK_FOLLOW, RENAME_EXCHANGE = -100, 0x400, 2


class File:
    def __init__(self, ino, data):
        self.ino, self.data, self.names = ino, bytearray(data), 0


class Actor:
    def __init__(self, doors, seed, number, big):
        self.doors, self.number, self.big = doors, number, big
        self.random = random.Random(seed * 1000 + number)
        # A path → a File, the target of a link in bytes, or None for a directory.
        self.model = {}
        self.held = []
        self.history = []

    # -- choices

    def name(self):
        return self.random.choice(DIRECTORIES) + f"{self.number}.{self.random.randrange(6)}"

    def some(self, kind):
        found = sorted(name for name, node in self.model.items() if isinstance(node, kind))
        return self.random.choice(found) if found else None

    def bytes(self):
        kinds = [lambda: 0, lambda: self.random.randrange(1, 100), lambda: self.random.randrange(1, 70_000)]
        if self.random.random() < 0.05:
            kinds = [lambda: self.random.randrange(1 << 20, self.big)]
        return self.random.randbytes(self.random.choice(kinds)())

    def door(self):
        return self.random.randrange(2)

    def path(self, door, name):
        return self.doors[door] + name

    # -- checks

    def fail(self, what):
        last = "\n  ".join(self.history[-30:])
        raise SystemExit(f"actor {self.number}: {what}\nits last steps:\n  {last}")

    def check(self, name, door):
        "What a door shows of a name."
        path, where = self.path(door, name), f"{name} through door {door}"
        try:
            seen = os.lstat(path)
        except FileNotFoundError:
            if name in self.model:
                self.fail(f"{where} is missing")
            return
        if name not in self.model:
            self.fail(f"{where} is there, with inode {seen.st_ino} and {seen.st_size} bytes")
        node = self.model[name]
        if node is None:
            if not stat.S_ISDIR(seen.st_mode):
                self.fail(f"{where} is no directory: {seen}")
        elif isinstance(node, bytes):
            if not stat.S_ISLNK(seen.st_mode) or os.readlink(os.fsencode(path)) != node:
                self.fail(f"{where} is not the link to {node}: {seen}")
        else:
            if (seen.st_ino, seen.st_nlink, seen.st_size) != (node.ino, node.names, len(node.data)):
                self.fail(f"{where}: {seen}, expected inode {node.ino}, {node.names} links, {len(node.data)} bytes")
            if self.random.random() < 0.5:
                with open(path, "rb", buffering=0) as f:
                    self.same(where, node, f.read(), os.fstat(f.fileno()).st_size)

    def same(self, where, node, data, size=None):
        if data is None or bytes(data) != bytes(node.data) or size not in (None, len(node.data)):
            at = next((i for i, (x, y) in enumerate(zip(data, node.data)) if x != y), min(len(data), len(node.data)))
            self.fail(f"{where}: {len(data)} bytes, size {size}, expected {len(node.data)}; they differ at {at}: "
                      f"{bytes(data[at:at + 16])} for {bytes(node.data[at:at + 16])}")

    def check_listing(self, door, directory):
        mine = f"{self.number}."
        seen = sorted(name for name in os.listdir(self.path(door, directory)) if name.startswith(mine))
        expected = sorted(name[len(directory):] for name in self.model
                          if name.startswith(directory) and name[len(directory):].startswith(mine) and "/" not in name[len(directory):])
        if seen != expected:
            self.fail(f"{directory or '.'} through door {door} lists {seen}, expected {expected}")

    # -- steps; each returns the names that it changed

    def put(self, name, node):
        old = self.model.get(name)
        if isinstance(old, File):
            old.names -= 1
        self.model[name] = node
        if isinstance(node, File):
            node.names += 1

    def drop(self, name):
        node = self.model.pop(name)
        if isinstance(node, File):
            node.names -= 1

    def refused(self, call, *errnos):
        try:
            call()
        except OSError as e:
            if e.errno not in errnos:
                self.fail(f"{self.history[-1]}: {e}, expected {[errno.errorcode[n] for n in errnos]}")
            return
        self.fail(f"{self.history[-1]} succeeded, expected {[errno.errorcode[n] for n in errnos]}")

    def hold(self, fd, node):
        if len(self.held) < HELD_MAX and self.random.random() < 0.3:
            self.held.append((fd, node))
        else:
            os.close(fd)

    def write_all(self, fd, data, at):
        while data:
            n = os.pwrite(fd, data, at)
            data, at = data[n:], at + n

    def step_create(self, door):
        name, data = self.name(), self.bytes()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self.history[-1] += f" {name} {len(data)} bytes"
        if name in self.model:
            self.refused(lambda: os.open(self.path(door, name), flags), errno.EEXIST)
            return [name]
        fd = os.open(self.path(door, name), flags, 0o644)
        self.write_all(fd, data, 0)
        node = File(os.fstat(fd).st_ino, data)
        self.put(name, node)
        self.hold(fd, node)
        return [name]

    def step_unnamed(self, door):
        name, data = self.name(), self.bytes()
        self.history[-1] += f" {name} {len(data)} bytes"
        fd = os.open(os.path.dirname(self.path(door, name)) or ".", os.O_TMPFILE | os.O_RDWR, 0o644)
        self.write_all(fd, data, 0)
        def link():
            path = os.fsencode(self.path(door, name))
            if libc.linkat(AT_FDCWD, b"/proc/self/fd/%d" % fd, AT_FDCWD, path, AT_SYMLINK_FOLLOW) != 0:
                raise OSError(ctypes.get_errno(), "linkat")
        if name in self.model:
            self.refused(link, errno.EEXIST)
            os.close(fd)
        else:
            link()
            node = File(os.lstat(self.path(door, name)).st_ino, data)
            self.put(name, node)
            self.hold(fd, node)
        return [name]

    def step_overwrite(self, door):
        name = self.some(File)
        if name is None: return []
        node, data = self.model[name], self.bytes()
        self.history[-1] += f" {name} {len(data)} bytes"
        fd = os.open(self.path(door, name), os.O_WRONLY | os.O_TRUNC)
        node.data[:] = b""
        self.write_all(fd, data, 0)
        node.data[:] = data
        self.hold(fd, node)
        return [name]

    def step_append(self, door):
        name = self.some(File)
        if name is None: return []
        data = self.bytes()
        self.history[-1] += f" {name} {len(data)} bytes"
        with open(self.path(door, name), "ab", buffering=0) as f:
            f.write(data)
        self.model[name].data += data
        return [name]

    def modify(self, fd, node):
        data, at = self.bytes(), self.random.randrange(len(node.data) + 5000)
        self.history[-1] += f" {len(data)} bytes at {at} of {len(node.data)}"
        self.write_all(fd, data, at)
        if data:
            node.data += bytes(max(0, at - len(node.data)))
            node.data[at:at + len(data)] = data

    def step_modify(self, door):
        name = self.some(File)
        if name is None: return []
        self.history[-1] += f" {name}"
        fd = os.open(self.path(door, name), os.O_RDWR)
        self.modify(fd, self.model[name])
        self.hold(fd, self.model[name])
        return [name]

    def names_of(self, node):
        return [name for name, other in self.model.items() if other is node]

    def step_held(self, door):
        if not self.held: return []
        i = self.random.randrange(len(self.held))
        fd, node = self.held[i]
        names = self.names_of(node)
        self.history[-1] += f" {names}"
        choice = self.random.randrange(5)
        flags = libc.fcntl(fd, 3) & os.O_ACCMODE
        if choice == 0 and flags != os.O_RDONLY:
            self.modify(fd, node)
        elif choice == 1 and flags != os.O_RDONLY:
            size = self.random.randrange(len(node.data) * 2 + 10)
            self.history[-1] += f" ftruncate {size}"
            os.ftruncate(fd, size)
            node.data[size:] = bytes(max(0, size - len(node.data)))
        elif choice == 2 and flags != os.O_WRONLY:
            seen = os.fstat(fd)
            if (seen.st_nlink, seen.st_size) != (node.names, len(node.data)):
                self.fail(f"a held descriptor of {names}: {seen}, expected {node.names} links, {len(node.data)} bytes")
            self.same(f"a held descriptor of {names}", node, os.pread(fd, len(node.data) + 1, 0))
        elif choice == 3:
            os.fsync(fd)
        else:
            os.close(fd)
            del self.held[i]
        return names[:2]

    def step_truncate(self, door):
        name = self.some(File)
        if name is None: return []
        node = self.model[name]
        size = self.random.choice([0, len(node.data), self.random.randrange(len(node.data) * 2 + 10)])
        self.history[-1] += f" {name} {size}"
        os.truncate(self.path(door, name), size)
        node.data[size:] = bytes(max(0, size - len(node.data)))
        return [name]

    def step_unlink(self, door):
        name = self.name()
        self.history[-1] += f" {name}"
        if name not in self.model:
            self.refused(lambda: os.unlink(self.path(door, name)), errno.ENOENT)
        elif self.model[name] is None:
            self.refused(lambda: os.unlink(self.path(door, name)), errno.EISDIR)
        else:
            os.unlink(self.path(door, name))
            self.drop(name)
        return [name]

    def step_link(self, door):
        name, new = self.some(File), self.name()
        if name is None: return []
        self.history[-1] += f" {name} {new}"
        call = lambda: os.link(self.path(door, name), self.path(door, new))
        if new in self.model:
            self.refused(call, errno.EEXIST)
        else:
            call()
            self.put(new, self.model[name])
        return [name, new]

    def step_symlink(self, door):
        name, target = self.name(), self.random.choice([b"nowhere", b"../x", b"t" * 300])
        self.history[-1] += f" {name}"
        call = lambda: os.symlink(target, os.fsencode(self.path(door, name)))
        if name in self.model:
            self.refused(call, errno.EEXIST)
        else:
            call()
            self.model[name] = target
        return [name]

    def step_rename(self, door):
        old, new = self.name(), self.name()
        self.history[-1] += f" {old} {new}"
        call = lambda: os.rename(self.path(door, old), self.path(door, new))
        if old not in self.model:
            self.refused(call, errno.ENOENT)
        elif old == new:
            call()
        elif self.model[old] is None and new in self.model and self.model[new] is not None:
            self.refused(call, errno.ENOTDIR)
        elif self.model[old] is not None and new in self.model and self.model[new] is None:
            self.refused(call, errno.EISDIR)
        else:
            node = self.model[old]
            call()
            if isinstance(node, File) and self.model.get(new) is node:
                return [old, new]  # two names of one file: nothing happens
            self.put(new, node)
            self.drop(old)
        return [old, new]

    def step_exchange(self, door):
        old, new = self.name(), self.name()
        if old not in self.model or new not in self.model: return []
        self.history[-1] += f" {old} {new}"
        if libc.renameat2(AT_FDCWD, os.fsencode(self.path(door, old)), AT_FDCWD, os.fsencode(self.path(door, new)), RENAME_EXCHANGE) != 0:
            self.fail(f"{self.history[-1]}: {os.strerror(ctypes.get_errno())}")
        self.model[old], self.model[new] = self.model[new], self.model[old]
        return [old, new]

    def step_mkdir(self, door):
        name = self.name()
        self.history[-1] += f" {name}"
        call = lambda: os.mkdir(self.path(door, name))
        if name in self.model:
            self.refused(call, errno.EEXIST)
        else:
            call()
            self.model[name] = None
        return [name]

    def step_rmdir(self, door):
        name = self.name()
        self.history[-1] += f" {name}"
        call = lambda: os.rmdir(self.path(door, name))
        if name not in self.model:
            self.refused(call, errno.ENOENT)
        elif self.model[name] is not None:
            self.refused(call, errno.ENOTDIR)
        else:
            call()
            del self.model[name]
        return [name]

    STEPS = {
        step_create: 6, step_unnamed: 2, step_overwrite: 3, step_append: 3, step_modify: 4, step_held: 6, step_truncate: 2, step_unlink: 3,
        step_link: 2, step_symlink: 1, step_rename: 5, step_exchange: 1, step_mkdir: 1, step_rmdir: 1,
    }

    def step(self, number):
        call = self.random.choices(list(Actor.STEPS), Actor.STEPS.values())[0]
        door = self.door()
        self.history.append(f"{time.time():.3f} {number} door {door} {call.__name__[5:]}")
        try:
            changed = call(self, door)
            for name in changed:
                self.check(name, 1 - door)
                if self.random.random() < 0.3:
                    self.check(name, door)
            if self.random.random() < 0.1:
                self.check_listing(self.door(), self.random.choice(DIRECTORIES))
        except OSError as e:
            self.fail(f"{self.history[-1]}: {e}")

    def run(self, steps):
        for number in range(steps):
            self.step(number)
        for fd, _ in self.held:
            os.close(fd)
        for door in (0, 1):
            for name in sorted(self.model):
                self.check(name, door)
            for directory in DIRECTORIES:
                self.check_listing(door, directory)


def main():
    preloaded, mounted, seed, actors, steps = sys.argv[1:6]
    big = int(sys.argv[6]) if len(sys.argv) > 6 else 4 << 20
    doors = [preloaded + "/", mounted + "/"]
    for directory in DIRECTORIES[1:]:
        os.makedirs(doors[0] + directory, exist_ok=True)
    children = []
    for number in range(int(actors)):
        pid = os.fork()
        if pid == 0:
            try:
                Actor(doors, int(seed), number, big).run(int(steps))
            except BaseException as e:
                if not isinstance(e, SystemExit):
                    import traceback
                    traceback.print_exc()
                print(e, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    sys.exit(f"{failed} actors failed" if failed else 0)


main()
