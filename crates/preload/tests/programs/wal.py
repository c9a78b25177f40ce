"""SQLite's write-ahead log, which is shared memory in a mapped file beside the database, under several processes."""
import hashlib
import os
import signal
import sqlite3
import sys

os.chdir(sys.argv[1])
ROWS = 600


def connection():
    made = sqlite3.connect("d.db", timeout=60, isolation_level=None)
    made.execute("pragma synchronous=normal")
    made.execute("pragma wal_autocheckpoint=50")
    return made


def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = work() or 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    return pid


def writer(name):
    def work():
        db = connection()
        for i in range(ROWS):
            db.execute("begin immediate")
            (total,) = db.execute("select n from total").fetchone()
            db.execute("insert into t(who, i, text) values (?, ?, ?)", (name, i, f"{name}{i}" * 40))
            db.execute("update total set n = ?", (total + 1,))
            db.execute("rollback" if i % 10 == 9 else "commit")
    return work


def reader():
    # A reader's view stays the same while others commit, and is complete: as many rows as the total says.
    db = connection()
    for _ in range(300):
        db.execute("begin")
        (total,) = db.execute("select n from total").fetchone()
        (count,) = db.execute("select count(*) from t").fetchone()
        (again,) = db.execute("select n from total").fetchone()
        db.execute("commit")
        if not total == count == again:
            print("torn:", total, count, again)
            return 1


first = connection()
print(first.execute("pragma journal_mode=wal").fetchone())
first.execute("create table t(who text, i integer, text text)")
first.execute("create table total(n integer)")
first.execute("insert into total values (0)")
print(sorted(os.listdir()))
first.close()
print(sorted(os.listdir()))
children = [child(writer("a")), child(writer("b")), child(reader), child(reader)]
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])

db = connection()
print(db.execute("select n from total").fetchone(), db.execute("select who, count(*), sum(i) from t group by who order by who").fetchall())
print(db.execute("pragma integrity_check").fetchone(), db.execute("pragma wal_checkpoint(truncate)").fetchone()[0], os.path.getsize("d.db-wal"))
digest = hashlib.md5()
for row in db.execute("select who, i, text from t order by who, i"):
    digest.update(repr(row).encode())
print(digest.hexdigest())


def dies():
    # Killed in the middle of a transaction whose pages are partly in the log.
    db = connection()
    db.execute("pragma cache_size=5")
    db.execute("begin immediate")
    for i in range(500):
        db.execute("insert into t(who, i, text) values ('dead', ?, ?)", (i, "x" * 1000))
    os.kill(os.getpid(), signal.SIGKILL)


print(os.waitstatus_to_exitcode(os.waitpid(child(dies), 0)[1]))
print(db.execute("select count(*) from t where who = 'dead'").fetchone(), db.execute("pragma integrity_check").fetchone())
db.execute("insert into t values ('after', 1, 'y')")
other = connection()
print(other.execute("select count(*) from t").fetchone())
other.execute("begin immediate")
try:
    busy = sqlite3.connect("d.db", timeout=0)
    busy.execute("insert into t values ('busy', 1, 'y')")
    print("not locked")
except sqlite3.OperationalError as error:
    print(error)
other.execute("rollback")
with sqlite3.connect("copy.db") as copy:
    db.backup(copy)
    print(copy.execute("select count(*) from t").fetchone())
db.execute("vacuum into 'small.db'")
print(sqlite3.connect("small.db").execute("pragma integrity_check").fetchone())
for each in (other, busy, copy):
    each.close()
print(db.execute("pragma journal_mode=delete").fetchone(), sorted(os.listdir()))
db.close()
print(sorted(os.listdir()))
